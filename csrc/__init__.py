"""The native core. ``load()`` returns the module; it is built on first use (see build.py)."""
