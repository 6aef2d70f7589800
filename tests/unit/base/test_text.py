"""Texts from elsewhere on a terminal, and numbers that JSON has no words for."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.base.text import json_text, printable, printable_output
from bagua.cli.display import tables
from bagua.cli.display.terminal import Terminal
from bagua.client import describe
from bagua.proto import common_pb2, job_pb2

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202egnp.exe\r\x08\x7f"


def test_what_a_terminal_would_obey_is_shown():
    assert printable(EVIL) == r"\x1b]0;title\x07\x1b[2J\x9b31m\u202egnp.exe\x0d\x08\x7f"
    assert printable("a\nb\tc") == r"a\x0ab\x09c"
    assert printable("a\nb\tc\x1b", lines=True) == "a\nb\tc\\x1b"
    assert printable("größer 模型 👩‍🔬") == "größer 模型 👩‍🔬"


@given(st.text())
def test_no_control_character_passes(text):
    assert not set(printable(text)) & {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))}


def test_output_of_ranks_keeps_its_colours_and_nothing_else():
    assert printable_output("\x1b[31mred\x1b[0m\tx") == "\x1b[31mred\x1b[0m\tx\x1b[0m"
    assert printable_output("\x1b[31mred") == "\x1b[31mred\x1b[0m"
    assert printable_output("\x1b]52;c;cm0=\x07") == r"\x1b]52;c;cm0=\x07"
    assert printable_output("\x1b[2J") == r"\x1b[2J"


def test_tables_and_jobs_show_escape_sequences(capsys):
    spec = common_pb2.JobSpec(name=EVIL, entry=EVIL, args=[EVIL], workdir=EVIL, nnodes=1, nproc_per_node=1)
    rank = common_pb2.RankStatus(node_id=EVIL, log_path=EVIL, error_tail=EVIL, state=common_pb2.RANK_STATE_EXITED)
    job = job_pb2.Job(job_id="job-1", spec=spec, state=describe.FAILED, reason=EVIL, waiting=EVIL, ranks=[rank])
    job.progress.message = EVIL
    job.progress.metrics[EVIL] = math.nan
    tables.print_jobs([job])
    tables.print_job(job, [job_pb2.JobEvent(kind=EVIL, reason=EVIL)])
    tables.print_nodes([job_pb2.Node(node_id=EVIL, hostname=EVIL, address=EVIL, version=EVIL)])
    terminal = Terminal()
    terminal.error(describe.summary(job, 1.0))
    terminal.status(EVIL)
    terminal.progress(job.progress)
    terminal.close()
    shown = "".join(capsys.readouterr())
    assert "\\x1b]0;title" in shown
    assert not [character for character in shown if character != "\n" and not character.isprintable()]


def no_constant(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_documents_are_valid_json(value, shown):
    job = job_pb2.Job(job_id="job-1", spec=common_pb2.JobSpec(name="x"), state=describe.FAILED)
    job.progress.metrics["loss"] = value
    for document in (describe.job_document(job), {"jobs": (describe.summary_document(job),)}):
        found = json.loads(json_text(document), parse_constant=no_constant)
        assert found.get("jobs", [found])[0]["progress"]["metrics"] == {"loss": shown}
    assert json_text({"a": [1, 2.5, None, True, "x"]}) == '{"a": [1, 2.5, null, true, "x"]}'
