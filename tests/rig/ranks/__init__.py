"""Ranks on real engines, as processes that start, stay and end."""
