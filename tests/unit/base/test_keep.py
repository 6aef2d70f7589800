"""How much of the past is kept: the option, and the logs of a node."""

import math
import os

import pytest

from bagua.base.errors import ConfigError
from bagua.base.retention import NO_NUMBER, Keep, parse_keep
from bagua.daemon.node.jobs.jobs import past_keeping

DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("30d,10000", Keep()),
        ("12h", Keep(43_200.0, NO_NUMBER)),
        ("500", Keep(math.inf, 500)),
        ("7d, 20", Keep(7 * DAY_S, 20)),
        ("7d,20,10G", Keep(7 * DAY_S, 20, 10 * 2**30)),
        ("64M", Keep(math.inf, NO_NUMBER, 2**26)),
        ("forever", Keep(math.inf, NO_NUMBER)),
    ],
)
def test_keep_is_an_age_a_number_a_size_or_several(text, keep):
    assert parse_keep(text) == keep


@pytest.mark.parametrize("text", ["", "30w", "-1", "1d;2", "30d,,5", "1.5d", "10GB"])
def test_a_keep_that_can_not_be_understood_is_refused_with_the_way_to_write_it(text):
    with pytest.raises(ConfigError, match=r"--keep-logs .* can't be understood: write 30d"):
        parse_keep(text, "--keep-logs")


@pytest.mark.parametrize(
    ("text", "left"),
    [("forever", 10), ("4", 4), ("5h", 5), ("5h,3", 3), ("1M", 2), ("5h,4,3M", 4), ("0", 0), ("0M", 1)],
)
def test_logs_of_ended_jobs_go_by_number_age_and_size(tmp_path, text, left):
    """Ten jobs ended, one an hour, each with 400 KiB of logs."""
    now = 1e9
    jobs = [f"job-{number}" for number in range(10)]
    for number, job in enumerate(jobs):
        at = now - 3_600.0 * (9.5 - number)
        (tmp_path / job / "logs").mkdir(parents=True)
        for path in (tmp_path / job / "logs" / "rank-0.log", tmp_path / job / "logs", tmp_path / job):
            if path.name.endswith(".log"):
                path.write_bytes(bytes(400 << 10))
            os.utime(path, (at, at))
    assert past_keeping(tmp_path, jobs, parse_keep(text), now) == jobs[: 10 - left]


def test_a_job_without_a_folder_is_kept_by_number_alone(tmp_path):
    assert past_keeping(tmp_path, ["job-1", "job-2"], parse_keep("1h"), 1e9) == []
    assert past_keeping(tmp_path, ["job-1", "job-2"], parse_keep("1h,1"), 1e9) == ["job-1"]
