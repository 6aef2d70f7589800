"""Scenarios in the style of programs written for the original, run on ranks by test_torch_training.py."""

from compat_scenarios import decentralized, operations, tensors, wrapper  # noqa: F401 - they add their scenarios
from compat_scenarios.support import SCENARIOS  # noqa: F401
