"""Events of jobs, and states."""

from __future__ import annotations

import re
from pathlib import Path

from bagua.daemon.coordinator.rules.event_kinds import EVENT_KINDS
from reference.markdown import anchor, escaped, table

STATE = re.compile(r"^  JOB_STATE_(\w+) = [1-9]\d*;(?:\s*// (.*))?$", re.MULTILINE)


def page() -> str:
    """Kinds of events, and states of jobs."""
    rows = [[f"{anchor(kind)}`{kind}`", escaped(words)] for kind, words in EVENT_KINDS.items()]
    proto = (Path(__file__).resolve().parents[3] / "proto" / "common.proto").read_text()
    states = [[f"{anchor(name.lower())}`{name}`", escaped(words)] for name, words in STATE.findall(proto)]
    return "\n".join(
        [
            "# Events of jobs\n",
            "`bagua job show JOB` lists them, `bagua job explain JOB` tells the story, `Client.watch` yields them. "
            "Each has a number, a time, the generation of the job, and a reason in words.\n",
            table(("kind", "meaning"), rows),
            "## States of jobs\n",
            "An event of kind `state` begins with the new state.\n",
            table(("state", "meaning"), states),
        ]
    )
