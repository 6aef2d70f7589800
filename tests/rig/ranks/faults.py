"""Kills ranks of a test at certain moments: BAGUA_TEST_KILL is "member:step:bucket:phase member:…", read by the test's
ranks.

Phases, in their order in a step: "between" steps; "before" the pass; "bucket": before that bucket of gradients starts,
inside backward; "start": likewise any bucket; "submitted": all buckets have been, no flags, and nothing is waited for;
"ready": results are whole, before the flags; "flags": they have been submitted; "heard": they are over; "committed":
before the optimizer's step. "unheard" kills nobody: the flags are over, and this rank hears instead that members have
changed.
Where newcomers are let in: "copy": before state is copied; "copied": it has been; "let_in": all have heard that.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.base.errors import MembershipChanged
from bagua.torch_api.comm.commit.flags import Flags
from bagua.torch_api.comm.state_copy import StateCopy
from bagua.torch_api.comm.step_state import Followers
from bagua.torch_api.job.connection import HostConnection, Regrouped
from bagua.torch_api.job.session import current
from bagua.torch_api.step import gradients, training_step, vote
from bagua.torch_api.step.execution import Execution

VARIABLE = "BAGUA_TEST_KILL"
PHASES = frozenset(
    "between before bucket start submitted ready flags heard unheard committed copy copied let_in".split()
)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start_beside() -> threading.Thread:
    """A thread that communicates with all present ranks until one of them is gone: it enters the next generation
    wherever the main thread is."""
    comm = bagua.communication.new_group(list(range(bagua.get_world_size()))).get_global_communicator()

    def add_up() -> None:
        with suppress(MembershipChanged):
            while True:
                bagua.allreduce_inplace(torch.ones(1), comm=comm)
                time.sleep(0.01)

    thread = threading.Thread(target=add_up)
    thread.start()
    return thread


class Fault:
    """That of this rank, if it has one. ``step`` is set by the program."""

    def __init__(self, buckets: Callable[[], list[Any]]) -> None:
        self.step = self._at = self._bucket = -1
        self._phase = ""
        self.copies = False  # newcomers have been let in, or are
        self._buckets = buckets
        for one in os.environ.get(VARIABLE, "").split():
            member, step, bucket, phase = one.split(":")
            assert phase in PHASES, f"{VARIABLE}: there is no phase {phase!r}"
            if current().membership.member == int(member):
                self._at, self._bucket, self._phase = int(step), int(bucket), phase
                self._install()

    def now(self, phase: str) -> bool:
        """At the first such moment from the step on."""
        return 0 <= self._at <= self.step and self._phase == phase

    def at(self, phase: str) -> None:
        """The program is at this moment."""
        if self.now(phase):
            kill_self()

    def _install(self) -> None:
        start, join_all, flags = gradients.GradientBucket.start, training_step.join_all, Flags.exchange
        send, send_early, attach, sent_along = Flags._send, Flags.send_early, Flags.attach, Flags.sent_along
        await_flags, arrive = Flags.await_sent, Flags.arrive
        start_execution, copy, follow = Execution.start, StateCopy.run, Followers.hear

        def start_bucket(bucket: Any) -> None:
            if self.now("bucket") and self._buckets()[self._bucket] is bucket:
                kill_self()
            start(bucket)

        def start_any(execution: Execution) -> None:
            self.at("start")
            start_execution(execution)

        def wait(buckets: Any, *send_flags: Any) -> Any:
            self.at("submitted")
            return join_all(buckets, *send_flags)

        def exchange_flags(own: Flags, *told: Any, **how: Any) -> None:
            self.at("ready")
            if self.now("flags"):
                HostConnection.transfer = submit_and_die  # type: ignore[method-assign]
            flags(own, *told, **how)

        def submit_flags(own: Flags, members: Any) -> None:
            send(own, members)
            self.at("flags")

        def hear_flags(own: Flags) -> None:
            sent = own.sent is not None
            await_flags(own)
            if sent and own._failure is None:
                are_over(own)

        def flags_arrive(own: Flags, told: Any) -> None:
            arrive(own, told)
            are_over(own)

        def are_over(own: Flags) -> None:
            if self.now("heard"):
                time.sleep(0.2)  # the daemons tell it to all others meanwhile
                kill_self()
            if self.now("unheard"):
                self._at = -1
                while not current().connection.generation_is_over():
                    time.sleep(0.001)
                own._failure, own.heard = Regrouped("The flags were over just before."), False

        def early_flags(own: Flags, members: Any) -> Any:
            if self.now("ready"):
                die_when_whole()
            return send_early(own, members)

        def attach_flags(own: Flags, members: Any, last: Any) -> bool:
            goes_alone = self.now("submitted") or self.now("ready")
            return not goes_alone and attach(own, members, last)

        def flags_sent_along(own: Flags) -> bool:
            sent = sent_along(own)
            if sent:
                self.at("flags")
            return sent

        def die_when_whole() -> None:
            while not all(bucket.execution.done() for bucket in self._buckets()):
                time.sleep(0.001)
            kill_self()

        def submit_and_die(connection: HostConnection, *request: Any) -> None:
            self.kept = connection.native.transfer(*request, 0.0, 0)  # its end would give memory back
            kill_self()

        def copy_state(one: StateCopy) -> None:
            self.copies = True
            self.at("copy")
            copy(one)
            self.at("copied")

        def follow_others(followers: Followers, *told: Any) -> float:
            if self.copies:
                self.at("let_in")
            return follow(followers, *told)

        StateCopy.run = copy_state  # type: ignore[method-assign]
        Followers.hear = follow_others  # type: ignore[method-assign]
        gradients.GradientBucket.start = start_bucket  # type: ignore[method-assign]
        Execution.start = start_any  # type: ignore[method-assign]
        training_step.join_all = vote.join_all = wait
        Flags.exchange = exchange_flags  # type: ignore[method-assign]
        Flags.await_sent = hear_flags  # type: ignore[method-assign]
        Flags.arrive = flags_arrive  # type: ignore[method-assign]
        Flags.attach = attach_flags  # type: ignore[method-assign]
        Flags.sent_along = flags_sent_along  # type: ignore[method-assign]
        Flags._send = submit_flags  # type: ignore[method-assign]
        Flags.send_early = early_flags  # type: ignore[method-assign]
