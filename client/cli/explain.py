"""``bagua explain``: the cause and the remedy of an error, by the code at its end."""

from __future__ import annotations

import dataclasses
import textwrap

import typer

from bagua.base.errors import UsageError
from bagua.cli.command import command
from bagua.cli.options import Output
from bagua.error_codes import Entry, area_of, areas, code_of, codes_in, entries

WIDTH = 100


@command()
def explain_code(
    *,
    code: list[str] | None = typer.Argument(
        None,
        help="Codes such as BG101 or 101, or a whole error text. Without: a list of all codes.",
    ),
    output: Output,
) -> None:
    """Tells the cause and the remedy of an error by the code at its end. (`bagua job explain` is about a job.)"""
    chosen = _chosen(" ".join(map(code_of, code))) if code else list(entries().values())
    document = [{**dataclasses.asdict(entry), "page": _page(entry)} for entry in chosen]
    output.show(document, "\n\n".join(map(_text, chosen)) if code else _print_all)


def _print_all() -> None:
    for area in areas():
        print(f"\n{area.title}\n")
        for entry in area.entries:
            print(f"  {entry.code}  {entry.title}")


def _chosen(text: str) -> list[Entry]:
    """Finds the entries of codes in a text. Raises UsageError."""
    codes = codes_in(text)
    if not codes:
        raise UsageError(f"There is no code in {text[:200]!r}. Write one, as in `bagua explain BG101`. [BG102]")
    unknown = [code for code in codes if code not in entries()]
    if unknown:
        raise UsageError(
            f"This version of Bagua has no error {unknown[0]}. `bagua explain` lists those there are. [BG102]"
        )
    return [entries()[code] for code in codes]


def _page(entry: Entry) -> str:
    return f"docs/errors/{area_of(entry.code).page}.md#{entry.code.lower()}"


def _text(entry: Entry) -> str:
    paragraphs = [f"{entry.code}: {entry.title}", entry.cause, f"Remedy: {entry.remedy}", f"See {_page(entry)}"]
    # Options and file names stay whole.
    return "\n\n".join(textwrap.fill(paragraph, WIDTH, break_on_hyphens=False) for paragraph in paragraphs)
