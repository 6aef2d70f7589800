"""Looks at the files of a job as the user of its ranks, in a process that becomes that user: a daemon of root's could
read every file that a job names.

The process changes its user itself. ``subprocess`` with ``user=`` calls fork(), and gRPC has handlers for that; without
it takes vfork(). So it also has nothing to read from the user's own files before it is that user, and, as it changed
users, the kernel lets nobody but root look into it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace

from bagua.base.errors import ConfigError
from bagua.daemon.node.ranks.launch import LaunchError, check_program, read_secrets
from bagua.daemon.node.ranks.user import RankUser
from bagua.daemon.node.rules.job_specification import Program

CHECK_S = 60.0


def look(user: RankUser, program: Program, base: Mapping[str, str], node_id: str) -> dict[str, str]:
    """The job's secret variables, if ``user`` can start the program and read their files. Blocks. Raises
    LaunchError."""
    about = {"uid": user.uid, "gid": user.gid, "groups": user.groups, "base": dict(base), "node_id": node_id}
    asked = json.dumps({**about, "program": asdict(replace(program, code=None))})
    # -P: as root it must not import from its folder.
    command = [sys.executable, "-P", "-m", "bagua.daemon.node.ranks.as_user"]
    try:
        # /: a folder that every user can enter.
        done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd="/", timeout=CHECK_S)
    except subprocess.TimeoutExpired:
        text = f"the files of the job could not be looked at as user {user.name} in {CHECK_S:g} s"
        raise LaunchError(f"{text} [BG906]") from None
    if done.returncode:
        raise LaunchError(
            f"the files of the job can't be looked at as user {user.name}: {done.stderr[-2_000:].strip()} [BG906]"
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise LaunchError(f"{answer['error']} (as user {user.name})")
    found: dict[str, str] = answer["secrets"]
    return found


def main() -> None:
    """Reads a question from stdin and answers it."""
    asked = json.load(sys.stdin)
    os.setgroups(asked["groups"])  # first: whoever is not root any more can't change groups
    os.setresgid(*[asked["gid"]] * 3)
    os.setresuid(*[asked["uid"]] * 3)
    program = Program(**asked["program"])
    try:
        check_program(program, asked["base"])
        answer: dict[str, object] = {"secrets": read_secrets(program, asked["node_id"])}
    except (LaunchError, ConfigError) as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": f"{error.filename}: {error.strerror}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
