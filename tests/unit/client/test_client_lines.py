"""Assembling a rank's output into lines."""

from bagua.client.lines import MAX_PARTIAL_BYTES, LineAssembler


def test_chunks_that_end_anywhere():
    lines = LineAssembler()
    text = "Grüße\nzwei\n".encode()
    found = [line for i in range(len(text)) for line in lines.feed(text[i : i + 1], now=0.0)]
    assert found == ["Grüße", "zwei"]
    assert lines.finish() == []


def test_redraws_are_thinned_and_the_last_one_stays():
    lines = LineAssembler()
    found = []
    for i in range(18):
        found += lines.feed(b"\r%d %%" % i, now=i * 0.25)
    assert found == ["0 %", "4 %", "8 %", "12 %", "16 %"]
    assert lines.feed(b"\r100 %\ndone\n", now=5.0) == ["100 %", "done"]


def test_redraw_ending_with_the_carriage_return():
    lines = LineAssembler()
    found = lines.feed(b"10 %\r", 0.0) + lines.feed(b"20 %\r", 2.0) + lines.feed(b"30 %\n", 4.0)
    assert found == ["10 %", "30 %"]


def test_endless_line_is_cut():
    lines = LineAssembler()
    assert len(lines.feed(b"x" * (MAX_PARTIAL_BYTES + 1), 0.0)) == 1
    assert lines.finish() == []
