"""The report of the GPU tests: one JSON document, and the same as tables in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OK, FAILED, STOPPED, SKIPPED, LEFT = "ok", "failed", "stopped", "skipped", "left"
"""Of a section. Skipped: this machine has nothing to check it with; left: there was no time."""


def status_of(found: Mapping[str, Any] | None, code: int | None) -> str:
    """Of a section: ``found`` is its file (None: it wrote none), ``code`` its exit code (None: stopped)."""
    if code is None:
        return STOPPED
    if found is None or not found["finished"] or code or not all(check["ok"] for check in found["checks"]):
        return FAILED
    return OK if found["checks"] else SKIPPED


def to_do(previous: Mapping[str, Any] | None, names: Sequence[str], digest: str) -> list[str]:
    """Sections that a run has to do: those that an earlier report (same sources, same card) does not have as done."""
    if previous is None or previous.get("digest") != digest:
        return list(names)
    return [name for name in names if previous["sections"].get(name, {}).get("status") != OK]


def cell(value: Any) -> str:
    """A value as people read it: three digits that count."""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table; columns in the order of their first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *[[cell(row.get(name, "")) for name in columns] for row in rows]]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    text = [
        "| " + " | ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report for people: what the machine is, a line for each section, checks that failed, all figures."""
    machine = report["machine"]
    lines = [f"# GPU tests, {report['date']}", ""]
    if report["rehearsal"]:
        lines += ["REHEARSAL ON A CPU: it shows that the programs run. No figure here says anything about a GPU.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [f"- seconds in all: {report['seconds']:.0f}", ""]
    lines += [f"**{words}**", ""] if (words := slices(report["sections"])) else []
    rows = []
    for name, one in report["sections"].items():
        checks = one.get("found", {}).get("checks", [])
        good = sum(check["ok"] for check in checks)
        told = f"{good} of {len(checks)}"
        rows.append({"section": name, "status": one["status"], "checks": told, **_targets(one), "s": one["seconds"]})
    lines += [table(rows), ""] if rows else []
    for name, one in report["sections"].items():
        lines += _of_section(name, one)
    return "\n".join(lines)


SLICE_US = 1000.0


def slices(sections: Mapping[str, Any]) -> str:
    """Whether ranks that share the card wait for each other's time slices, by what ``net`` found; empty if not."""
    tables = sections.get("net", {}).get("found", {}).get("tables", {})
    small = [row for rows in tables.values() for row in rows if row.get("bytes") == 1024]
    times = [row[name] for row in small for name in ("sockets us", "Bagua-Net us")]
    if not times or min(times) < SLICE_US:
        return ""
    return (
        f"An all-reduce of 1 KiB between two ranks takes {min(times) / 1000:.1f} ms here: processes take turns on the "
        "card, and a hop may cost a turn. Figures of several ranks on one card measure time slices, not the network."
    )


def _targets(one: Mapping[str, Any]) -> dict[str, str]:
    """How many of the figures that have a target meet it."""
    figures = [row for rows in one.get("found", {}).get("tables", {}).values() for row in rows if row.get("target")]
    met = sum(row["target"] == "met" for row in figures)
    return {"targets": f"{met} of {len(figures)}" if figures else ""}


def _of_section(name: str, one: Mapping[str, Any]) -> list[str]:
    found = one.get("found") or {"checks": [], "tables": {}, "notes": []}
    lines = [f"## {name}: {one['title']}", ""]
    if one.get("why"):
        lines += [one["why"], ""]
    lines += [f"- FAILED {check['name']}: {check['detail']}" for check in found["checks"] if not check["ok"]]
    lines += [f"- {note}" for note in found["notes"]]
    for title, rows in found["tables"].items():
        lines += ["", f"{title}:", "", table(rows)]
    return [*lines, ""]
