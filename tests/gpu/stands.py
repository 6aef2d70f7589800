"""Section: what every algorithm must stand, on CUDA tensors; see algorithms.py."""

import sys

from gpu.algorithms import run, stands_for

if __name__ == "__main__":
    sys.exit(run("stands", stands_for))
