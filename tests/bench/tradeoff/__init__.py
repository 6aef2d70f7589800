"""Parts of ``study.py``: the grid of predictions, its pictures, and what was measured beside it."""
