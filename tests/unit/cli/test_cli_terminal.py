"""Plain lines where there is no terminal."""

from bagua.cli.display.terminal import Terminal, open_terminal
from bagua.proto.common_pb2 import Progress


def test_progress_lines_are_thinned_and_the_last_one_stays(capsys):
    terminal = Terminal()
    for step in range(1, 50):
        terminal.progress(Progress(step=step, total=100, metrics={"loss": 1.0 / step}))
    terminal.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 1/100  loss 1"
    assert lines[-1] == "step 49/100  loss 0.02041"
    assert len(lines) <= 4


def test_ranks_write_to_standard_output_and_we_to_standard_error(capsys):
    terminal = open_terminal(quiet=False)
    terminal.line("theirs")
    terminal.status("running")
    terminal.status("running")
    assert capsys.readouterr() == ("theirs\n", "running\n")
