"""Blocks of code on all pages, and which test shows those that are commands. ``code_blocks.py`` looks into them.

A block without a mark is run as it stands by ``tests/e2e/pages/test_pages.py``, in the order of the page. The others
have a comment before them: ``<!-- run by tests/FILE.py::test_name -->`` where another test takes them from the page,
``<!-- shown by tests/FILE.py::test_name -->`` where a test does the same in its own way, or
``<!-- not run: REASON -->`` where nothing here can.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
README = {
    "python3 deploy/dev.py demo": "tests/e2e/test_examples.py::test_digits_on_two_nodes",
    "bagua run --nproc-per-node 2 train.py": "tests/e2e/clusters/test_hosts.py::test_two_hosts_are_one_job",
}
"""Begins of blocks of the first page, which has no room for marks, and where they are shown. Its others are run."""
PLAYED = ("operations", "security", "service", "observability", "metrics", "dashboard")
"""Pages for operators whose blocks are run."""
TRAINED = (
    "../README",
    "../algorithms/README",
    "accuracy",
    "advise",
    "autotuning",
    "checkpoints",
    "concepts/job",
    "elastic",
    "from-bagua",
    "jobs",
    "performance",
    "profiling",
    "running",
    "study",
    "torch-distributed-programs",
)
"""Pages whose commands are run with a script that trains (``page_scripts.py``)."""
FOLLOWED = tuple(
    sorted(
        str(path.relative_to(DOCS).with_suffix(""))
        for folder in ("tutorials", "howto", "moving")
        for path in (DOCS / folder).glob("*.md")
    )
)
"""Pages that a reader follows from the first line to the last, and so does ``tests/e2e/pages/test_pages.py``. A block
with a title is a file that the reader writes; cells of a notebook have the title ``cell``."""
PARTS = (
    "CONTRIBUTING.md",
    "README.md",
    "algorithms/README.md",
    "docs/autotuning.md",
    "docs/checkpoints.md",
    "docs/concepts/plan.md",
    "docs/data.md",
    "docs/elastic.md",
    "docs/frameworks.md",
    "docs/layers.md",
    "docs/moving/bagua.md",
    "docs/moving/ddp.md",
    "docs/moving/fsdp.md",
    "docs/optimizer.md",
    "docs/profiling.md",
    "docs/running.md",
    "docs/torch-distributed-programs.md",
    "docs/torch-distributed.md",
    "docs/uneven.md",
)
"""Pages whose parts of programs are run (``page_parts.py``). Those of others have marks."""

_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?')
_MARK = re.compile(r"^<!-- (run by|shown by|not run:) (.+) -->$")
SHELLS = ("", "sh", "bash", "console")
"""Languages of fences that are commands. Blocks that are indented always are."""


@dataclass(frozen=True)
class Block:
    """``page``: its path in the repository. ``line``: number of the first line. ``mark``: "shown by", "not run:", or
    none. ``file``: the name of the file that the block is, or nothing. ``language``: of the fence."""

    page: str
    line: int
    text: str
    mark: str = ""
    reason: str = ""
    file: str = ""
    language: str = ""

    @property
    def where(self):
        """Page and line."""
        return f"{self.page}:{self.line}"

    @property
    def is_commands(self):
        """Whether a reader types it."""
        return self.language in SHELLS and not self.file

    @property
    def is_part(self):
        """Whether it is a part of a Python program, or a change of one."""
        return self.language in ("python", "diff") and not self.file

    @property
    def commands(self):
        """Commands with the numbers of their lines; without comments, continued lines as one."""
        begun, number = "", self.line
        for line_number, line in enumerate(self.text.splitlines(), self.line):
            begun, number = (begun, number) if begun else ("", line_number)
            begun += re.sub(r"(^|\s+)#\s.*$", "", line).strip()
            if begun.endswith("\\"):
                begun = begun[:-1]
            elif begun:
                yield number, begun
                begun = ""


def all_pages():
    """All Markdown files of the checkout, but the changelog: pages, READMEs, and others."""
    words = ["git", "ls-files", "-co", "--exclude-standard", "*.md"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for line in listed.splitlines() if (path := ROOT / line).exists() and path.name != "CHANGELOG.md"]


def blocks(text, page=""):
    found = []
    mark = ("", "")
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        begin = at
        fence, marked = _FENCE.match(lines[at].strip()), _MARK.match(lines[at])
        if fence:
            indent = len(lines[at]) - len(lines[at].lstrip())
            at = next(end for end in range(begin + 1, len(lines)) if lines[end].strip() == "```")
            inside = "\n".join(line[indent:] for line in lines[begin + 1 : at])
            file = fence[2] or ""
            found.append(Block(page, begin + 2, inside + "\n" * bool(file), *mark, file=file, language=fence[1]))
        elif _indented(lines, at):
            while at + 1 < len(lines) and lines[at + 1].startswith("    "):
                at += 1
            found.append(Block(page, begin + 1, "\n".join(line[4:] for line in lines[begin : at + 1]), *mark))
        if marked:
            mark = (marked[1], marked[2])
        elif lines[at].strip():
            mark = ("", "")
        at += 1
    return found


def _indented(lines, at):
    """Whether a block of code begins here: it is no continuation of a list's item."""
    return lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip())


def of_path(path):
    """All blocks of a file of the repository."""
    return blocks(path.read_text(), path.resolve().relative_to(ROOT).as_posix())


def of_page(name):
    """Commands and files of a page, by its path from docs/: all that its reader types."""
    return [block for block in of_path(DOCS / f"{name}.md") if block.is_commands or block.file]


def write_files(name, folder, *but):
    """Writes the files that a page shows, into this folder."""
    for block in of_path(ROOT / name):
        if block.file and block.file not in but:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


def run_by(test, *names):
    """Commands of all blocks of these pages (paths of the repository) that are marked as run by the test of this name.
    Raises AssertionError for a page without one."""
    return [command for name in names for block in _run_by(test, name) for _, command in block.commands]


def texts_run_by(test, name):
    """Such blocks of a page as they stand, for a shell that reads them whole."""
    return [block.text for block in _run_by(test, name)]


def _run_by(test, name):
    found = [block for block in of_path(ROOT / name) if block.mark == "run by" and block.reason.endswith(f"::{test}")]
    assert found, f"{name} has no block that is run by {test}"
    return [block for block in found if not block.file]


def part_by(test, name):
    """The part of a program on a page (its path in the repository) that is marked as run by the test of this name."""
    [block] = _run_by(test, name)
    assert block.is_part, block.where
    return block.text


def is_shown_on_readme(block):
    """Whether it is one of ``README``."""
    return block.page == "README.md" and any(block.text.startswith(begin) for begin in README)


def is_test(words):
    """Whether there is a test of this name: ``tests/FILE.py::test_name``."""
    path, _, name = words.partition("::")
    file = ROOT / path
    return file.exists() and bool(re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE))


def unshown(block):
    """Words on a block of commands or of Python that no test runs and no mark excuses, or nothing."""
    if block.mark in ("run by", "shown by"):
        if not is_test(block.reason):
            return f"{block.where}: there is no test {block.reason}"
        if block.mark == "run by" and Path(block.page).stem not in (ROOT / block.reason.partition("::")[0]).read_text():
            return f"{block.where}: {block.reason} does not read this page"
        return ""
    name = os.path.relpath(block.page, "docs").removesuffix(".md")
    known = block.page in PARTS if block.is_part else name in (*PLAYED, *FOLLOWED, *TRAINED)
    if block.mark or known or is_shown_on_readme(block):
        return ""
    return f"{block.where}: no test runs this. Mark it as tests/rig/docs/pages.py says"
