"""Events of jobs, and states."""

from __future__ import annotations

from bagua.daemon.coordinator.rules.event_kinds import EVENT_KINDS
from reference.markdown import anchor, escaped, table
from reference.protocols import enumeration


def page() -> str:
    """Kinds of events, and states of jobs."""
    rows = [[f"{anchor(kind)}`{kind}`", escaped(words)] for kind, words in EVENT_KINDS.items()]
    states = [
        [f"{anchor(name.removeprefix('JOB_STATE_').lower())}`{name.removeprefix('JOB_STATE_')}`", escaped(words)]
        for name, words in enumeration("common", "JobState").items()
        if not name.endswith("UNSPECIFIED")
    ]
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
