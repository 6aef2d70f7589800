"""Environment variables. Those of options and settings come from the code; the others from variables.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import man

from reference.command_line import place
from reference.markdown import anchor, escaped, table
from reference.settings import CLASSES, variable

# Variables that are no options and no settings, with their words, by group.
GROUPS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def of_options() -> dict[str, list[tuple[str, str, str]]]:
    """Variables that options read: (command, option, help) of each."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for name, command in man.commands().items():
        for parameter in command.params:
            for one in _names(parameter.envvar):
                found.setdefault(one, []).append((name, parameter.opts[0], getattr(parameter, "help", "") or ""))
    return found


def _names(given: Any) -> list[str]:
    return [] if not given else [given] if isinstance(given, str) else list(given)


def of_settings() -> dict[str, str]:
    """Variables of settings, with the settings they are of."""
    return {variable(kind, name): title for title, kind in CLASSES.items() for name in kind.model_fields}


def page() -> str:
    """Makes the page of all variables. Words are Markdown."""
    parts = ["# Environment variables\n", "An option on the command line counts more than its variable.\n"]
    for title, words in GROUPS.items():
        rows = [[f"{anchor(name)}`{name}`", text] for name, text in sorted(words.items())]
        parts += [f"## {title}\n", table(("variable", "meaning"), rows)]
    rows = []
    for name, uses in sorted(of_options().items()):
        commands = dict.fromkeys((command, option) for command, option, _ in uses)
        top = {f"[`{one} {option}`]({_page(one)}#{place(one, option)})" for one, option in [*commands][:3]}
        rows.append([f"{anchor(name)}`{name}`", escaped(uses[0][2]), ", ".join(sorted(top))])
    parts += ["## Of options\n", table(("variable", "meaning", "option"), rows)]
    rows = [
        [f"{anchor(name)}`{name}`", f"[{title}](settings.md#{name.lower()})"] for name, title in of_settings().items()
    ]
    return "\n".join([*parts, "## Of settings\n", table(("variable", "settings of"), rows)])


def _page(command: str) -> str:
    return f"command-line/{place(' '.join(command.split()[:2]))}.md"
