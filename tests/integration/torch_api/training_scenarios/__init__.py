"""Scenarios of training, run on ranks by test_torch_training.py.

Each compares with a reference that runs in every rank: its loss is the mean (or sum) over ranks of the loss on that
rank's batch, all in one process.
"""

from training_scenarios import (  # noqa: F401 - they add their scenarios
    exchange,
    models,
    optimizers,
    plans,
    sparse,
    steps,
    uneven,
    wrapping,
)
from training_scenarios.support import SCENARIOS  # noqa: F401
