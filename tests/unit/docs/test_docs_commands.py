"""Blocks of commands are found, and those that nothing shows. ``test_docs_blocks.py`` looks at all pages."""

import re

import pytest
from rig.docs import pages


@pytest.mark.parametrize("name", pages.FOLLOWED)
def test_programs_are_complete(name):
    """Each Python program on a page that is followed compiles, and has a title: else no reader would run it."""
    page = (pages.DOCS / f"{name}.md").read_text()
    assert all(
        line.startswith(('```python title="', "```python\n")) for line in re.findall(r"^```python.*\n", page, re.M)
    )
    for block in pages.of_page(name):
        if block.file == "cell" or block.file.endswith(".py"):
            compile(block.text, f"{name}: {block.file}", "exec")
