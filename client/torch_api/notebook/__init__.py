"""Ranks started from a notebook, or from an interpreter: ``bagua.notebook_launcher``."""

from bagua.torch_api.notebook.launcher import notebook_launcher

__all__ = ["notebook_launcher"]
