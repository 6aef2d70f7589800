"""Builds the site of docs/ with its reference, or serves it while somebody writes.

    python3 deploy/dev.py docs [--out build/site] [--serve 127.0.0.1:8000]

Warnings are errors: a broken link, an anchor that is not there, a page that is missing. Links to addresses elsewhere
are not opened (CONTRIBUTING.md says by what). Reading the site needs no network, nor a server: open
build/site/index.html.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path

CONFIGURATION = Path(__file__).with_name("mkdocs.yml")
os.environ["NO_MKDOCS_2_WARNING"] = "1"  # Material's advertisement


def main() -> None:
    """Ends with exit code 1 and words for each warning."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the site; build/site")
    parser.add_argument("--serve", metavar="HOST:PORT", help="serve it there, and build it again after each change")
    options = parser.parse_args()
    from mkdocs.commands import build, serve
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if options.serve:
        # Pages that are being written have broken links meanwhile.
        serve.serve(str(CONFIGURATION), dev_addr=options.serve, strict=False)
        return
    started = time.monotonic()
    given = {"site_dir": str(options.out.resolve())} if options.out else {}
    config = load_config(str(CONFIGURATION), **given)
    config.plugins.on_startup(command="build", dirty=False)
    try:
        build.build(config)
    except Abort as error:
        sys.exit(f"{error}. Each warning above is an error.")
    finally:
        config.plugins.on_shutdown()
    pages = len([*Path(config.site_dir).rglob("*.html")])
    print(f"{pages} pages below {config.site_dir}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
