"""The README's main job. integration/torch_api/test_torch_examples.py has the other examples."""

import json

import pytest
from rig.limits import SOON_S


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_digits_on_two_nodes(sandbox, ranks):
    shape = ("--nnodes", "2", "--nproc-per-node", str(ranks))
    fewer = ("--epochs", "10") if ranks == 1 else ()  # enough for two ranks
    done = sandbox.bagua("run", *shape, "-m", "bagua.examples.digits", *fewer)
    assert done.code == 0, done.text
    table = dict(line.removeprefix("[rank 0] ").split("  ", 1) for line in done.out.splitlines() if "  " in line)
    assert float(table["held-out accuracy"].strip().rstrip("%")) >= 97
    assert table[f"replicas ({2 * ranks})"].strip() == "yes, all bit-identical"
    assert {"steps per second", "moved inside hosts", "moved between hosts"} <= set(table)
    assert "behind computation" in table["communication hidden"]
    assert "step" in done.err
    sandbox.assert_all_gone(within=SOON_S)


@pytest.mark.full  # bench/test_smoke.py names algorithms, too
def test_algorithm_by_name(sandbox):
    command = ("run", "--nnodes", "2", "--algorithm", "one_bit_adam:codec=int4")
    done = sandbox.bagua(*command, "-m", "bagua.examples.digits", "--epochs", "1", "--output", "json")
    assert "below 97%" in done.text, done.text  # one epoch is too little
    line = next(line for line in done.out.splitlines() if line.startswith("[rank 0] {"))
    outcome = json.loads(line.removeprefix("[rank 0] "))
    assert outcome["replicas_identical"] is True
    assert outcome["bytes_between_hosts"] > 0
    assert 0 <= outcome["hidden_share"] <= 1


def test_algorithm_is_checked_before_anything_starts(sandbox):
    cases = (
        ("onebit_adam", "one_bit_adam"),
        ("local_sgd:interval", "key=value"),
        ("local_sgd:intervall=3", "no parameter 'intervall'. Known: interval, warmup_steps, codec"),
    )
    for name, words in cases:
        for command in (("run",), ("job", "submit")):
            done = sandbox.bagua(*command, "--algorithm", name, "-m", "bagua.examples.digits")
            assert done.code == 2 and words in done.err, done.text
