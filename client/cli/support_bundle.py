"""``bagua support-bundle``: a file with all that a maintainer needs, secrets removed."""

from __future__ import annotations

import dataclasses
import os
import platform
import sqlite3
import ssl
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bagua.base.errors import BaguaError, ConfigError
from bagua.base.paths import state_dir
from bagua.base.secrets import looks_secret
from bagua.base.text import json_text
from bagua.cli.bundle import Bundle, tail_of
from bagua.cli.command import command, connected
from bagua.cli.options import CoordinatorOption, TlsOption, TokenFileOption, check_new_file

if TYPE_CHECKING:
    from bagua.client import Client
    from bagua.proto import job_pb2

SHOWN_VARIABLES = ("BAGUA_", "CUDA_", "LD_LIBRARY_", "NCCL_", "OMP_", "OTEL_", "PYTHON", "SLURM_", "TORCH_")
LOG_LINES = 200
LOG_RANKS = 8  # of each job
SCRAPE_S = 10.0
MOST_SCRAPED = 4 << 20


@command()
def support_bundle(
    file: Path | None = typer.Option(None, "--file", "-o", help="Where to; bagua-support-TIME.tar.gz."),
    jobs: int = typer.Option(5, min=0, max=100, help="Number of the newest jobs, with events and ends of logs."),
    job: list[str] | None = typer.Option(None, help="This job as well; may be repeated."),
    log: list[Path] | None = typer.Option(None, help="A log of a service: its end is taken; may be repeated."),
    metrics: list[str] | None = typer.Option(None, help="http://HOST:PORT/metrics of a service; may be repeated."),
    doctor: bool = typer.Option(True, help="Run the checks of `bagua doctor`."),
    max_mib: int = typer.Option(20, min=1, max=1024, help="Size of all contents together, before compression."),
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Packs versions, settings, checks, jobs, ends of logs and metrics into one file, with secrets removed.

    Works without a coordinator, too; the file says then that it was away.
    """
    path = file or Path(time.strftime("bagua-support-%Y%m%d-%H%M%S.tar.gz"))
    check_new_file(path)
    for address in metrics or ():
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"--metrics {address}: give a URL, such as http://127.0.0.1:9670/metrics. [BG102]")
    bundle = Bundle(known_secrets(token_file), max_mib << 20)
    bundle.collect("versions.json", lambda: json_text(versions(), 1))
    bundle.collect("settings.json", lambda: json_text(settings(), 1))
    bundle.collect("schema.json", lambda: json_text(schema(), 1))
    if doctor:
        bundle.collect("doctor.json", lambda: json_text(checks(), 1))
    for number, name in enumerate(metrics or ()):
        bundle.collect(f"metrics/{number}.txt", lambda name=name: f"# {name}\n{scrape(name, tls)}")  # type: ignore[misc]
    for number, source in enumerate(log or ()):
        bundle.collect(f"logs/{number}-{source.name}", lambda source=source: tail_of(source))  # type: ignore[misc]
    try:
        with connected(coordinator, token_file, tls) as client:
            _add_cluster(bundle, client, jobs, job or ())
    except BaguaError as error:
        bundle.notes["cluster"] = f"missing: {error}"
    size = bundle.write(path)
    print(f"{path}: {size / 1024:.0f} KiB. Look into it before you send it: `tar xzf {path}`.")
    for entry, note in bundle.notes.items():
        print(f"  {entry}: {note}", file=sys.stderr)


def known_secrets(token_file: Path | None) -> list[str]:
    """Values that must not leave this machine."""
    found = [value for name, value in os.environ.items() if looks_secret(name, value)]
    tokens = [token_file, os.environ.get("BAGUA_TOKEN_FILE"), state_dir() / "token"]
    for path in tokens:
        try:
            found.append(Path(path).read_text().strip() if path else "")
        except (OSError, ValueError):
            continue
    return found


def versions() -> dict[str, object]:
    """Returns versions of Bagua, Python, the system and all installed packages."""
    import bagua

    packages = {str(found.metadata["Name"]): found.version for found in metadata.distributions()}
    return {
        "bagua": bagua.__version__,
        "python": sys.version,
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def settings() -> dict[str, object]:
    """Variables that matter, and the files of the state folder with their sizes."""
    folder = state_dir()
    shown = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN_VARIABLES)}
    files = sorted(folder.glob("*")) + sorted((folder / "coordinator").glob("*"))
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files if path.is_file()}
    return {"environment": shown, "state_folder": str(folder), "files": sizes}


def schema() -> dict[str, str]:
    """Version of the schema of each SQLite database in the state folder. It is opened for reading alone."""
    found: dict[str, str] = {}
    for path in sorted((state_dir() / "coordinator").glob("*.db")):
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as database:
                rows = database.execute("SELECT version_num FROM alembic_version").fetchall()
        except sqlite3.Error as error:
            found[path.name] = f"can't be read: {error}"
        else:
            found[path.name] = ", ".join(row[0] for row in rows)
    return found or {"": "no SQLite database is in the state folder: the coordinator is elsewhere, or uses PostgreSQL"}


def checks() -> list[dict[str, object]]:
    """The findings of ``bagua doctor``."""
    from bagua.cli.doctor import findings

    return [dataclasses.asdict(finding) for finding in findings(build=False)]


def scrape(address: str, tls: Path | None = None) -> str:
    """Metrics of a service; over https with the certificates of ``tls``, or those that commands find here. Raises
    OSError and ConfigError."""
    context = _certified(tls) if address.startswith("https://") else None
    with urllib.request.urlopen(address, timeout=SCRAPE_S, context=context) as answer:
        return str(answer.read(MOST_SCRAPED).decode(errors="replace"))


def _certified(tls: Path | None) -> ssl.SSLContext:
    from bagua.client import find_reach

    files = find_reach(token="none is sent", tls=tls).tls  # find_reach refuses where it finds no token
    if files is None:
        return ssl.create_default_context()
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.cert, files.key)
    return context


def _add_cluster(bundle: Bundle, client: Client, newest: int, named: Iterable[str]) -> None:
    from bagua.client.describe import job_document, node_document

    bundle.collect("cluster/nodes.json", lambda: json_text([node_document(node) for node in client.nodes()], 1))
    listed = [job.job_id for job in client.list(limit=newest)] if newest else []
    for job_id in dict.fromkeys([*listed, *(client.find(prefix) for prefix in named)]):
        found = client.get(job_id)
        bundle.add(f"jobs/{job_id}/job.json", json_text(job_document(found), 1))
        bundle.collect(f"jobs/{job_id}/explain.txt", lambda job_id=job_id: _story(client, job_id))  # type: ignore[misc]
        bundle.collect(f"jobs/{job_id}/log.txt", lambda found=found: "".join(_ends(client, found)))  # type: ignore[misc]


def _story(client: Client, job_id: str) -> str:
    from bagua.cli.display.explanation import explain
    from bagua.client.describe import event_document

    events = list(client.events(job_id))
    lines = "".join(json_text(event_document(event)) + "\n" for event in events)
    return f"{explain(job_id, events, time.time())}\n{lines}"


def _ends(client: Client, job: job_pb2.Job) -> Iterator[str]:
    """The last lines of some ranks: of those that failed first."""
    ranks = sorted(job.ranks, key=lambda rank: (not (rank.exit_code or rank.signal), rank.rank))[:LOG_RANKS]
    for rank in ranks:
        yield f"==== rank {rank.rank}, member {rank.member}, node {rank.node_id}\n"
        for chunk in client.logs(job.job_id, ranks=[rank.member], tail=LOG_LINES):
            yield chunk.data.decode(errors="replace") + (f"[{chunk.error}]\n" if chunk.error else "")
