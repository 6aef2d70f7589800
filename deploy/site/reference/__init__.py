"""The reference, made from the code when the site is built. Nothing of it is in the repository.

``pages()`` returns Markdown by path below ``reference/``. Each entry has an anchor. A test compares the
anchors with the code (``tests/unit/docs/test_site.py``).
"""

from __future__ import annotations

from reference import command_line, events, python_api, settings, variables

TITLES = {"python": "Python", "command-line": "Command line"}  # of folders of pages


def pages() -> dict[str, str]:
    """Makes all pages, in the order of the navigation."""
    return {
        **python_api.pages(),
        **command_line.pages(),
        "variables.md": variables.page(),
        "settings.md": settings.page(),
        "events.md": events.page(),
    }
