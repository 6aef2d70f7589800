"""Plain lines where there is no terminal."""

import io
import re

import pytest
from rich.console import Console

from bagua.cli.display.tables import table
from bagua.cli.display.terminal import BarTerminal, Terminal, metrics_text, open_terminal
from bagua.proto.common_pb2 import Progress


def test_progress_lines_are_thinned_and_the_last_one_stays(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    for step in range(1, 50):
        terminal.progress(Progress(step=step, total=100, metrics={"loss": 1.0 / step}))
    terminal.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 1/100  loss 1"
    assert lines[-1] == "step 49/100  loss 0.02041"
    assert len(lines) <= 4


def test_ranks_write_to_standard_output_and_we_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = open_terminal(quiet=False)
    terminal.line("theirs")
    terminal.status("running")
    terminal.status("running")
    assert capsys.readouterr() == ("theirs\n", "running\n")


def test_quiet_keeps_errors(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = open_terminal(quiet=True)
    terminal.status("running")
    terminal.progress(Progress(step=1, total=1))
    terminal.error("it failed")
    terminal.close()
    assert capsys.readouterr().err == "it failed\n"


def test_metrics() -> None:
    assert metrics_text({"loss": 0.123456, "steps/s": 1234.5}) == "loss 0.1235  steps/s 1234"
    assert metrics_text({}) == ""


def test_tables_are_not_cut_where_nobody_looks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    path = "/a/rather/long/path/" * 20
    table(["log"], [[path]])
    assert path in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
def test_metrics_give_way_and_bar_and_times_stay(width: int) -> None:
    terminal = BarTerminal()
    terminal.close()
    terminal.status("running")
    metrics = {"acc": 0.97123, "comm exposed ms": 12.345, "comm hidden ms": 3.21, "loss": 0.01234, "steps/s": 123.45}
    terminal.progress(Progress(step=800, total=800, metrics=metrics, message="warm"))
    drawn = io.StringIO()
    Console(file=drawn, width=width, force_terminal=True, color_system=None).print(terminal._bar.get_renderable())
    lines = [line for line in drawn.getvalue().splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert lines[0].count("━") == 30, lines
    assert "running" in lines[0] and "800/800" in lines[0] and "acc" in lines[0]
    assert len(re.findall(r"[-\d]+:[-\d]+:[-\d]+", lines[0])) == 2, lines
