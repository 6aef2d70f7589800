"""Stores, under the paths of the original."""
