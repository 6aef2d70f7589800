"""The examples of docs/frameworks.md with every launcher: the losses are those of torch's own backend, bit by bit."""

import re
import sys

import pytest
from e2e.conftest import PATIENT_S
from rig.docs import pages
from rig.limits import SOON_S

LIGHTNING = "bagua.examples.lightning_digits"
HUGGING_FACE = "bagua.examples.hugging_face"
SMALL = ("--epochs", "1", "--batches", "4", "--precision", "64-true")
STEPS = ("--steps", "3", "--pieces", "64", "--float64")
RUN = ("run", "--nproc-per-node", "2")
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
PAGE = "docs/frameworks.md"
pytestmark = pytest.mark.timeout(1800)  # a test starts up to nine processes that import a framework


@pytest.fixture(autouse=True)
def patience(sandbox):
    sandbox.deadline_s = PATIENT_S


def typed(sandbox, command):
    """A line of the page."""
    here = f"exec {sys.executable}"
    commands = {"bagua": "-P -m bagua.cli.main", "accelerate": "-m accelerate.commands.accelerate_cli"}
    sandbox.programs(**{name: f'{here} {words} "$@"' for name, words in commands.items()})
    return sandbox.run("sh", "-c", command, env=ENVIRONMENT)


def example_as_script(sandbox, module, *arguments):
    """The folder has a ``train.py``."""
    sandbox.script(
        "train.py",
        f"""
        import runpy, sys
        if __name__ == "__main__":
            sys.argv = [sys.argv[0], *{arguments!r}]
            runpy.run_module({module!r}, run_name="__main__")
        """,
    )


def losses(text):
    """All that ranks print of their losses. A line of another rank may follow at once."""
    return set(re.findall(r"loss ([\d.e+-]+ -> \d+\.\d+(?:e[+-]?\d+)?)", text))


@pytest.mark.full
def test_lightning_with_every_launcher(sandbox):
    pytest.importorskip("lightning", reason="Lightning is not installed")
    by_itself = (sys.executable, "-m", LIGHTNING, *SMALL)
    expected = losses(sandbox.run(*by_itself, "--strategy", "ddp").text)
    assert len(expected) == 1
    example_as_script(sandbox, LIGHTNING, *SMALL)
    [command] = pages.run_by("test_lightning_with_every_launcher", PAGE)
    for started in (
        typed(sandbox, command),
        sandbox.run(*by_itself),
        sandbox.run(*by_itself, "--strategy", "bagua_fork"),
    ):
        assert started.code == 0 and losses(started.text) == expected, started.text
    sandbox.assert_all_gone(SOON_S)


@pytest.mark.full
def test_lightning_in_elastic_jobs(sandbox):
    """``integration/frameworks/test_lightning_elastic.py`` has losses and newcomers."""
    pytest.importorskip("lightning", reason="Lightning is not installed")
    example_as_script(sandbox, LIGHTNING, "--epochs", "1", "--global-batch", "64")
    for command in pages.run_by("test_lightning_in_elastic_jobs", PAGE):
        started = typed(sandbox, command)
        assert started.code == 0 and losses(started.text), started.text
    sandbox.assert_all_gone(SOON_S)


@pytest.mark.full
def test_the_other_package_of_lightning(sandbox):
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    other = ("-m", LIGHTNING, *SMALL, "--package", "pytorch_lightning")
    expected = losses(sandbox.run(sys.executable, *other, "--strategy", "ddp").text)
    started = sandbox.bagua(*RUN, *other)
    assert started.code == 0 and losses(started.text) == expected != set(), started.text


@pytest.mark.full
@pytest.mark.parametrize("loop", ["trainer", "accelerate"])
def test_hugging_face_with_every_launcher(sandbox, loop):
    pytest.importorskip("transformers", reason="Transformers is not installed")
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    program = (HUGGING_FACE, *STEPS, "--loop", loop)
    plain = sandbox.run(*TORCHRUN, *program, env=ENVIRONMENT)
    assert plain.code == 0 and "backend gloo" in plain.text, plain.text
    expected = losses(plain.text)
    example_as_script(sandbox, *program)
    for command in pages.run_by("test_hugging_face_with_every_launcher", PAGE):
        started = typed(sandbox, command)
        assert started.code == 0 and "backend bagua" in started.text, started.text
        assert losses(started.text) == expected
    sandbox.assert_all_gone(SOON_S)
