"""Logs of ranks over the stream: reading, following, the end, rotation."""

import os
from pathlib import Path

from bagua.proto import node_pb2

LINES = "for i in range({}): print('line', i)\n"


async def read(end, request_id, job_id="job", rank=0, **options):
    await end.send(read_log=node_pb2.ReadLog(request_id=request_id, job_id=job_id, rank=rank, **options))


async def all_of(end, request_id, job_id="job", rank=0, **options):
    """(data, last chunk)"""
    await read(end, request_id, job_id, rank, **options)
    await end.until(lambda: request_id in end.log_ends)
    return end.logs[request_id], end.log_ends[request_id]


async def test_reading_an_ended_rank(end, daemon, script):
    await end.run_script("job", script(LINES.format(5000)))
    job = await end.exited("job")
    expected = Path(job.ranks[0].log_path).read_bytes()
    for request, (options, data) in enumerate(
        (
            ({}, expected),
            ({"tail_lines": 3}, b"line 4997\nline 4998\nline 4999\n"),
            ({"offset": 100, "tail_lines": 3}, expected[100:]),  # a reader that goes on where it was
            ({"follow": True}, expected),
            ({"offset": 10_000, "max_bytes": len(expected) - 9_999}, expected[10_000:]),
        ),
        start=1,
    ):
        found, last = await all_of(end, request, **options)
        assert found == data and last.eof and last.offset == len(expected) and not last.error, options
    data, last = await all_of(end, 6, max_bytes=10_000, follow=True)
    assert data == expected[:10_000] and last.more and not last.eof, "as much as there is room for"
    for request, (job_id, rank) in enumerate([("other", 0), ("job", 7), ("../job", 0)], 7):
        data, last = await all_of(end, request, job_id, rank)
        assert data == b"" and last.eof and "has no log of rank" in last.error
    await end.end_job()
    assert (await all_of(end, 10))[0] == expected, "logs outlive the job"


async def test_following_from_before_the_start(end, daemon, script, tmp_path):
    """Several readers, each from where it likes; they end when the rank does."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    text = f"import sys\nprint('first', flush=True)\nopen({str(gate)!r}).read()\nprint('last', file=sys.stderr)\n"
    await end.run_script("job", script(text))
    await read(end, 11, follow=True)
    await end.until(lambda: b"first\n" in end.logs.get(11, b""))
    await read(end, 12, follow=True, tail_lines=1)
    await read(end, 13, follow=True)
    await end.until(lambda: b"first\n" in end.logs.get(13, b""))
    await end.send(end_log=node_pb2.EndLog(request_id=13))
    await all_of(end, 14, "job", 7)  # answered after that was heard
    assert 11 not in end.log_ends
    gate.write_text("")
    await end.until(lambda: {11, 12} <= end.log_ends.keys())
    assert end.logs[11] == end.logs[12] == b"first\nlast\n"
    assert end.logs[13] == b"first\n" and 13 not in end.log_ends


async def test_rotation(end, start_daemon, script):
    options = ("--log-max-bytes", "10000", "--log-files", "3")
    daemon = await start_daemon(*options)
    await end.run_script("job", script(LINES.format(10000)))
    job = await end.exited("job")
    current = Path(job.ranks[0].log_path)
    files = [current.with_name(current.name + suffix) for suffix in (".2", ".1", "")]
    assert [file.stat().st_size for file in files[:2]] == [10000, 10000]
    assert {file.name for file in current.parent.iterdir()} - {file.name for file in files} == {"rank-0.log.start"}
    whole = "".join(f"line {i}\n" for i in range(10000)).encode()
    kept = b"".join(file.read_bytes() for file in files)

    async def check(request):
        data, last = await all_of(end, request)
        assert last.offset == len(whole), "offsets count from the rank's start"
        assert data == whole[end.missing[request] :] and data.startswith(b"line "), "whole lines"
        assert 0 <= end.missing[request] - (len(whole) - len(kept)) <= 10, "how much is gone is told"
        assert (await all_of(end, request + 1, tail_lines=900))[0].count(b"\n") == 900
        assert end.missing[request + 1] == 0, "as many as were wanted are there"

    await check(1)
    await end.end_job()
    daemon.stop()
    await start_daemon(*options)
    await check(3)


async def test_a_flood_of_output_harms_nobody(end, daemon, script):
    """The last of stderr is kept though there was much, and the daemon stays attentive."""
    text = "import sys\nfor i in range(200000): print('x' * 90)\nprint('y' * 300000, file=sys.stderr)\n"
    text += "raise KeyError('end')\n"
    await end.run_script("job", script(text), env={"PYTHONUNBUFFERED": ""})
    job = await end.exited("job")
    assert job.ranks[0].error_tail.endswith("KeyError: 'end'") and len(job.ranks[0].error_tail) < 8400
    assert Path(job.ranks[0].log_path).stat().st_size > 18_000_000
