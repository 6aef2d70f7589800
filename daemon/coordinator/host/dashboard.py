"""Runs the dashboard beside the coordinator, as a process of its own that ends with it.

Its own process, because it is a client like any other: a fault or a load there can't stop the coordinator, whose event
loop keeps leases, and the coordinator imports nothing of the client side. It costs one process of 60 MB.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import structlog

from bagua.base.errors import ConfigError
from bagua.base.security import check_listen_address

START_S = 30.0
STOP_S = 5.0
log = structlog.get_logger("coordinator")


def check(listen: str, tls: Path | None) -> None:
    """Raises ConfigError, before anything starts, if no dashboard can be served there."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--dashboard needs {' and '.join(missing)}: pip install 'bagua[dashboard]'. [BG209]")
    if tls is None:
        try:
            check_listen_address(listen, None)
        except ConfigError as error:
            raise ConfigError(f"--dashboard: {error}") from error


class DashboardProcess:
    """``start`` it once the coordinator serves; ``stop`` it before the coordinator ends."""

    def __init__(self, listen: str, coordinator: str, token_file: Path, tls: Path | None) -> None:
        self._command = [sys.executable, "-P", "-m", "bagua.cli.main", "dashboard", "--listen", listen]
        self._command += ["--coordinator", coordinator, "--token-file", str(token_file), "--death-signal"]
        self._command += [] if tls is None else ["--tls", str(tls.absolute())]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """The page's address. Raises ConfigError if it does not come up."""
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, "--ready-fd", str(write_end), pass_fds=[write_end], stdin=asyncio.subprocess.DEVNULL
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)  # else the end of the process would not end the pipe
        with os.fdopen(read_end) as pipe:
            try:
                async with asyncio.timeout(START_S):
                    line = await asyncio.to_thread(pipe.readline)
            except TimeoutError:
                line = ""
        if not line:
            await self.stop()
            raise ConfigError("The dashboard did not start; its own words are above. [BG910]")
        url: str = json.loads(line)["url"]
        log.info("dashboard", url=url)
        return url

    async def watch(self) -> None:
        """Tells if it ends by itself; the coordinator goes on without it."""
        assert self._process is not None
        code = await self._process.wait()
        log.error("dashboard_ended", exit_code=code)

    async def stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
