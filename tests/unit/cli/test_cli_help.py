"""``--help`` of every command shows all words of its texts: rich takes text in brackets for markup, and drops it."""

import pytest
from typer import rich_utils
from typer.main import get_command
from typer.testing import CliRunner

from bagua.cli.app import app
from bagua.cli.programs import PROGRAMS
from bagua.daemon.node.host.command_line import app as node

WIDE = 1000
FRAMES = str.maketrans("│╭╮╰╯─", " " * 6)


def commands(command, *path):
    """All of the command line, but those that become another program."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        if path or name not in PROGRAMS:
            yield from commands(below, *path, name)


def words(text):
    """Without frames and line ends."""
    return " ".join(text.translate(FRAMES).split())


CASES = [(app, path) for path in commands(get_command(app))] + [(node, ())]
"""Other programs print their help without rich."""


@pytest.mark.parametrize(("program", "path"), CASES, ids=lambda one: "/".join(one) if isinstance(one, tuple) else "")
def test_help_shows_all_words(program, path, monkeypatch):
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", WIDE)
    command = get_command(program)
    for name in path:
        command = command.commands[name]
    done = CliRunner().invoke(program, [*path, "--help"], env={"COLUMNS": str(WIDE)})
    assert done.exit_code == 0
    shown = words(done.output)
    options = [one for one in command.params if not getattr(one, "hidden", False)]
    given = [command.help, *(getattr(one, "help", None) for one in options)]
    assert any(given)
    for text in filter(None, given):
        assert words(text.replace("\\[", "[")) in shown
