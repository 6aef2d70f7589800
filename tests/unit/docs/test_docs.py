"""The documentation: the README is short, links lead somewhere, pictures can be drawn from the tables."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.core import TyperGroup

from bagua.cli.app import app

ROOT = Path(__file__).resolve().parents[3]
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)>\s]+)>?[^)]*\)")


def pages() -> list[Path]:
    """All Markdown files that git knows, or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).exists()]


def prose(page: Path) -> str:
    """The text without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    return broken


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 120


def test_relative_links_lead_somewhere() -> None:
    found = pages()
    assert ROOT / "README.md" in found
    assert [link for page in found for link in broken_links(page)] == []


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](other.md) [b](#one) [c](page.md#two) ![d](x.png) [e](https://example.org)\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert broken_links(page) == ["page.md: other.md", "page.md: page.md#two", "page.md: x.png"]


def spoken_commands(program: str) -> set[str]:
    """Commands of a program that pages name in code, such as "job" of ``bagua job list``."""
    code = [part for page in pages() for part in re.findall(r"`([^`\n]+)`|^    (.+)$", page.read_text(), re.MULTILINE)]
    found = [re.findall(rf"(?:^|\s|bin/){program} ([a-z][a-z-]*)", part) for parts in code for part in parts]
    return {name for names in found for name in names}


def test_commands_of_bagua_exist() -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    spoken = spoken_commands("bagua")
    assert {"run", "job", "doctor"} <= spoken <= set(command.commands)


def test_tests_that_pages_name_exist() -> None:
    named = [found for page in pages() for found in re.findall(r"`(tests/[\w/.]+)::(\w+)`", page.read_text())]
    assert len(named) > 10
    missing = [f"{path}::{name}" for path, name in named if not re.search(rf"\b{name}\b", (ROOT / path).read_text())]
    assert missing == []


def test_commands_of_dev_exist() -> None:
    words = [sys.executable, str(ROOT / "deploy" / "dev.py"), "--help"]
    usage = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    choices = re.search(r"\{([\w,]+)\}", usage)
    assert choices
    spoken = spoken_commands(r"dev\.py")
    assert {"demo", "test", "lint"} <= spoken <= set(choices[1].split(","))
    hooks = re.findall(r"dev\.py (\w+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert set(hooks) <= set(choices[1].split(","))


def drawing(name: str = "plots") -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:Creating legend")  # which takes long on a busy machine
@pytest.mark.parametrize("name", ["allreduce", "steps", "accuracy"])
def test_pictures_come_from_the_tables(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    getattr(drawing(), name)(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert (ROOT / "docs" / f"{name}.png").exists()


GUIDES = ("concepts", "tutorials", "howto", "moving", "design")


@pytest.mark.parametrize("folder", GUIDES)
def test_each_page_of_a_folder_is_in_its_index(folder: str) -> None:
    index = (ROOT / "docs" / folder / "README.md").read_text()
    assert f"]({folder}/README.md)" in (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs" / folder).glob("[!R]*.md") if f"]({page.name})" not in index] == []


@pytest.mark.parametrize("page", ["README.md", "docs/README.md"])
def test_first_pages_lead_three_readers_in_one_hop(page: str) -> None:
    """Somebody with a script, an operator and a researcher each have a row in the first table."""
    table = re.search(r"^\| you \|.*?(?=^$)", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert table, page
    rows = [
        [(ROOT / page).parent / link.partition("#")[0] for link in LINK.findall(row)] for row in table[0].splitlines()
    ]
    for targets in (("quickstart",), ("service", "tutorials/two-hosts"), ("tutorials/slow-network", "study")):
        wanted = [ROOT / "docs" / f"{target}.md" for target in targets]
        assert any(path in row for path in wanted for row in rows), (page, targets)


def test_each_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [path.name for path in (ROOT / "docs").glob("[!R]*.md") if f"]({path.name})" not in index] == []
