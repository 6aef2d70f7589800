"""``python -m bagua.operator``: serves BaguaJobs (``bagua operator`` runs this)."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from bagua.base.errors import ConfigError
from bagua.base.option_names import COMMAND_SETTINGS

log = logging.getLogger("bagua.operator")
# The root of usage errors in whatever click this typer brings along.
USAGE_ERROR: Any = typer.BadParameter.__mro__[2]


def run(
    namespace: Annotated[
        list[str] | None, typer.Option(help="Serve this namespace; again for more. [default: all]")
    ] = None,
    kubeconfig: Annotated[
        str, typer.Option(help="How to reach the cluster. [default: KUBECONFIG, else the service account]")
    ] = "",
    poll: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Pause between two looks at a job that runs. [default: 5]")
    ] = None,
    issuer: Annotated[
        str | None,
        typer.Option(metavar="KIND/NAME", help="cert-manager's issuer of certificates. [default: the operator's own]"),
    ] = None,
    liveness: Annotated[
        str | None, typer.Option(metavar="URL", help="Say there that the operator lives: http://0.0.0.0:8080/healthz")
    ] = None,
    metrics: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Serve Prometheus metrics there.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what kopf does, too.")] = False,
) -> None:
    """Runs BaguaJobs of a Kubernetes cluster."""
    given = {"namespaces": tuple(namespace) if namespace else None, "poll_s": poll, "issuer": issuer}
    given |= {"liveness": liveness, "metrics": metrics}
    try:
        serve({key: value for key, value in given.items() if value is not None}, kubeconfig, verbose)
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed: pip install "bagua[kubernetes]"') from error


def serve(given: dict[str, Any], kubeconfig: str, verbose: bool) -> None:
    """Runs the operator until SIGTERM or SIGINT. Raises ConfigError."""
    import kopf  # late: it is there with the extra `kubernetes` alone

    from bagua.operator.adapter import make_registry
    from bagua.operator.cluster import Cluster
    from bagua.operator.controller import Controller
    from bagua.operator.settings import Settings

    settings = Settings(**given)
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    if not verbose:
        for name in ("httpx", "httpx2", "kopf"):  # httpx tells of each request
            logging.getLogger(name).setLevel(logging.WARNING)
    if kubeconfig:
        os.environ["KUBECONFIG"] = kubeconfig  # kopf reads it, too
    cluster = Cluster(settings.taints, kubeconfig)
    with contextlib.closing(cluster):
        found = cluster.find_others()
        log.info("installed beside: %s", ", ".join(sorted(found)) or "neither Kueue, Volcano nor cert-manager")
        controller = Controller(cluster, settings)
        with contextlib.ExitStack() as closing:
            if settings.metrics:
                from bagua.operator.metrics import OperatorCollector, serve_metrics

                closing.callback(
                    serve_metrics(settings.metrics, OperatorCollector(controller.numbers, controller.phases))
                )
            kopf.run(
                registry=make_registry(controller, settings),
                standalone=True,  # kopf's peering needs objects of a kind that is not installed
                clusterwide=not settings.namespaces,
                namespaces=settings.namespaces,
                liveness_endpoint=settings.liveness or None,
            )


def command_line(function: Callable[..., None], name: str) -> None:
    """Runs a command; errors of users end it with code 2 and words."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings=COMMAND_SETTINGS)(function)
    try:
        app(standalone_mode=False, prog_name=name)
    except (ConfigError, USAGE_ERROR) as error:
        text = error.format_message() if isinstance(error, USAGE_ERROR) else str(error)
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        raise SystemExit(2) from None


def main() -> None:
    """Runs the command line of the operator."""
    command_line(run, "bagua operator")


if __name__ == "__main__":
    main()
