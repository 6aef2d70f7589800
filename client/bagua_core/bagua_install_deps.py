"""A module of the original's, as a program: ``python -m bagua_core.bagua_install_deps`` compiles the core."""

from bagua_core import install_deps

__all__ = ["install_deps"]

if __name__ == "__main__":
    install_deps()
