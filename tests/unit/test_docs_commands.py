"""Each command on the pages for operators is run by a test, is shown by one that is named, or says why it is not."""

from __future__ import annotations

import re

import pytest
from rig import pages

ROOT = pages.DOCS.parent
PAGE = """
# Page

```python title="train.py"
import torch
```

    bagua job list     # comment
    bagua certs certs/ \\
        --host 10.0.0.1

1. An item

   that goes on:

```yaml
kind: BaguaJob
```

<!-- shown by tests/unit/test_docs_commands.py::test_blocks_are_found -->
```sh
bagua top
```

<!-- not run: needs a cluster -->

    srun train.py

    bagua doctor
"""


def is_test(words: str) -> bool:
    """Whether there is a test of this name: ``tests/FILE.py::test_name``."""
    path, _, name = words.partition("::")
    file = ROOT / path
    return file.exists() and bool(re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE))


def unshown(block: pages.Block) -> str:
    """Words on a block that nothing shows, or nothing."""
    where = f"docs/{block.page}.md:{block.line}"
    if block.mark == "shown by":
        return "" if is_test(block.reason) else f"{where}: there is no test {block.reason}"
    if block.mark or block.page in (*pages.PLAYED, *pages.FOLLOWED):
        return ""
    return f"{where}: no test runs this. Mark it as tests/rig/pages.py says"


@pytest.mark.parametrize("name", [*pages.PLAYED, *pages.MARKED, *pages.FOLLOWED])
def test_each_command_is_shown(name: str) -> None:
    assert [words for block in pages.of_page(name) if (words := unshown(block))] == []


@pytest.mark.parametrize("name", pages.FOLLOWED)
def test_programs_are_complete(name: str) -> None:
    """Each Python program on a page that is followed compiles, and has a title: else no reader would run it."""
    page = (pages.DOCS / f"{name}.md").read_text()
    assert all(
        line.startswith(('```python title="', "```python\n")) for line in re.findall(r"^```python.*\n", page, re.M)
    )
    for block in pages.of_page(name):
        if block.file == "cell" or block.file.endswith(".py"):
            compile(block.text, f"{name}: {block.file}", "exec")


def test_the_table_of_points_names_tests() -> None:
    rows = [line for line in (pages.DOCS / "operations.md").read_text().splitlines() if "`tests/" in line]
    named = [re.findall(r"`(tests/[^`]+::[^`]+)`", row) for row in rows if row.startswith("|")]
    assert len(named) > 40 and all(named)
    assert [words for row in named for words in row if not is_test(words)] == []


def test_blocks_are_found() -> None:
    file, first, second, third, last = pages.blocks(PAGE, "page")
    assert (file.file, file.text) == ("train.py", "import torch\n")
    assert list(first.commands) == [(8, "bagua job list"), (9, "bagua certs certs/ --host 10.0.0.1")]
    assert (second.line, second.text, second.mark) == (22, "bagua top", "shown by") and not unshown(second)
    assert (third.text, third.mark, third.reason) == ("srun train.py", "not run:", "needs a cluster")
    assert last.text == "bagua doctor"
    assert unshown(last) == "docs/page.md:29: no test runs this. Mark it as tests/rig/pages.py says"
    gone = pages.Block("page", 1, "", "shown by", "tests/unit/test_docs_commands.py::test_of_yesterday")
    assert "there is no test" in unshown(gone)
