"""Makes pages for man(1) and completions for shells from the command line itself.

    python3 deploy/dev.py man [--out build/man]

Below the folder they lie as below /usr: `share/man/man1`, `share/bash-completion/completions`,
`share/zsh/site-functions`, `share/fish/vendor_completions.d`.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from dist import ROOT, epoch
from typer.completion import get_completion_script

import bagua
from bagua.cli.app import app
from bagua.daemon import certs
from bagua.daemon.coordinator.__main__ import run as coordinator
from bagua.daemon.coordinator.admin import maintenance
from bagua.daemon.node.host.command_line import app as daemon

COMPLETIONS = {
    "bash": "share/bash-completion/completions/bagua",
    "zsh": "share/zsh/site-functions/_bagua",
    "fish": "share/fish/vendor_completions.d/bagua.fish",
}
FILES = (
    ("/etc/bagua/coordinator.env, /etc/bagua/node.env", "settings, where the service was installed with systemd"),
    ("/var/lib/bagua", "its state: database, token, certificates"),
    ("~/.local/state/bagua", "the same of a user's own service (BAGUA_STATE_DIR)"),
    ("~/.cache/bagua", "native code that was compiled (BAGUA_CACHE_DIR)"),
)


def commands() -> dict[str, Any]:
    """Finds all commands, and groups of commands, by their whole name, such as "bagua job submit"."""
    found = dict(_below("bagua", typer.main.get_command(app)))
    # These programs parse their own command line.
    database = typer.Typer(add_completion=False)
    maintenance.add_commands(database)
    found |= _below("bagua coordinator", typer.main.get_command(database))
    for name, function in (("coordinator", coordinator), ("certs", certs.run)):
        own = typer.Typer(add_completion=False)
        own.command()(function)
        found[f"bagua {name}"] = typer.main.get_command(own)
    found["bagua daemon"] = typer.main.get_command(daemon)
    return found


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for part, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _below(f"{name} {part}", inner)


def page(name: str, command: Any, everything: dict[str, Any]) -> str:
    """The page of one command, as roff."""
    words = _words(command)
    date = datetime.fromtimestamp(epoch(), UTC).date()
    title = name.replace(" ", "-")
    lines = [f'.TH "{title.upper()}" "1" "{date}" "Bagua {bagua.__version__}" "Bagua"']
    lines += [".SH NAME", f"{_roff(title)} \\- {_roff(_first(words))}"]
    context = command.make_context(name, [], resilient_parsing=True)  # no complaint of arguments that are missing
    lines += [".SH SYNOPSIS", f".B {_roff(name)}", _roff(" ".join(command.collect_usage_pieces(context)))]
    lines += [".SH DESCRIPTION", *_paragraphs(words)]
    shown = [record for param in command.params if (record := param.get_help_record(context)) is not None]
    if shown:
        lines.append(".SH OPTIONS")
        for names, text in shown:
            lines += [".TP", f".B {_roff(names)}", _roff(text) or "\\&"]  # an empty line would end the list
    inner = sorted(other for other in everything if other.rpartition(" ")[0] == name)
    if inner:
        lines.append(".SH COMMANDS")
    for other in inner:
        lines += [".TP", f".BR {_roff(other.replace(' ', '-'))} (1)", _roff(_first(_words(everything[other])))]
    lines.append(".SH FILES")
    for path, text in FILES:
        lines += [".TP", f".I {_roff(path)}", _roff(text)]
    parent = name.rpartition(" ")[0]
    others = ["bagua(1)"] if name != "bagua" else ["bagua-coordinator(1)", "bagua-daemon(1)", "bagua-job(1)"]
    others += [f"{parent.replace(' ', '-')}(1)"] if parent not in ("", "bagua") else []
    lines += [".SH SEE ALSO", _roff(", ".join(others))]
    return "\n".join(lines) + "\n"


def _words(command: Any) -> str:
    return re.sub(r"\[/?[a-z ]+\]", "", command.help or "").strip()


def _first(words: str) -> str:
    return " ".join(words.split("\n\n")[0].split()).rstrip(".") or "a command of Bagua"


def _paragraphs(words: str) -> list[str]:
    blocks = re.split(r"\n\s*\n", words)
    # \b: click's mark of a block whose lines stay as they are.
    return [line for block in blocks for line in (".PP", _roff(" ".join(block.replace("\b", "").split())))]


def _roff(text: str) -> str:
    # Man shows a bare - as a hyphen, which no shell takes.
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text)  # such a line would be a command of roff


def write(out: Path) -> list[Path]:
    """Writes all files below ``out``, and lists them."""
    texts = {
        path: get_completion_script(prog_name="bagua", complete_var="_BAGUA_COMPLETE", shell=shell) + "\n"
        for shell, path in COMPLETIONS.items()
    }
    made = []
    everything = commands()
    for name, command in everything.items():
        # No time in it: the same bytes from every build.
        packed = gzip.compress(page(name, command, everything).encode(), 9, mtime=0)
        made.append(_write(out / "share" / "man" / "man1" / f"{name.replace(' ', '-')}.1.gz", packed))
    return made + [_write(out / path, text.encode()) for path, text in texts.items()]


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "man")
    options = parser.parse_args()
    print(f"{len(write(options.out))} files below {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
