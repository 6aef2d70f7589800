"""Starts a Redis server for this job on this host: on loopback, with a password, ended with the process that started
it."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bagua.base.errors import ConfigError
from bagua.base.paths import write_private

STOP_S = 10.0
# The shell reads from a pipe that this process holds open. When this process ends, even killed, it stops the server.
WATCH = """
folder=$1; shift
{ "$@" & echo $! >"$folder/pid"; wait $!; touch "$folder/ended"; } &
read -r _
until [ -s "$folder/pid" ]; do sleep 0.01; done
kill "$(cat "$folder/pid")"; wait
rm -rf -- "$folder"
"""


@dataclass
class RedisServer:
    """A server that was started. ``log``: its output."""

    port: int
    password: str
    log: Path
    _watcher: subprocess.Popen[bytes] = field(repr=False)

    def has_ended(self) -> bool:
        """True if the server has ended by itself; ``log`` says why."""
        return (self.log.parent / "ended").exists()

    def stop(self) -> None:
        """Ends it. Idempotent. Its folder goes with it, also if this process is killed."""
        if self._watcher.stdin is not None:
            self._watcher.stdin.close()
        try:
            self._watcher.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            self._watcher.wait()


def start_redis_server_cli(port: int, capacity: int, *args: str, password: str | None = None) -> RedisServer:
    """Starts redis-server on 127.0.0.1. It may not answer yet when this returns.

    ``capacity``: bytes; random entries make room when it is full. ``args``: more lines of its configuration, such as
    ``"--io-threads 2"``. ``password``: by default a random one. Raises ConfigError where redis-server is not installed.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise ConfigError(
            "redis-server is not installed here: install it (Debian: `apt install redis-server`), pass the hosts of a "
            "server that runs, or use the cache of this host (backend='host'). [BG210]"
        )
    password = password or secrets.token_urlsafe(24)
    folder = Path(tempfile.mkdtemp(prefix="bagua-redis-"))
    lines = [
        "bind 127.0.0.1",
        "protected-mode yes",
        f"port {port}",
        f"requirepass {password}",
        f"maxmemory {capacity}",
        # Each sample is used once in an epoch: the least recently used one is needed next.
        "maxmemory-policy allkeys-random",
        "appendonly no",
        'save ""',
        f"dir {folder}",
        *(line.removeprefix("--") for line in args),
    ]
    # In a file of this user alone: everybody could read a password on a command line.
    write_private(folder / "redis.conf", "\n".join([*lines, ""]).encode())
    log = folder / "log"
    with log.open("wb") as output:
        watcher = subprocess.Popen(
            ["sh", "-c", WATCH, "sh", str(folder), program, str(folder / "redis.conf")],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches the rank, which ends it
        )
    return RedisServer(port, password, log, watcher)
