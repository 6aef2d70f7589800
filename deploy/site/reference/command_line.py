"""The command line: a page for each command of ``bagua``, with those below it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reference.markdown import anchor, escaped, table

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where man.py is

import man


def place(command: str, option: str = "") -> str:
    """Anchor of a command, or of an option of it: ``bagua-job-list``, ``bagua-job-list--output``."""
    return command.replace(" ", "-") + (option if option.startswith("-") or not option else f"-{option}")


def pages() -> dict[str, str]:
    """A page for each command below ``bagua``; that of ``bagua`` itself lists them."""
    everything = man.commands()
    tops = [name for name in everything if name.count(" ") == 1]
    listed = [[f"[`{name}`]({place(name)}.md)", escaped(_first(everything[name]))] for name in sorted(tops)]
    found = {
        "command-line/bagua.md": "\n".join(
            [
                "# bagua\n",
                *_paragraphs(everything["bagua"]),
                "`bagua COMMAND --help` shows the same in a terminal.\n",
                *_options("bagua", everything["bagua"]),
                table(("command", "does"), listed),
            ]
        )
    }
    for top in sorted(tops):
        inner = [name for name in everything if name == top or name.startswith(f"{top} ")]
        found[f"command-line/{place(top)}.md"] = "\n".join(
            line for name in inner for line in _command(name, everything[name], "#" if name == top else "##")
        )
    return found


def _command(name: str, command: Any, heading: str) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    yield f"{heading} {name} {{: #{place(name)} }}\n"
    yield f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    yield from _paragraphs(command)
    yield from _options(name, command)


def _options(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None:
            continue
        words, text = record
        marks = "".join(anchor(place(name, option)) for option in option_names(parameter))
        rows.append([f"{marks}`{_plain(words)}`", escaped(_plain(text))])
    if rows:
        yield table(("option", "meaning"), rows)


def option_names(parameter: Any) -> list[str]:
    """``--output``, ``--no-output``; the name of an argument."""
    if parameter.param_type_name == "argument":
        return [str(parameter.name)]
    return [*parameter.opts, *parameter.secondary_opts]


def _plain(text: str) -> str:
    """Removes rich's marks."""
    return " ".join(re.sub(r"\[/?(?:bold|dim|italic|red|green|yellow|cyan)[a-z ]*\]", "", text).split())


def _paragraphs(command: Any) -> list[str]:
    blocks = re.split(r"\n\s*\n", (command.help or "").strip())
    return [(_verbatim(block) if "\b" in block else escaped(_plain(block))) + "\n" for block in blocks if block.strip()]


def _verbatim(block: str) -> str:
    lines = [line.strip() for line in block.replace("\b", "").splitlines() if line.strip()]
    return "```text\n" + "\n".join(lines) + "\n```"


def _first(command: Any) -> str:
    return _plain((command.help or "").split("\n\n")[0])
