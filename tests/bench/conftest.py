"""Tests of the programs of this folder import their packages, as the programs do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for the package tradeoff
