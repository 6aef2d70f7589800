"""``bagua token …`` and ``bagua audit``: who may do what, and what was done."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO
from urllib.parse import unquote

import typer

from bagua.base.disk import disk_words
from bagua.base.errors import ConfigError, UsageError
from bagua.cli.command import connected as connect
from bagua.cli.job.submit import print_json
from bagua.cli.options import CoordinatorOption, Output, OutputOption, TlsOption, TokenFileOption

if TYPE_CHECKING:
    from bagua.proto import account_pb2

tokens = typer.Typer(help="Accounts of a service: tokens with a role.", no_args_is_help=True)
_SECONDS = {"h": 3_600.0, "d": 86_400.0, "w": 7 * 86_400.0}


class RoleName(StrEnum):
    """Roles that a token can have."""

    admin = "admin"
    submit = "submit"
    read = "read"
    node = "node"


@tokens.command()
def create(
    name: Annotated[
        str, typer.Argument(help="Of the person or program that gets it; jobs are submitted by this name.")
    ],
    role: Annotated[
        RoleName,
        typer.Option(
            help="admin: everything. submit: jobs of a namespace. read: sees a namespace, or all. node: a daemon."
        ),
    ],
    namespace: Annotated[str, typer.Option(help="Whose jobs it sees and makes.", show_default=False)] = "",
    unix_user: Annotated[
        str,
        typer.Option(
            help="Ranks of its jobs run as this user, on nodes whose daemon has --run-as submitter.", show_default=False
        ),
    ] = "",
    expires: Annotated[
        str, typer.Option(metavar="12h|30d|4w", help="When it ends by itself. Default: never.", show_default=False)
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Write it into this new file (0600) instead of printing it.", show_default=False)
    ] = None,
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Makes a token and prints it. It is shown this once: the service keeps a digest."""
    lasts_s = _seconds(expires)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_new_file(out)) if out is not None else None
        client = stack.enter_context(connect(coordinator, token_file, tls))
        made = client.accounts.create(name, role.value, namespace, lasts_s, unix_user)
        if file is not None:
            file.write(made.secret + "\n")
    shown = {} if out is not None else {"token": made.secret}
    if output is Output.json:
        print_json({**_document(made.token), **shown})
    elif out is not None:
        print(f"{out}: token {made.token.id} of {name}. Use it with --token-file {out}.")
    else:
        print(made.secret)
        print(f"Token {made.token.id} of {name} is shown this once.", file=sys.stderr)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[TextIO]:
    """A file of this user alone, made before the token is: a token that can't be written down would be lost. It goes
    again if something fails."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UsageError(f"--out {path}: there is such a file already. [BG109]") from error
    except OSError as error:
        raise ConfigError(f"--out: {disk_words(error, path)} [BG109]") from error
    try:
        with os.fdopen(descriptor, "w") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@tokens.command("list")
def list_all(
    all: Annotated[bool, typer.Option("--all", help="Those as well that are good no more.")] = False,
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Lists tokens, never their secrets."""
    with connect(coordinator, token_file, tls) as client:
        found = client.accounts.list(revoked=all)
    if output is Output.json:
        print_json({"tokens": [_document(one) for one in found]})
        return
    from bagua.cli.display.tables import clock, table

    headings = ("ID", "NAME", "ROLE", "NAMESPACE", "UNIX USER", "CREATED", "BY", "EXPIRES", "REVOKED")
    rows = []
    for one in found:
        who, ends = one.account, clock(one.expires_at) or "never"
        made = (clock(one.created_at), one.created_by, ends, clock(one.revoked_at))
        rows.append((one.id, who.name, who.role, who.namespace, who.unix_user, *made))
    table(headings, rows)


@tokens.command()
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID|NAME", help="An id, or a name: then all tokens of that name.")],
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Makes a token good no more, and ends calls that run with it. Jobs that were submitted with it go on."""
    with connect(coordinator, token_file, tls) as client:
        found = client.accounts.revoke(token)
    if output is Output.json:
        print_json({"tokens": [_document(one) for one in found]})
    else:
        for one in found:
            print(f"{one.id} of {one.account.name} is revoked")


@tokens.command()
def whoami(
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Shows the account behind your credential."""
    with connect(coordinator, token_file, tls) as client:
        found = client.accounts.whoami()
    if output is Output.json:
        print_json(_account(found))
    else:
        where = "all namespaces" if found.namespace == "*" else f"namespace {found.namespace}"
        runs_as = f", Unix user {found.unix_user}" if found.unix_user else ""
        print(f"{found.name}: role {found.role}, {where}{runs_as}")


def audit(
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    who: Annotated[str, typer.Option(help="Calls of this account alone.", show_default=False)] = "",
    target: Annotated[str, typer.Option(help="Calls about this job, node or token alone.", show_default=False)] = "",
    refused: Annotated[bool, typer.Option("--refused", help="Calls alone that were refused or failed.")] = False,
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Lists calls that changed something, read output, or were refused; the newest first."""
    with connect(coordinator, token_file, tls) as client:
        found = client.accounts.audit(limit, who, target, refused)
    if output is Output.json:
        print_json({"entries": [_entry(one) for one in found]})
        return
    from bagua.cli.display.tables import clock, table

    rows = [
        (
            clock(one.time),
            one.who,
            one.method.rpartition("/")[2],
            one.target,
            one.outcome,
            _address(one.peer),
            one.detail,
        )
        for one in found
    ]
    table(("TIME", "WHO", "CALL", "ABOUT", "OUTCOME", "FROM", "DETAIL"), rows)


def _call(method: str) -> str:
    """Without its service."""
    return method.rpartition("/")[2]


def _address(peer: str) -> str:
    """``ipv4:10.0.0.1:5`` as gRPC has it -> ``10.0.0.1:5``; ``ipv6:%5B::1%5D:5`` -> ``[::1]:5``."""
    return unquote(peer.removeprefix("ipv4:").removeprefix("ipv6:"))


def _seconds(text: str) -> float:
    """``30d`` -> seconds; empty: 0. Raises UsageError."""
    if not text:
        return 0.0
    found = re.fullmatch(r"(\d{1,6})([hdw])", text)
    if found is None or not int(found[1]):
        raise UsageError(f"--expires {text!r}: write 12h, 30d or 4w. [BG102]")
    return int(found[1]) * _SECONDS[found[2]]


def _account(one: account_pb2.Account) -> dict[str, Any]:
    return {"name": one.name, "role": one.role, "namespace": one.namespace, "unix_user": one.unix_user}


def _document(one: account_pb2.Token) -> dict[str, Any]:
    times = {"created_at": one.created_at, "expires_at": one.expires_at, "revoked_at": one.revoked_at}
    return {"id": one.id, **_account(one.account), "created_by": one.created_by, **times}


def _entry(one: account_pb2.AuditEntry) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in one.DESCRIPTOR.fields}
