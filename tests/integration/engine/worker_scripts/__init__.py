"""Functions that ranks of the engine's tests run; see worker.py."""
