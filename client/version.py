"""The version, under the path of the original."""

from bagua import __version__

__all__ = ["__version__"]
