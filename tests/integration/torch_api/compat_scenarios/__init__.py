"""Scenarios in the style of programs written for the original, run on ranks by test_torch_compat.py."""

from compat_scenarios import background, decentralized, effective_tensors, python_operations, tensors, wrapper
from compat_scenarios.support import SCENARIOS

__all__ = ["SCENARIOS", "background", "decentralized", "effective_tensors", "python_operations", "tensors", "wrapper"]
