"""``python -m bagua.daemon.node``: the keeper of a node, which starts the daemon with the same command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the daemon or its keeper, which stays small: it imports nothing of the daemon's."""
    if any(argument.partition("=")[0] == "--keeper-fd" for argument in sys.argv):
        from bagua.daemon.node.host.command_line import app

        app(prog_name="bagua daemon")
    else:
        from bagua.daemon.node.keeper.keeper import keep

        sys.exit(keep(sys.argv[1:]))


if __name__ == "__main__":
    main()
