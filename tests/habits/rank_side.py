"""Runs a program on a rank of a pool."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests

from habits.case import load_habits
from habits.ways import WAYS

import bagua.torch_api as bagua


def run_habit(name, way):
    """The program's findings."""
    by = WAYS[way](bagua.get_rank(), bagua.get_world_size())
    found = load_habits()[name].program(by)
    by.close()
    return found
