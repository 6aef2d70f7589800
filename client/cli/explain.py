"""``bagua explain``: the cause and the remedy of an error, by the code at its end."""

from __future__ import annotations

import dataclasses
import textwrap

import typer

from bagua.base.errors import UsageError
from bagua.cli.job.submit import print_json
from bagua.cli.options import Output, OutputOption
from bagua.error_codes import Entry, area_of, areas, code_of, codes_in, entries

WIDTH = 100


def explain_code(
    code: list[str] | None = typer.Argument(
        None,
        help="Codes such as BG101 or 101, or a whole error text. Without: a list of all codes.",
        show_default=False,
    ),
    output: OutputOption = Output.text,
) -> None:
    """Tells the cause and the remedy of an error by the code at its end. (`bagua job explain` is about a job.)"""
    chosen = _chosen(" ".join(map(code_of, code))) if code else list(entries().values())
    if output is Output.json:
        print_json([{**dataclasses.asdict(entry), "page": _page(entry)} for entry in chosen])
    elif code:
        print("\n\n".join(map(_text, chosen)))
    else:
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
    return "\n\n".join(textwrap.fill(paragraph, WIDTH, break_on_hyphens=False) for paragraph in paragraphs)
