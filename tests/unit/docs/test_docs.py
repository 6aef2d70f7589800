"""The documentation: the README is short, links lead somewhere, pictures can be drawn from the tables."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)>\s]+)>?[^)]*\)")


def pages():
    """All Markdown files that git knows, or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).exists()]


def prose(page):
    """The text without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    return broken


def test_relative_links_lead_somewhere():
    found = pages()
    assert ROOT / "README.md" in found
    assert [link for page in found for link in broken_links(page)] == []


def test_tests_that_pages_name_exist():
    named = [found for page in pages() for found in re.findall(r"`(tests/[\w/.]+)::(\w+)`", page.read_text())]
    assert len(named) > 10
    missing = [f"{path}::{name}" for path, name in named if not re.search(rf"\b{name}\b", (ROOT / path).read_text())]
    assert missing == []


def test_each_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [path.name for path in (ROOT / "docs").glob("[!R]*.md") if f"]({path.name})" not in index] == []
