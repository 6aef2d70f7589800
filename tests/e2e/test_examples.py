"""The README's main job. integration/torch_api/test_torch_examples.py has the other examples."""

import pytest
from rig.limits import SOON_S


@pytest.mark.slow
def test_digits_on_two_nodes(sandbox):
    done = sandbox.bagua("run", "--nnodes", "2", "-m", "bagua.examples.digits", "--epochs", "10")
    assert done.code == 0, done.text
    table = dict(line.removeprefix("[rank 0] ").split("  ", 1) for line in done.out.splitlines() if "  " in line)
    assert float(table["held-out accuracy"].strip().rstrip("%")) >= 97
    assert table["replicas (2)"].strip() == "yes, all bit-identical"
    assert {"steps per second", "moved inside hosts", "moved between hosts"} <= set(table)
    assert "behind computation" in table["communication hidden"] and "step" in done.err
    sandbox.assert_all_gone(within=SOON_S)
