"""Each table of figures has its command, machine and date nearby, or a link to them.

They stand in a line that begins with "Figures", between the heading or table before and the table itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua.chaos.plan import KINDS

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = ("accuracy", "elastic", "performance", "study", "torch-distributed")
FIGURE = re.compile(r"\s*\**[-+<]?\d[\d.,/]*( ?(%|s|ms|µs|GB/s|points)| to | \(|, |\**\s*$)")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def is_of_figures(rows: list[str]) -> bool:
    """Half of the cells, without the first column and empty ones, begin with a number that has no word behind it."""
    cells = [cell for row in rows[2:] for cell in row.strip().strip("|").split("|")[1:] if cell.strip()]
    return bool(cells) and 2 * sum(bool(FIGURE.match(cell)) for cell in cells) >= len(cells)


def tables(text: str) -> Iterator[tuple[str, list[str], str]]:
    """(heading, rows, all lines between the table and the heading or table before it)."""
    heading, before, rows = "", "", []
    for line in [*re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines(), ""]:
        if line.startswith("|"):
            rows.append(line)
            continue
        if rows:
            yield heading, rows, before
            before, rows = "", []
        if found := re.match(r"#+ (.*)", line):
            heading, before = found[1], ""
        else:
            before += line + "\n"


def figures_lines(text: str) -> list[str]:
    """Paragraphs that begin with "Figures", each as one line."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.lstrip().startswith("Figures: ")]


def of_section(page: Path, anchor: str) -> str:
    """The text below a heading, up to the next heading of any level."""
    parts = re.split(r"^(#+ .*)$", page.read_text(), flags=re.MULTILINE)
    sections = {slug(head.lstrip("# ")): text for head, text in zip(parts[1::2], parts[2::2], strict=True)}
    return sections.get(anchor, "")


def is_whole(line: str) -> bool:
    return bool(DATE.search(line) and re.search(r"`[^`]+`", line))


def unsourced(page: Path) -> list[str]:
    """First rows of tables of figures that have neither."""
    found = []
    for heading, rows, before in tables(page.read_text()):
        if not is_of_figures(rows):
            continue
        lines = figures_lines(before)
        linked = [link for line in lines for link in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", line)]
        there = [
            line
            for name, anchor in linked
            for line in figures_lines(of_section(page.parent / name if name else page, anchor))
        ]
        if not any(is_whole(line) for line in (*lines, *there)):
            found.append(f"{page.name}, {heading}: {rows[0]}")
    return found


@pytest.mark.parametrize("name", PAGES)
def test_each_table_of_figures_has_its_command_and_date(name: str) -> None:
    page = DOCS / f"{name}.md"
    assert any(is_of_figures(rows) for _, rows, _ in tables(page.read_text()))
    assert unsourced(page) == []


TABLE = "| size | ms |\n|---|---|\n| 4 KiB | 0.1 (2) |\n"


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (f"# A\n\nFigures: `bagua bench codec`; two cores; 2026-11-26.\n\n{TABLE}", True),
        (f"# A\n\nFigures: `bagua bench codec`; two cores.\n\n{TABLE}", False),
        (f"# A\n\nFigures: by hand; two cores; 2026-11-26.\n\n{TABLE}", False),
        (f"# A\n\nTaken by `bagua bench codec` on 2026-11-26.\n\n{TABLE}", False),
        (f"# A\n\nFigures: `bagua`; 2026-11-26.\n\n{TABLE}\nWords.\n\n{TABLE}", False),
        (f"# A\n\nFigures: `bagua`; 2026-11-26.\n\n## B\n\n{TABLE}", False),
        (f"# A\n\nFigures: `bagua`; 2026-11-26.\n\n## B\n\nFigures: [as above](#a).\n\n{TABLE}", True),
        (f"# A\n\nWords.\n\n## B\n\nFigures: [as above](#a).\n\n{TABLE}", False),
        ("# A\n\n| hosts | measured |\n|---|---|\n| 2 | 9 all-reduces |\n", True),
        ("# A\n\n| step | ms |\n|---|---|\n| DDP | 573 |\n| Bagua | 1.3 to 2 |\n", False),
    ],
)
def test_a_table_without_them_is_found(text: str, good: bool, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    assert (unsourced(tmp_path / "page.md") == []) is good


def faults_of_the_table() -> dict[str, tuple[int, int]]:
    """Of each kind of fault in the page on elastic jobs: how often it was played, and the longest pause in ms."""
    rows = re.findall(r"^\| ([a-z-]+) \|(.*)\|$", of_section(DOCS / "elastic.md", "chaos"), re.MULTILINE)
    cells = {kind: [cell.strip() for cell in row.split("|")] for kind, row in rows if kind in KINDS}
    return {kind: (int(row[1]), int(row[-1])) for kind, row in cells.items()}


def test_all_pages_count_the_faults_of_chaos_alike() -> None:
    """The table is played again now and then; the sums in words stand elsewhere, too."""
    played = faults_of_the_table()
    assert played.keys() <= KINDS.keys()
    said = {}
    for page in DOCS.rglob("*.md"):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page.read_text())  # words of a link, without its target
        if found := re.findall(r"\b(\d+) faults of (?:(\d+) kinds|`bagua chaos`)", text):
            said[str(page.relative_to(DOCS.parent))] = found
    assert {"docs/elastic.md", "docs/design/atomic-steps.md"} <= said.keys()
    faults, kinds = str(sum(times for times, _ in played.values())), str(len(played))
    other = {name: found for name, found in said.items() if any(n != faults or k not in ("", kinds) for n, k in found)}
    assert not other, f"the table has {faults} faults of {kinds} kinds"
