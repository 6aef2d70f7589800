"""Log files of ranks: rotation, reading by offset, following, error tails."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from bagua.daemon.node.logs import ERROR_TAIL_BYTES, LogFile, LogLimits, error_tail


def everything(log, offset=0, limit=7):
    blocks = []
    while True:
        offset, data = log.read(offset, limit)
        if not data:
            return b"".join(blocks)
        blocks.append(data)
        offset += len(data)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 4))
def test_rotation_keeps_the_newest(tmp_path_factory, writes, files):
    path = tmp_path_factory.mktemp("log") / "rank-0.log"
    log = LogFile(path, LogLimits(max_bytes=32, files=files))
    for data in writes:
        assert log.write(data) == ""
    whole = b"".join(writes)
    assert log.end == len(whole) and everything(log) == whole[log.start :]
    assert log.end - log.start <= 32 * files and (log.start == 0 or log.end - log.start > 32 * (files - 1))
    log.close()
    past = LogFile.of_the_past(path)
    assert everything(past) == whole[log.start :] and past.closed
    assert len(list(path.parent.iterdir())) <= files


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([b"", b"a", b"bc", b"\xff" * 20]), max_size=12), st.booleans(), st.integers(1, 9))
def test_tail(tmp_path_factory, lines, ended, count):
    log = LogFile(tmp_path_factory.mktemp("log") / "x.log", LogLimits(max_bytes=50, files=9))
    text = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    log.write(text)
    expected = b"".join(text.splitlines(keepends=True)[-count:])
    assert everything(log, log.tail_offset(count)) == expected
    assert log.tail_offset(0) == 0
    log.close()


def test_the_tail_of_a_long_log(tmp_path):
    log = LogFile(tmp_path / "x.log", LogLimits(max_bytes=100_000, files=9))
    lines = [b"%d %s\n" % (i, b"x" * (i % 300)) for i in range(3000)]
    log.write(b"".join(lines))
    assert everything(log, log.tail_offset(2000), 1 << 20) == b"".join(lines[-2000:])
    log.close()


async def test_readers_are_told(tmp_path):
    log = LogFile(tmp_path / "x.log")
    waits = [asyncio.ensure_future(log.changed(0)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(wait.done() for wait in waits)
    log.write(b"x")
    await asyncio.wait_for(asyncio.gather(*waits), 1)
    await log.changed(0)
    last = asyncio.ensure_future(log.changed(1))
    cancelled = asyncio.ensure_future(log.changed(1))
    await asyncio.sleep(0)
    cancelled.cancel()
    log.close()
    await asyncio.wait_for(last, 1)
    log.close()


def test_a_file_that_is_gone_or_can_not_be_written(tmp_path):
    path = tmp_path / "x.log"
    log = LogFile(path, LogLimits(max_bytes=10, files=2))
    log.write(b"12345")
    path.unlink()
    assert log.read(0) == (5, b"")
    path.mkdir()  # the next rotation fails
    (path / "x").touch()
    (tmp_path / "x.log.1").mkdir()
    (tmp_path / "x.log.1" / "y").touch()
    assert "can't be written" in log.write(b"67890abc")
    assert log.write(b"more") == "", "said once"
    log.close()


def test_error_tails():
    assert error_tail(b"") == ""
    assert error_tail(b"".join(b"%d\n" % i for i in range(100))) == "\n".join(map(str, range(80, 100)))
    noise = b"warning\n" * 50
    first = b"Traceback (most recent call last):\n  a\nKeyError: 1\n\nDuring ...\n\n"
    last = b"Traceback (most recent call last):\n  b\nValueError: 2\n"
    assert error_tail(noise + first + last) == last.decode().strip()
    assert error_tail(b"[rank1]: " + last).startswith("[rank1]: Traceback")
    long = error_tail(b"Traceback (most recent call last):\n" + b"x" * 30000 + b"\nEnd: 3")
    assert len(long) < ERROR_TAIL_BYTES + 10 and long.startswith("Traceback") and long.endswith("End: 3")
    assert error_tail(b"\xff\xfe") == "\ufffd\ufffd"
