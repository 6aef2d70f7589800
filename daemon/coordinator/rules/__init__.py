"""Decisions and facts without input or output: same facts and clock in, same answer out."""
