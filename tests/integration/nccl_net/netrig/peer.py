"""A process with a plugin of its own, told what to do in lines of JSON; run as a program. Also what starts it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # whatever PYTHONSAFEPATH says

from netrig.fake import PATIENCE_S, Comm, FakeNccl, Listener, Logger, NetError, Request, post, wait


class Peer:
    """The process. Each method of ``Worker`` is called by ``ask``; its result comes back."""

    def __init__(self, library: Path, logger: Path, env: dict[str, str] | None = None, start: bool = True) -> None:
        environment = {**os.environ, "NCCL_SOCKET_IFNAME": "lo", **(env or {})}
        command = [sys.executable, "-P", __file__, str(library), str(logger), str(int(start))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._said = b""

    def tell(self, call: str, **arguments: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"call": call, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The oldest result that was not read. Raises AssertionError with the peer's words."""
        assert self.process.stdout
        output = self.process.stdout.fileno()
        while b"\n" not in self._said:
            ready, _, _ = select.select([output], [], [], 2 * PATIENCE_S)
            more = os.read(output, 1 << 16) if ready else b""
            assert more, f"the peer {'ended' if ready else 'hangs'}: {self.process.poll()}"
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        found = json.loads(line)
        assert "failed" not in found, found["failed"]
        return found["result"]

    def ask(self, call: str, **arguments: Any) -> Any:
        self.tell(call, **arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.communicate()


class Worker:
    """Commands of a peer. Messages are ``pattern`` bytes."""

    def __init__(self, library: Path, logger: Path, start: bool) -> None:
        self.nccl = FakeNccl(library, Logger(logger), start=start)
        self.listener: Listener | None = None
        self.comms: list[Comm] = []
        self.requests: list[Request] = []

    def listen(self, device: int = 0) -> str:
        self.listener = self.nccl.listen(device)
        return self.listener.handle.hex()

    def accept(self) -> None:
        assert self.listener
        self.comms.append(called_again(self.listener.accept))

    def connect(self, handle: str, device: int = 0) -> None:
        self.comms.append(called_again(self.nccl.connector(bytes.fromhex(handle), device).connect))

    def connect_in_vain(self, handle: str) -> tuple[int, list[str]]:
        """The error with which connecting ends, and what the log says."""
        try:
            called_again(self.nccl.connector(bytes.fromhex(handle), 0).connect)
        except NetError as error:
            return error.code, self.nccl.logger.warnings()
        raise AssertionError("there is a connection")

    def send(self, comm: int, size: int, pattern: int, count: int = 1) -> None:
        """Begins to send, and does not wait."""
        sender = self.comms[comm]
        for _ in range(count):
            self.requests.append(post(sender.isend, sender.memory(bytes([pattern]) * size)))

    def receive(self, comm: int, size: int, count: int = 1) -> None:
        receiver = self.comms[comm]
        for _ in range(count):
            self.requests.append(post(receiver.irecv, receiver.memory(size)))

    def wait(self) -> list[list[int]]:
        """Waits for all that was begun: [size, lowest byte, highest byte] of each."""
        requests, self.requests = self.requests, []
        wait(*requests)
        found = []
        for request in requests:
            assert request.memory and request.size is not None
            view = bytes(request.memory.view[: request.size])
            found.append([request.size, min(view, default=0), max(view, default=0)])
        return found

    def progress(self, turns: int) -> None:
        """Tests what is under way so many times."""
        for _ in range(turns):
            self.requests = [request for request in self.requests if not request.test()]

    def look(self) -> dict[str, Any]:
        """Starts the plugin, if that was not done, and tells what it shows."""
        try:
            if self.nccl.context.value is None:
                self.nccl.start()
            names = [self.nccl.properties(index).name.decode() for index in range(self.nccl.devices())]
            return {"devices": names, "warnings": self.nccl.logger.warnings(), "error": None}
        except NetError as error:
            return {"devices": [], "warnings": self.nccl.logger.warnings(), "error": error.code}

    def finish(self) -> list[str]:
        self.nccl.finish()
        return self.nccl.logger.warnings()


def called_again(call: Callable[[], Comm | None]) -> Comm:
    """Calls connect or accept until there is a comm."""
    deadline = time.monotonic() + PATIENCE_S
    while (comm := call()) is None:
        assert time.monotonic() < deadline, "no connection"
        os.sched_yield()
    return comm


def main() -> None:
    worker = Worker(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = getattr(worker, request.pop("call"))(**request)
        except (AssertionError, NetError) as error:
            print(json.dumps({"failed": repr(error)}), flush=True)
        else:
            print(json.dumps({"result": result}), flush=True)


if __name__ == "__main__":
    main()
