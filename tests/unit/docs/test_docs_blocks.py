"""No block of code on any page escapes: commands are run or say why not, Python compiles, options and names exist."""

from __future__ import annotations

import re

from rig.docs import code_blocks, pages
from rig.docs.pages import Block


def test_each_command_and_program_is_run_or_says_why_not():
    all_blocks = [block for page in pages.all_pages() for block in pages.of_path(page)]
    blocks = [block for block in all_blocks if block.is_commands or block.is_part]
    assert len(blocks) > 100
    assert [words for block in blocks if (words := pages.unshown(block))] == []


def test_each_block_can_be_right():
    """Commands and options of ``bagua`` exist, names of its library too; documents parse."""
    blocks = [block for page in pages.all_pages() for block in pages.of_path(page)]
    assert {"", "python", "diff", "toml", "yaml"} <= {block.language for block in blocks}
    assert [words for block in blocks if (words := code_blocks.wrong(block))] == []


def test_commands_within_sentences_exist():
    """A runbook has its commands there. An option may stand without its value."""
    found = []
    for path in pages.all_pages():
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        spans = sorted(set(re.findall(r"`(bagua [a-z][^`\n]*)`", text)))
        words = [code_blocks.wrong(Block(path.relative_to(pages.ROOT).as_posix(), 1, span)) for span in spans]
        found += [word for word in words if word and "requires an argument" not in word]
    assert found == []
