"""Addresses elsewhere that pages of the site link: ``dev.py docs --links`` opens each of them.

No test does that, because tests need no network. ``unit/docs/test_site.py`` looks at their form, and at links within.
"""

from __future__ import annotations

import html
import re
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

LINK = re.compile(r'\b(?:href|src)=(?:"([^"]*)"|([^\s>"]+))')
HERE = ("127.0.0.1", "localhost")  # hosts of addresses that a reader's own programs serve
TIMEOUT_S = 30.0
AT_ONCE = 8
HEADERS = {"User-Agent": "Mozilla/5.0 (link check of Bagua's pages)"}


def external(site: Path) -> dict[str, list[str]]:
    """Returns by address, without its fragment, the pages that link it."""
    found: dict[str, list[str]] = {}
    for page in sorted(site.rglob("*.html")):
        for quoted, bare in LINK.findall(page.read_text()):
            address = urldefrag(html.unescape(quoted or bare)).url
            parts = urlsplit(address)
            if parts.scheme in ("http", "https") and parts.hostname not in HERE:
                pages = found.setdefault(address, [])
                name = page.relative_to(site).as_posix()
                pages += [name] if name not in pages else []
    return found


def trouble(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """Says why this address can't be read; empty if it can."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=HEADERS), timeout=timeout_s) as answer:
            answer.read(1)
    except (OSError, ValueError) as error:  # HTTPError and URLError are of the first kind
        return str(error) or type(error).__name__
    return ""


def broken(addresses: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """Addresses that can't be read, and why. Opens some at once."""
    addresses = list(addresses)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        words = pool.map(lambda address: trouble(address, timeout_s), addresses)
        return {address: why for address, why in zip(addresses, words, strict=True) if why}
