"""Programs of tutorials and other pages that readers follow, on forked ranks: each ends and says what its page says.

``tests/e2e/pages/test_pages.py`` follows whole pages, with ``bagua run`` and the commands around it.
"""

import os
import re
import runpy
import sys

import pytest
from rig.docs import pages

from bagua.base import islands


def rank_program(folder, file, arguments):
    """Runs a program as ``python FILE ARGUMENTS`` in its folder."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [file, *arguments]
    runpy.run_path(file, run_name="__main__")


def output_of(ranks, folder, page, file, *arguments, nprocs=2, island_size=1):
    """The output of rank 0. All files of the page are there."""
    for block in pages.of_page(page):
        if block.file.endswith(".py"):
            (folder / block.file).write_text(block.text)
    environment = {islands.VARIABLE: str(island_size)}
    ranks.run(rank_program, nprocs, environment=environment, folder=str(folder), file=file, arguments=list(arguments))
    return ranks.started[0].output


@pytest.mark.parametrize(
    ("program", "words"),
    [
        pytest.param("howto/accumulation accumulate.py", r"loss 0\.0\d+", marks=pytest.mark.full),
        pytest.param("howto/mixed-precision amp.py", r"loss \d+\.\d+, scale \d+", marks=pytest.mark.full),
        ("howto/uneven-data uneven.py", r"rank 0: 30 batches, weights"),
        pytest.param("howto/profiling profiled.py", r"bagua:wait", marks=pytest.mark.full),
        ("moving/deepspeed after.py", r"loss 10\.470"),
        pytest.param("moving/horovod after.py", r"loss \d+\.\d+", marks=pytest.mark.full),
        pytest.param("moving/bagua train.py", r"loss \d+\.\d+", marks=pytest.mark.full),
        ("tutorials/algorithm by_name.py", r"rank 0: \[\["),
        ("tutorials/elastic train.py --epochs 1", r"epoch 0 loss \d+\.\d+ ranks 2"),
        pytest.param("tutorials/two-hosts where.py", r"rank 0 on node 0 counts 2 ranks", marks=pytest.mark.full),
        pytest.param("tutorials/slow-network train.py", r"seen: [3-9]\d", marks=pytest.mark.full),
    ],
)
def test_a_program_ends(ranks, tmp_path, program, words):
    output = output_of(ranks, tmp_path, *program.split())
    assert re.search(words, output), output


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("moving/fsdp islands.py", r"island 0 of 2 loss \d+\.\d+"),
        pytest.param("moving/torchft train.py", r"island 0 loss \d+\.\d+", marks=pytest.mark.full),
        pytest.param("howto/checkpoints sharded.py", r"epoch 1 loss .* islands of 2", marks=pytest.mark.full),
        ("tutorials/islands train.py --epochs 1 --wait 0", r"epoch 0 loss \d+\.\d+ islands 2"),
    ],
)
def test_a_program_of_islands_ends(ranks, tmp_path, program, words):
    output = output_of(ranks, tmp_path, *program.split(), nprocs=4, island_size=2)
    assert re.search(words, output), output


def test_the_first_job_gives_the_result_of_one_process(ranks, tmp_path):
    two = output_of(ranks, tmp_path, "tutorials/first-job", "train.py", "--epochs", "2")
    ranks.close()
    one = output_of(ranks, tmp_path, "tutorials/first-job", "train.py", "--epochs", "2", nprocs=1)
    assert two.splitlines()[-1] == one.splitlines()[-1].replace("1 ranks", "2 ranks")


@pytest.mark.full
def test_error_feedback_helps(ranks, tmp_path):
    """As the tutorial says: signs without memory find the median, with memory the mean."""
    output = output_of(ranks, tmp_path, "tutorials/algorithm", "compare.py")
    full, signs, feedback = (float(error) for error in re.findall(r"error (\d+\.\d+)", output))
    assert 3 * max(full, feedback) < signs, output


@pytest.mark.full
def test_a_job_resumes_with_another_number_of_ranks(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("BAGUA_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    first = output_of(ranks, tmp_path, "howto/checkpoints", "resumable.py", "--steps", "50")
    ranks.close()
    second = output_of(ranks, tmp_path, "howto/checkpoints", "resumable.py", "--steps", "60", nprocs=1)
    assert "from step 0" in first and "from step 40" in second and "step 60 loss" in second
