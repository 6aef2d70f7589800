"""``python -m bagua.daemon.certs DIR --host H``: a folder of certificates for a cluster (``bagua certs`` runs this)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bagua.base.errors import ConfigError
from bagua.base.option_names import COMMAND_SETTINGS

# The root of usage errors in whatever click this typer brings along.
USAGE_ERROR: Any = typer.BadParameter.__mro__[2]


def run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Gets ca.pem, cert.pem and key.pem.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address by which others reach a machine; again for each.")
    ] = None,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Overwrite the certificates that there are. Only while the cluster is stopped."),
    ] = False,
    rotate: Annotated[
        str,
        typer.Option(
            metavar="begin|switch|finish",
            help="Replace the certificates without a stop, in three steps. Copy DIR to every machine after each.",
            show_default=False,
        ),
    ] = "",
    show: Annotated[
        bool, typer.Option("--show", help="Show hosts, authorities and days left of the certificates in DIR.")
    ] = False,
) -> None:
    """One certificate serves every role: copy DIR to each machine, pass --tls DIR to coordinator, daemons and CLI."""
    from bagua.daemon.coordinator.admin import rotation  # imports cryptography: not for --help
    from bagua.daemon.coordinator.admin.certs import VALID_DAYS, make_certificates

    if sum((bool(host), bool(rotate), show)) != 1 or (renew and not host):
        raise ConfigError("Give --host (with or without --renew), --rotate, or --show. [BG103]")
    if host:
        make_certificates(folder, host, renew)
        print(f"{folder}: a certificate for {', '.join(host)} and loopback, good for {VALID_DAYS} days.")
        print(
            f"Copy the folder to each machine (key.pem is secret) and pass --tls {folder} to coordinator, daemons and "
            "CLI."
        )
        return
    if rotate and rotate not in list(rotation.Step):
        raise ConfigError(f"--rotate {rotate}: begin, switch or finish. [BG103]")
    found = rotation.rotate(folder, rotation.Step(rotate)) if rotate else rotation.status(folder)
    trusted = "1 authority is" if found.authorities == 1 else f"{found.authorities} authorities are"
    print(f"{folder}: for {', '.join(found.hosts)}; {found.days_left} days left; {trusted} trusted.")
    if found.next_step is not None:
        hand = "Hand the folder to every machine, then: " if rotate else "Next: "
        print(f"{hand}bagua certs {folder} --rotate {found.next_step}")


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
