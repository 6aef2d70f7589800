"""Files of the site, for MkDocs.

Files keep their path in the repository (``src_uri``), so a relative link means the same on the site and in the
repository's viewer. Pages of docs/ come to the root of the site. Files outside of docs/ that pages link come below
``source/``. Pages of the reference are made from the code (``reference``).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
HOME = "docs/"
LINK = re.compile(r"\]\(\s*<?([^)>\s#]+)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
GENERATED = f"{HOME}reference/"
# Files that browsers shall show, not download.
TEXT = (".cpp", ".cu", ".h", ".proto", ".py", ".pyi", ".sbatch", ".service", ".sh", ".toml", ".yaml", ".yml", "LICENSE")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The files of docs/, those that pages link, and the reference, in place of those that MkDocs has found."""
    texts = {GENERATED + name: text for name, text in reference.pages().items()}
    found = [_file(path, config) for path in sorted(_with_linked(_of_docs(), texts))]
    for path, text in texts.items():
        page = File.generated(config, path, content=text)
        page.dest_uri = page.dest_uri.removeprefix(HOME)
        found.append(page)
    pages = [file.src_uri for file in found if file.is_documentation_page()]
    config.nav = navigation(config.nav or [], pages, [*texts])
    of_the_theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*found, *of_the_theme])


def _of_docs() -> list[str]:
    hidden = ("__pycache__", ".ipynb_checkpoints")
    paths = [path for path in (ROOT / HOME).rglob("*") if path.is_file() and not set(hidden) & {*path.parts}]
    return [path.relative_to(ROOT).as_posix() for path in paths if not path.name.startswith(".")]


def _with_linked(paths: list[str], texts: dict[str, str]) -> set[str]:
    """Adds the files that pages of these and ``texts`` link, and so on."""
    found = set(paths)
    todo = [*paths, *texts]
    while todo:
        path = todo.pop()
        if path.endswith(".md"):
            new = set(_links(path, texts.get(path))) - found
            found |= new
            todo += new
    return found


def _links(path: str, text: str | None = None) -> Iterator[str]:
    """Files of the repository that a page links."""
    markdown = (ROOT / path).read_text() if text is None else text
    for link in LINK.findall(FENCE.sub("", markdown)):  # code has brackets that look like links
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if not target.startswith("..") and (ROOT / target).is_file():
            yield target


def _file(path: str, config: MkDocsConfig) -> File:
    file = File(path, str(ROOT), config.site_dir, use_directory_urls=False)
    inside = path.startswith(HOME)
    file.dest_uri = file.dest_uri.removeprefix(HOME) if inside else f"source/{file.dest_uri}"
    if path.endswith(TEXT) and not inside:
        file.dest_uri += ".txt"
    return file


def navigation(nav: list[Any], pages: list[str], generated: list[str]) -> list[Any]:
    """``nav`` with pages in place of folders, without pages that don't exist; then the pages that it leaves out."""
    listed: set[str] = set()

    def expand(entry: Any) -> Iterator[Any]:
        if isinstance(entry, dict):
            for title, inner in entry.items():
                below = [item for part in (inner if isinstance(inner, list) else [inner]) for item in expand(part)]
                if below:
                    yield {title: below}
        elif entry == GENERATED:
            yield from sections(generated)
        elif entry.endswith("/"):
            yield from (path for path in ordered(entry) if path not in listed)
            listed.update(ordered(entry))
        elif entry in pages:
            listed.add(entry)
            yield entry

    def ordered(folder: str) -> list[str]:
        """Sorts pages: the README first, then the others in the order in which it links them."""
        index = f"{folder}README.md"
        order = [index, *(_links(index) if index in pages else ())]
        inside = [path for path in pages if path.startswith(folder)]
        return sorted(inside, key=lambda path: order.index(path) if path in order else len(order))

    made = [item for entry in nav for item in expand(entry)]
    rest = [path for path in pages if path not in listed and path not in generated]
    here, outside = [[path for path in rest if path.startswith(HOME) is own] for own in (True, False)]
    made += [{"More": here}] if here else []
    return [*made, {"In the source": outside}] if outside else made


def sections(paths: list[str]) -> list[Any]:
    """Generated pages; those of a folder below its name, as ``reference`` calls it."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(posixpath.dirname(path.removeprefix(GENERATED)), []).append(path)
    alone = found.pop("", [])
    return [*({reference.TITLES[folder]: inner} for folder, inner in found.items()), *alone]
