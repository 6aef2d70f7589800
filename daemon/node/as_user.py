"""Looks at the files of a job as the user of its ranks: ``python -m bagua.daemon.node.as_user``, in a process of that
user's.

A daemon of root's could read every file that a job names. So it asks a process that may read what the user may.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace

from bagua.base.errors import ConfigError
from bagua.daemon.node.job_specification import Program
from bagua.daemon.node.launch import LaunchError, check_program, read_secrets
from bagua.daemon.node.rank_user import RankUser

CHECK_S = 60.0
_MOST = 8 << 20  # bytes of an answer


def look(user: RankUser, program: Program, base: Mapping[str, str], node_id: str) -> dict[str, str]:
    """The job's secret variables, if ``user`` can start the program and read their files. Raises LaunchError."""
    asked = {"program": asdict(replace(program, code=None)), "base": dict(base), "node_id": node_id}
    with tempfile.TemporaryFile("w+") as question:
        json.dump(asked, question)
        question.seek(0)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bagua.daemon.node.as_user"],
                stdin=question,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=dict(base),
                user=user.uid,
                group=user.gid,
                extra_groups=user.groups,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"user {user.name} can't run {sys.executable} on this node: {error.strerror}. Install Bagua where all "
                "users can read it"
            ) from error
    return _answer(process, user)


def _answer(process: subprocess.Popen[bytes], user: RankUser) -> dict[str, str]:
    """Of a process that its user may change as he likes."""
    assert process.stdout is not None
    with process.stdout:
        text = _read(process.stdout.fileno())
    process.kill()
    process.wait()
    try:
        answer = json.loads(text)
        if isinstance(answer.get("error"), str):
            raise LaunchError(answer["error"][:10_000])
        return {str(name): str(value) for name, value in answer["secrets"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        said = text[-2_000:].decode(errors="replace").strip()
        raise LaunchError(
            f"user {user.name} can't run Bagua's checks on this node in {CHECK_S:g} s: {said}"
        ) from None


def _read(descriptor: int) -> bytes:
    """All that comes in time. Whatever that process has started may hold the other end open."""
    data, end = b"", time.monotonic() + CHECK_S
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    while len(data) < _MOST and waiting.poll(max(0.0, end - time.monotonic()) * 1000):
        piece = os.read(descriptor, _MOST)
        if not piece:
            break
        data += piece
    return data


def main() -> None:
    """Reads a question from stdin and answers it."""
    asked = json.load(sys.stdin)
    program = Program(**asked["program"])
    try:
        check_program(program, asked["base"])
        answer: dict[str, object] = {"secrets": read_secrets(program, asked["node_id"])}
    except (LaunchError, ConfigError, OSError) as error:
        answer = {"error": f"{error} (as user {asked['base'].get('USER', os.getuid())})"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
