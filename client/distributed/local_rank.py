"""A rank of ``bagua.distributed.launch --set_additional_flag``: becomes the script, with --local_rank=N in front of
its arguments, as scripts for torch's first launcher want it.

    python -m bagua.distributed.local_rank [-m | --no-python] SCRIPT [ARGS]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def command(words: Sequence[str], local_rank: str) -> list[str]:
    """The command line of the rank."""
    how, rest = (words[0], words[1:]) if words[0] in ("-m", "--no-python") else ("", words)
    python = [] if how == "--no-python" else [sys.executable, *([how] if how else [])]
    return [*python, rest[0], f"--local_rank={local_rank}", *rest[1:]]


if __name__ == "__main__":
    program = command(sys.argv[1:], os.environ["LOCAL_RANK"])
    os.execvp(program[0], program)  # becomes the script: signals and the exit code are the rank's own
