"""Makes a function a command: ``@command()`` gives it what it names as a parameter, and typer the options for that.

    @command()
    def show(job_id: JobId, output: Output, client: Client) -> None:

A parameter of one of these names is given, unless it has a default: then it is an option like others.

| parameter | what the function gets | options |
|---|---|---|
| ``job`` | the values of job options, by name (``job_options.Given``) | all that its command has |
| ``output`` | how it prints | ``--output`` |
| ``report`` | where results of a benchmark go (``bench.common.Report``) | and ``--plot``, ``--save``, ``--quiet`` |
| ``client`` | a client of the service, closed afterwards | ``--coordinator``, ``--token-file``, ``--tls`` |
| ``connect`` | a function that makes it, for commands that check something first | the same |
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagua.cli import config_file, job_options
from bagua.cli.bench.common import PlotOption, QuietOption, Report, SaveOption
from bagua.cli.options import CoordinatorOption, Output, OutputOption, TlsOption, TokenFileOption

if TYPE_CHECKING:
    from bagua.client import Client as Client
else:
    Client = Any  # commands name it in annotations alone: its import takes a moment

Connect = Callable[[], AbstractContextManager[Client]]
Function = Callable[..., Any]
_REPORT = {"plot": PlotOption, "save": SaveOption}
_SERVICE = {"coordinator": CoordinatorOption, "token_file": TokenFileOption, "tls": TlsOption}


@contextmanager
def connected(coordinator: str | None, token_file: Path | None, tls: Path | None) -> Iterator[Client]:
    """A client, closed at the end; what is not given is found as by ``bagua.client.find_reach``. Raises BaguaError."""
    from bagua.base.security import read_token
    from bagua.client import Client

    token = read_token(token_file) if token_file else None
    with Client(coordinator, token=token, tls=tls) as client:
        yield client


def command(name: str = "", **settings: Any) -> Callable[[Function], Function]:
    """Decorates the one command of a file. ``name``: of a command that has job options, as ``Option.commands`` has it.
    ``settings``: typer's own."""

    def decorate(function: Function) -> Function:
        own = inspect.signature(function).parameters
        injected = {key for key, one in own.items() if key in _INJECTED and one.default is one.empty}
        plain = {key: hint for key, hint in function.__annotations__.items() if key not in injected}
        # Types of what is injected may be names that are there for type checkers alone: they are not looked up.
        hints = typing.get_type_hints(types.SimpleNamespace(__annotations__=plain), function.__globals__, None, True)
        found: dict[str, inspect.Parameter] = {}
        job = job_options.parameters(name)
        for key, one in own.items():
            # A job option that the function declares by itself keeps its place among the others.
            more = _INJECTED[key](job) if key in injected else [one.replace(annotation=hints[key])]
            # One without a default may come after others that way.
            found |= {each.name: each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in more}

        @wraps(function)
        def call(**given: Any) -> Any:
            rest = {key: value for key, value in given.items() if key in own}
            if "job" in injected:
                rest["job"] = {key: given[one.name] for key, one in job.items() if key not in own}
            if "report" in injected:
                rest["report"] = Report(**{key: given[key] for key in ("output", *_REPORT, "quiet")})
            if not injected & {"client", "connect"}:
                return function(**rest)
            reach = [given[key] for key in _SERVICE]
            if "connect" in injected:
                return function(**rest, connect=lambda: connected(*reach))
            with connected(*reach) as client:
                return function(**rest, client=client)

        if name:
            config_file.COMMANDS[name] = call
        call.settings = settings  # type: ignore[attr-defined]
        call.__signature__ = inspect.Signature(list(found.values()))  # type: ignore[attr-defined]
        call.__annotations__ = {key: one.annotation for key, one in found.items()}
        return call

    return decorate


def _optional(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _service(_: Any) -> list[inspect.Parameter]:
    return [_optional(name, option) for name, option in _SERVICE.items()]


def _output(_: Any) -> list[inspect.Parameter]:
    return [_optional("output", OutputOption, Output.text)]


def _report(_: Any) -> list[inspect.Parameter]:
    files = [_optional(name, option) for name, option in _REPORT.items()]
    return [*_output(_), *files, _optional("quiet", QuietOption, False)]


_INJECTED: dict[str, Callable[[dict[str, inspect.Parameter]], list[inspect.Parameter]]] = {
    "job": lambda job: list(job.values()),
    "output": _output,
    "report": _report,
    "client": _service,
    "connect": _service,
}
