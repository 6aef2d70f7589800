"""Blocks of commands are found, and those that nothing shows. ``test_docs_blocks.py`` looks at all pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rig.docs import pages

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

<!-- shown by tests/unit/docs/test_docs_commands.py::test_blocks_are_found -->
```sh
bagua top
```

<!-- not run: needs a cluster -->

    srun train.py

    bagua doctor
"""


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
    assert [words for row in named for words in row if not pages.is_test(words)] == []


def test_blocks_are_found() -> None:
    file, first, document, second, third, last = pages.blocks(PAGE, "docs/page.md")
    assert (file.file, file.text) == ("train.py", "import torch\n")
    assert list(first.commands) == [(8, "bagua job list"), (9, "bagua certs certs/ --host 10.0.0.1")]
    assert (document.language, document.is_commands) == ("yaml", False)
    assert (second.line, second.text, second.mark) == (22, "bagua top", "shown by") and not pages.unshown(second)
    assert (third.text, third.mark, third.reason) == ("srun train.py", "not run:", "needs a cluster")
    assert last.text == "bagua doctor"
    assert pages.unshown(last) == "docs/page.md:29: no test runs this. Mark it as tests/rig/docs/pages.py says"
    gone = pages.Block("docs/page.md", 1, "", "shown by", "tests/unit/docs/test_docs_commands.py::test_of_yesterday")
    assert "there is no test" in pages.unshown(gone)
    here = f"tests/unit/docs/{Path(__file__).name}::test_blocks_are_found"
    assert "does not read" in pages.unshown(pages.Block(f"docs/{'erehwon'[::-1]}.md", 1, "", "run by", here))
