"""No block of code on any page escapes: commands are run or say why not, Python compiles, options and names exist."""

from __future__ import annotations

import re

import pytest
from rig.docs import code_blocks, pages
from rig.docs.pages import Block

PAGE = "docs/page.md"


def test_each_command_and_program_is_run_or_says_why_not() -> None:
    all_blocks = [block for page in pages.all_pages() for block in pages.of_path(page)]
    blocks = [block for block in all_blocks if block.is_commands or block.is_part]
    assert len(blocks) > 100
    assert [words for block in blocks if (words := pages.unshown(block))] == []


def test_each_block_can_be_right() -> None:
    """Commands and options of ``bagua`` exist, names of its library too; documents parse."""
    blocks = [block for page in pages.all_pages() for block in pages.of_path(page)]
    assert {"", "python", "diff", "toml", "yaml"} <= {block.language for block in blocks}
    assert [words for block in blocks if (words := code_blocks.wrong(block))] == []


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("", "bagua job lost", "no command bagua job lost"),
        ("", 'pip install "bagua[dashboard,lost]"', "no extra lost"),
        ("sh", "x=1 bagua run --nprocs 2 train.py", "--nprocs"),
        ("python", "import bagua.torch_api as bagua\nbagua.no_such_name()", "no_such_name"),
        ("python", "from bagua.client import Klient", "Klient"),
        ("python", "if True", "expected ':'"),
        ("diff", "-old(\n+new(", "was never closed"),
        ("yaml", "a: [", "while parsing"),
        ("yaml", "kind: BaguaJob\nspec: {run: {script: a.py}}", "spec.image: Field required"),
        ("toml", "a = ", "Invalid value"),
        ("perl", "1", "not checked"),
    ],
)
def test_a_wrong_block_is_found(language: str, text: str, words: str) -> None:
    assert words in code_blocks.wrong(Block(PAGE, 7, text, language=language))


def test_right_blocks_are_none() -> None:
    for language, text in (
        ("", 'bagua run --nproc-per-node 2 train.py --epochs 3 | tee log; eval "$(bagua net env)"'),
        ("python", "model = model.with_bagua([optimizer], bagua.algorithms.bytegrad.ByteGradAlgorithm())"),
        ("diff", "-import torch\n+import bagua.torch_api as bagua"),
    ):
        assert code_blocks.wrong(Block(PAGE, 7, text, language=language)) == ""


def test_a_block_without_a_test_is_found() -> None:
    assert "no test runs this" in pages.unshown(Block(PAGE, 7, "bagua doctor"))
    marked = Block(PAGE, 7, "bagua doctor", "shown by", "tests/unit/docs/test_docs_blocks.py::test_of_yesterday")
    assert "there is no test" in pages.unshown(marked)


def test_commands_within_sentences_exist() -> None:
    """A runbook has its commands there. An option may stand without its value."""
    found = []
    for path in pages.all_pages():
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        spans = sorted(set(re.findall(r"`(bagua [a-z][^`\n]*)`", text)))
        words = [code_blocks.wrong(Block(path.relative_to(pages.ROOT).as_posix(), 1, span)) for span in spans]
        found += [word for word in words if word and "requires an argument" not in word]
    assert found == []
