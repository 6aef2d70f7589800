"""The report of the GPU tests: one JSON document, and the same as tables in Markdown. Pure."""

OK, FAILED, STOPPED, SKIPPED, LEFT = "ok", "failed", "stopped", "skipped", "left"
"""Of a section. Skipped: this machine has nothing to check it with; left: there was no time."""


def status_of(found, code):
    """Of a section: ``found`` is its file (None: it wrote none), ``code`` its exit code (None: stopped)."""
    if code is None:
        return STOPPED
    if found is None or not found["finished"] or code or not all(check["ok"] for check in found["checks"]):
        return FAILED
    return OK if found["checks"] else SKIPPED


def to_do(previous, names, digest):
    """Sections that a run has to do: those that an earlier report (same sources, same card) does not have as done."""
    if previous is None or previous.get("digest") != digest:
        return list(names)
    return [name for name in names if previous["sections"].get(name, {}).get("status") != OK]


def cell(value):
    """A value as people read it: three digits that count."""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def table(rows):
    """Rows as a table; columns in the order of their first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *[[cell(row.get(name, "")) for name in columns] for row in rows]]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    text = [
        "| " + " | ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def markdown(report):
    """The whole report for people: what the machine is, a line for each section, checks that failed, all figures."""
    machine = report["machine"]
    lines = [f"# GPU tests, {report['date']}", ""]
    if report["rehearsal"]:
        lines += ["REHEARSAL ON A CPU: it shows that the programs run. No figure here says anything about a GPU.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [f"- seconds in all: {report['seconds']:.0f}", ""]
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


def _targets(one):
    """How many of the figures that have a target meet it."""
    figures = [row for rows in one.get("found", {}).get("tables", {}).values() for row in rows if row.get("target")]
    met = sum(row["target"] == "met" for row in figures)
    return {"targets": f"{met} of {len(figures)}" if figures else ""}


def _of_section(name, one):
    found = one.get("found") or {"checks": [], "tables": {}, "notes": []}
    lines = [f"## {name}: {one['title']}", ""]
    if one.get("why"):
        lines += [one["why"], ""]
    lines += [f"- FAILED {check['name']}: {check['detail']}" for check in found["checks"] if not check["ok"]]
    lines += [f"- {note}" for note in found["notes"]]
    for title, rows in found["tables"].items():
        lines += ["", f"{title}:", "", table(rows)]
    return [*lines, ""]
