"""The systems on which Bagua runs."""

from __future__ import annotations

import sys

from bagua.base.errors import PlatformError

NAMES = {"darwin": "macOS", "win32": "Windows", "cygwin": "Windows"}


def require_linux() -> None:
    """Raises PlatformError anywhere else. To be called before anything is imported that only Linux has."""
    if sys.platform == "linux":
        return
    way = "WSL 2, " if NAMES.get(sys.platform) == "Windows" else ""
    raise PlatformError(
        f"Bagua runs on Linux, and this is {NAMES.get(sys.platform, sys.platform)}: daemons and ranks share memory in "
        f"ways that only Linux has. Use {way}a Linux container or a Linux machine. [BG201]"
    )
