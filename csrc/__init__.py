"""The native core. ``load()`` returns the module; it is built on first use (see build.py)."""

from bagua.csrc.build import BuildError, core_path, describe, is_built, load

__all__ = ["BuildError", "core_path", "describe", "is_built", "load"]
