"""Log files of ranks: rotation, reading by offset, following, error tails."""

import asyncio
import os
import resource
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua.daemon.node.logs import file as log_file
from bagua.daemon.node.logs.echo import Echo, RankEcho
from bagua.daemon.node.logs.file import LogFile, LogLimits
from bagua.daemon.node.logs.output import ERROR_TAIL_BYTES, error_reason, error_tail


async def read_all(log, offset=0, limit=7):
    """(data, bytes missing before it)"""
    blocks, missing = [], 0
    while True:
        piece = await log.read(offset, limit)
        missing += piece.missing
        if not piece.data and not piece.missing:
            return b"".join(blocks), missing
        blocks.append(piece.data)
        offset = piece.end


def everything(log, offset=0, limit=7):
    return asyncio.run(read_all(log, offset, limit))[0]


def test_the_echo_says_whose_each_line_is():
    reader, writer = os.pipe()
    echo = Echo(writer)
    first, second = RankEcho(echo, 0), RankEcho(echo, 1)
    for rank, data in ((first, b"a"), (second, b"b\nc\n"), (first, b"d\n\ne"), (second, b"")):
        rank.add(data)
    first.close()
    second.close()
    echo.close(10)
    assert os.read(reader, 1000) == b"[rank 1] b\n[rank 1] c\n[rank 0] ad\n[rank 0] \n[rank 0] e\n"
    os.close(reader)
    os.close(writer)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 4))
def test_rotation_keeps_the_newest(tmp_path_factory, writes, files):
    path = tmp_path_factory.mktemp("log") / "rank-0.log"
    log = LogFile(path, LogLimits(max_bytes=32, files=files))
    for data in writes:
        assert log.write(data) == ""
    whole = b"".join(writes)
    assert log.end == len(whole) and everything(log, log.start) == whole[log.start :]
    assert log.end - log.start <= 32 * files and (log.start == 0 or log.end - log.start > 32 * (files - 1))
    log.close()
    past = LogFile.of_the_past(path)
    assert (past.start, past.end, past.closed) == (log.start, log.end, True), "offsets survive the daemon"
    assert everything(past, past.start) == whole[log.start :]
    assert len(list(path.parent.glob("*.log*"))) <= files + 1
    assert len(os.listdir(path.parent)) <= files + 1, "the files, and one that says how much is gone"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([b"a", b"bc", b"x" * 20]), min_size=1, max_size=40), st.integers(1, 4))
def test_rotated_logs_begin_with_a_whole_line_and_count_what_is_gone(tmp_path_factory, lines, files):
    log = LogFile(tmp_path_factory.mktemp("log") / "rank-0.log", LogLimits(max_bytes=32, files=files))
    text = b"".join(line + b"\n" for line in lines)
    log.write(text)
    data, missing = asyncio.run(read_all(log, limit=64))
    assert text[missing:] == data and missing >= log.start
    assert missing == 0 or text[missing - 1 : missing] == b"\n"
    log.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([b"", b"a", b"bc", b"\xff" * 20]), max_size=12), st.booleans(), st.integers(1, 9))
def test_tail(tmp_path_factory, lines, ended, count):
    log = LogFile(tmp_path_factory.mktemp("log") / "x.log", LogLimits(max_bytes=50, files=9))
    text = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    log.write(text)
    expected = b"".join(text.splitlines(keepends=True)[-count:])
    assert everything(log, asyncio.run(log.tail_offset(count))) == expected
    assert asyncio.run(log.tail_offset(0)) == 0
    log.close()


async def test_a_disk_that_stands_still_does_not_hold_up_the_loop(tmp_path, monkeypatch):
    """The disk answers only after the loop has gone on: on the loop itself both calls would never return."""
    log = LogFile(tmp_path / "x.log")
    log.write(b"\n" * 1_000_000)
    answer, pread = threading.Event(), os.pread

    def slow(*arguments):
        assert answer.wait(20), "the loop did not go on"
        return pread(*arguments)

    monkeypatch.setattr(log_file.os, "pread", slow)
    calls = asyncio.gather(log.tail_offset(4_000_000_000), log.tail_offset(3), log.read(0, 5))
    asyncio.get_running_loop().call_later(0, answer.set)
    everything_of_it, third_last, piece = await asyncio.wait_for(calls, 30)
    assert (everything_of_it, third_last, piece.data) == (0, 999_997, b"\n" * 5)
    log.close()


def test_a_rotation_that_fails_is_made_later(tmp_path):
    log = LogFile(tmp_path / "x.log", LogLimits(max_bytes=200, files=3))
    log.write(b"a" * 200)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # no file can be opened now
    try:
        assert "can't be written" in log.write(b"lost")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert log.write(b"b" * 10) == ""
    log.close()
    assert (tmp_path / "x.log.1").read_bytes() == b"a" * 200
    assert b"4 bytes of output are missing" in (tmp_path / "x.log").read_bytes()


async def test_a_log_says_how_much_a_full_disk_cost(tmp_path, monkeypatch):
    log = LogFile(tmp_path / "x.log")
    log.write(b"before\n")
    write = os.write

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_file.os, "write", full)
    assert "No space left on device" in log.write(b"lost\n")
    assert log.write(b"lost too\n") == "", "said once"
    monkeypatch.setattr(log_file.os, "write", write)
    assert log.write(b"after\n") == ""
    marker = b"\n[bagua: 14 bytes of output are missing here: No space left on device]\n"
    assert (await read_all(log, limit=1000))[0] == b"before\n" + marker + b"after\n"
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


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ("", ""),
        ("sh: 1: no-such: not found", "sh: 1: no-such: not found"),
        ("Traceback (most recent call last):\n  File x\n    f()\nA: b\n  c\nd", "A: b\n  c\nd"),
        ("[rank1]: Traceback (most recent call last):\n[rank1]:   File x\n[rank1]: A: b", "A: b"),
        (
            "  + Exception Group Traceback (most recent call last):\n  |   File x\n  | ExceptionGroup: two\n"
            "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n    |   File y\n"
            "    | KeyError: 1\n    +------------------------------------",
            "ExceptionGroup: two\nKeyError: 1",
        ),
        (
            "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
            '  File "a.py", line 3 in f',
            'Fatal Python error: Segmentation fault, in File "a.py", line 3 in f',
        ),
    ],
)
def test_reasons(tail, reason):
    assert error_reason(error_tail(tail.encode())) == reason
