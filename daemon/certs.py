"""``python -m bagua.daemon.certs DIR --host H``: a folder of certificates for a cluster (``bagua certs`` runs this)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bagua.base.errors import ConfigError
from bagua.base.spelling import COMMAND_SETTINGS

# The root of usage errors in whatever click this typer brings along.
USAGE_ERROR: Any = typer.BadParameter.__mro__[2]


def run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Gets ca.pem, cert.pem and key.pem.")],
    host: Annotated[list[str], typer.Option(help="Name or address by which others reach a machine; again for each.")],
    renew: Annotated[bool, typer.Option("--renew", help="Make new ones although there are some.")] = False,
) -> None:
    """One certificate serves every role: copy DIR to each machine, pass --tls DIR to coordinator, daemons and CLI."""
    from bagua.daemon.coordinator.certs import VALID_DAYS, make_certificates  # imports cryptography: not for --help

    make_certificates(folder, host, renew)
    print(f"{folder}: a certificate for {', '.join(host)} and loopback, good for {VALID_DAYS} days.")
    print(
        f"Copy the folder to each machine (key.pem is secret) and pass --tls {folder} to coordinator, daemons and CLI."
    )


def main() -> None:
    """The command line."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings=COMMAND_SETTINGS)(run)
    try:
        app(standalone_mode=False, prog_name="bagua certs")
    except (ConfigError, USAGE_ERROR) as error:
        text = error.format_message() if isinstance(error, USAGE_ERROR) else str(error)
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
