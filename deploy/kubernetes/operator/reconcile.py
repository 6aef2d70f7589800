"""Decides what to do about a BaguaJob: facts and a clock in; actions, the new status and the next look out. Pure.

Every decision follows from what is seen, so an operator that is killed at any point goes on where it was: an attempt is
found by its name at the coordinator, a submission is repeated with its key, pods have the names of their numbers.
"""

from __future__ import annotations

from dataclasses import replace

from bagua.base.errors import ConfigError
from bagua.operator import facts, objects, pods, status
from bagua.operator.credentials import credentials_wanted
from bagua.operator.facts import Action, Cancel, Delete, Manifest, Plan, Seen, Task, Trouble
from bagua.operator.job import (
    CleanPodPolicy,
    GangScheduler,
    RestartPolicy,
    Spec,
    SuspendMode,
    check_name,
    check_replicas,
    parse,
)
from bagua.operator.membership import Gang, adjust, complete
from bagua.operator.news import REPLACED
from bagua.operator.settings import Settings

LATE_S = 30.0  # a job begins on its minimum when the other pods are not there after so long
# (age, pause): until its pods are so old, a job is looked at so often. Nothing tells when its coordinator listens.
BRISK = ((10.0, 0.2), (60.0, 1.0))
SESSION_S = 1.0  # between two looks at a session that will end, as its pod is gone
TELL_S = 60.0  # time for daemons to hear that their job is over
LONGEST_BACKOFF_S = 3_600.0


def reconcile(seen: Seen, settings: Settings, now: float) -> Plan:
    """The next actions. ``now``: seconds since the epoch."""
    former = {
        "attempt": 0,
        "failures": 0,
        **seen.status,
        "observedGeneration": seen.body["metadata"].get("generation", 0),
    }
    former = status.with_condition(former, status.CREATED, True, "Created", "The operator has seen the BaguaJob.", now)
    try:
        spec = parse(seen.spec)
        if not former.get("phase"):
            check_name(seen.name)
            check_replicas(spec)
    except ConfigError as error:
        words = str(error)
        if not former.get("phase"):
            former = status.with_phase(former, status.FAILED, "Invalid", words, now)
        return Plan((), status.with_condition(former, "Invalid", True, "Invalid", words, now), None)
    if seen.invalid:  # it runs as it was; the change is refused
        former = status.with_condition(former, "Invalid", True, "Invalid", seen.invalid, now)
    else:
        former = _scaled(spec, former, now)
    if former.get("phase") in status.ENDED:
        return _finished(seen, spec, status.with_trouble(former, None, now), now)
    plan = Round(seen, spec, settings, former, now).plan()
    trouble = None if plan.status.get("phase") in status.ENDED else _trouble(seen)
    return replace(plan, status=status.with_trouble(plan.status, trouble, now))


def _scaled(spec: Spec, former: Manifest, now: float) -> Manifest:
    """Refuses a number of pods that is beyond the limits of a job that goes on: it has the nearest one."""
    try:
        check_replicas(spec)
    except ConfigError as error:
        words = f"{error} The job has {spec.wanted}."
        return status.with_condition(former, "Invalid", True, "ScaleClamped", words, now)
    return status.with_condition(former, "Invalid", False, "Valid", "", now)


def _trouble(seen: Seen) -> Trouble | None:
    """The first thing that stands in the way: what can't be made comes before what can't be placed or started."""
    found = [pod.trouble for pod in seen.pods if pod.trouble is not None and not pod.ended]
    trouble = seen.refusal or (found[0] if found else seen.coordinator_trouble)
    if trouble is None or trouble is seen.refusal or len(found) < 2:
        return trouble
    more = len(found) - 1
    return replace(trouble, message=f"{trouble.message} ({more} more {'pod waits' if more == 1 else 'pods wait'}.)")


def _finished(seen: Seen, spec: Spec, former: Manifest, now: float) -> Plan:
    """Cleans up, and deletes the BaguaJob after its time to live."""
    found = _counted(seen, spec, former, None)
    age, ttl = now - status.seconds_of(former["completionTime"]), spec.run_policy.ttl_seconds_after_finished
    if ttl is not None and age >= ttl:
        return Plan((Delete("BaguaJob", seen.name),), found, None)
    policy = spec.run_policy.clean_pod_policy
    actions = _cleaned(seen, policy, former["phase"], age >= TELL_S)
    alive = any(not pod.ended and not pod.leaving for pod in seen.pods)
    tells = alive and age < TELL_S and policy is not CleanPodPolicy.ALL
    if not tells:  # daemons hear of the end from the coordinator, so it goes after that
        whole = objects.infrastructure(seen, spec, seen.coordinator_credentials, False)
        # Nothing of a job that has ended is made anew.
        actions += _changed(seen, [one for one in whole if (one["kind"], one["metadata"]["name"]) in seen.hashes])
    pauses = [*([1.0] if tells else []), *([ttl - age] if ttl is not None else [])]
    return Plan(tuple(actions), found, min(pauses, default=None))


def _cleaned(seen: Seen, policy: CleanPodPolicy, phase: str, late: bool) -> list[Action]:
    """Ends daemons, so that their pods give devices back. ``late``: those that still run can't be told."""
    actions: list[Action] = []
    for pod in (one for one in seen.pods if not one.leaving):
        node = seen.nodes.get(pod.name)
        never_ran = pod.phase == "Pending"
        goes_on = pod.phase == "Running" and (policy is CleanPodPolicy.RUNNING if pod.ended else late)
        if policy is CleanPodPolicy.ALL or never_ran or goes_on:
            actions.append(Delete("Pod", pod.name, "the job has ended"))
        elif node is not None and node.connected and not pod.ended:
            actions.append(facts.End(pod.name, 0 if phase == status.SUCCEEDED else 1))
    return actions


def _changed(seen: Seen, manifests: list[Manifest]) -> list[Action]:
    """Returns actions for manifests that are not there in this form."""
    return [
        facts.Apply(one)
        for one in manifests
        if seen.hashes.get((one["kind"], one["metadata"]["name"])) != objects.hash_of(one)
    ]


def _counted(seen: Seen, spec: Spec, former: Manifest, task: Task | None) -> Manifest:
    """The status with what is counted."""
    alive = [pod for pod in seen.pods if not pod.ended and not pod.leaving]
    found = {
        **former,
        "replicas": len(alive),
        "selector": ",".join(f"{key}={value}" for key, value in objects.labels(seen, "daemon").items()),
    }
    if former.get("phase") not in status.ENDED:
        inside = len(task.members) if task and not task.ended else 0
        ended = [pod.phase for pod in seen.pods if pod.ended]
        _count(found, spec, inside, len(alive), ended.count("Succeeded"), ended.count("Failed"))
    if task is not None:
        found["jobId"] = task.job_id
        if task.step:
            found["step"] = task.step
    return found


def _count(found: Manifest, spec: Spec, inside: int, active: int, succeeded: int, failed: int) -> None:
    found["pods"] = f"{inside}/{spec.wanted}"
    found["replicaStatuses"] = {"Worker": {"active": active, "succeeded": succeeded, "failed": failed}}


class Round:
    """Decision about a job that has not ended."""

    def __init__(self, seen: Seen, spec: Spec, settings: Settings, former: Manifest, now: float) -> None:
        self.seen = seen
        self.spec = spec
        self.policy = spec.run_policy
        self.settings = settings
        self.now = now
        self.task = seen.task
        self.status = _counted(seen, spec, former, seen.task)
        self.actions: list[Action] = []
        self.again_s: float | None = settings.poll_s
        self.deadline_s: float | None = None  # until then; None: there is none

    def plan(self) -> Plan:
        """Returns what to do, and the new status."""
        if "startTime" not in self.status:
            self.status["startTime"] = status.stamp(self.now)
        release = self.policy.suspend and self.policy.suspend_mode is SuspendMode.RELEASE
        actions, mark = credentials_wanted(self.seen, self.settings, self.now)
        self.actions += actions
        if self.settings.issuer:
            self._apply([objects.certificate(self.seen, self.settings)])
        if not (self.seen.secrets.token and self.seen.secrets.certificate):  # pods can't start without
            self._phase(status.PENDING, "Credentials", "The token and the certificate are made.")
            self.again_s = 0.0 if self.actions else self.settings.poll_s
            return Plan(tuple(self.actions), self.status, self.again_s)
        resting = release and (self.task is None or self.task.ended) and not self.seen.pods
        self._apply(objects.infrastructure(self.seen, self.spec, mark, not resting))
        if pods.gang_scheduler(self.seen, self.spec) is GangScheduler.VOLCANO:
            self._apply([objects.volcano_group(self.seen, self.spec)])
        if self.task is not None and not self.task.ended:
            self._gone(self.task)
        if self._deadline_passed():  # it has said all that is to be done
            pass
        elif release:
            self._release()
        elif self.task is not None and self.task.ended:
            self._ended(self.task)
        elif self.task is not None:
            self._runs(self.task)
        else:
            self._begins()
        if self.status.get("phase") in status.ENDED:
            self.again_s = 0.0  # to clean up
            count = len(self.task.members) if self.task else 0
            good = count if self.status["phase"] == status.SUCCEEDED else 0
            _count(self.status, self.spec, good, 0, good, count - good)
        return Plan(tuple(self.actions), self.status, self.again_s)

    # ---- parts

    def _apply(self, manifests: list[Manifest]) -> None:
        self.actions += _changed(self.seen, manifests)

    def _phase(self, phase: str, reason: str, message: str) -> None:
        self.status = status.with_phase(self.status, phase, reason, message, self.now)

    def _deadline_passed(self) -> bool:
        limit = self.policy.active_deadline_seconds
        if limit is None:
            return False
        left_s = status.seconds_of(self.status["startTime"]) + limit - self.now
        if left_s > 0:
            self.deadline_s = left_s
            return False
        words = f"The job took longer than activeDeadlineSeconds ({limit} s)."
        if self.task is not None and not self.task.ended:
            self.actions.append(Cancel(self.task.job_id, words))
            self.status["message"] = words
        else:
            self._phase(status.FAILED, "DeadlineExceeded", words)
        return True

    def _release(self) -> None:
        """Suspended: the attempt ends, then its pods go."""
        if self.task is not None and not self.task.ended:
            self.actions.append(Cancel(self.task.job_id, "suspended"))
            self._phase(status.STOPPING, "Suspending", "The job is being suspended: its ranks are stopped.")
            return
        if self.task is not None and self.task.state == "succeeded":
            self._ended(self.task)
            return
        for pod in self.seen.pods:
            if not pod.leaving:
                self.actions.append(Delete("Pod", pod.name, "the job is suspended"))
        if self.seen.pods:
            names = ", ".join(pod.name for pod in self.seen.pods)
            self._phase(status.STOPPING, "Suspending", f"The job is being suspended: it waits until {names} are gone.")
            return
        if self.status.pop("jobId", None) is not None:  # on resume it is submitted again
            self.status["attempt"] += 1
        self.status.pop("gangSince", None)
        self._phase(status.SUSPENDED, "Suspended", "The job is suspended, and its pods are given back.")
        self.again_s = self.deadline_s

    def _ended(self, task: Task) -> None:
        """Handles an attempt that is over."""
        if task.state == "succeeded":
            self._phase(status.SUCCEEDED, "Succeeded", "All ranks have ended well.")
        elif task.state == "cancelled":
            if task.reason == "suspended":  # and resumed before its pods had ended
                self.status["attempt"] += 1
                self.status.pop("jobId", None)
                self._phase(status.RESTARTING, "Resumed", "The job is submitted again.")
                self.again_s = 0.0
            else:
                self._phase(status.FAILED, "Cancelled", task.reason or "The job was cancelled.")
        else:
            self._failed(task)

    def _gone(self, task: Task) -> None:
        """Tells the coordinator whose pods are gone: else it waits until ranks there must have ended."""
        there = {pod.name for pod in self.seen.pods if not pod.ended}
        for name in sorted(task.nodes - there):
            node = self.seen.nodes.get(name)
            if node is not None and node.connected:  # the coordinator has not seen the end of its session yet
                self.again_s = min(self.settings.poll_s, SESSION_S)
            elif node is not None:
                self.actions.append(facts.Gone(name, f"its pod is gone: {self.seen.ends.get(name) or 'deleted'}"))

    def _failed(self, task: Task) -> None:
        failures, policy = self.status["failures"], self.policy
        ends = {name: self.seen.ends[name] for name in sorted(task.nodes) if self.seen.ends.get(name)}
        more = [f"{name}: {words}" for name, words in ends.items() if words not in task.reason]
        task = replace(task, reason=f"{task.reason} ({'; '.join(more)})" if more else task.reason)
        # From 128 on: a shell's word for a signal.
        permanent = policy.restart_policy is RestartPolicy.EXIT_CODE and 0 < (task.exit_code or 0) < 128
        if policy.restart_policy is RestartPolicy.NEVER or permanent:
            self.status["failures"] = failures + 1
            self._phase(status.FAILED, "ExitCode" if permanent else "Failed", task.reason)
        elif failures >= policy.backoff_limit:
            self.status["failures"] = failures + 1
            words = f"It failed {failures + 1} times (backoffLimit {policy.backoff_limit}). {task.reason}"
            self._phase(status.FAILED, "BackoffLimitExceeded", words)
        else:
            # A float holds the most that backoffLimit allows, 2 ** 1000.
            pause = min(policy.backoff_seconds * 2.0**failures, LONGEST_BACKOFF_S)
            self.status.update(failures=failures + 1, attempt=self.status["attempt"] + 1)
            self.status.pop("jobId", None)
            self.status["retryTime"] = status.stamp(self.now + pause)
            self._phase(status.RESTARTING, "Restarting", f"Again in {pause:.0f} s. {task.reason}")
            self.again_s = min(pause, self.settings.poll_s)

    def _begins(self) -> None:
        """Handles a job of which nothing is submitted yet, or whose coordinator can't be asked."""
        if "jobId" in self.status and not self.seen.reachable:
            self.status["message"] = f"The coordinator can't be reached; ranks go on. {self.seen.trouble}".rstrip()
            return
        self.actions += [Cancel(one, "another attempt follows") for one in self.seen.former_attempts]
        waits = status.seconds_of(self.status["retryTime"]) - self.now if "retryTime" in self.status else 0.0
        gang = complete(self.seen, self.spec, self.status.get("gangSince"), self.now, LATE_S)
        if waits > 0 and self.status.get("phase") != status.RESTARTING and not self.seen.pods:
            self.again_s = min(waits, self.settings.poll_s)  # the gang was given back
            return
        if gang.give_back:
            self._give_back(gang)
            return
        self._pods(None)
        self.status.setdefault("gangSince", status.stamp(self.now))
        if waits > 0:
            return
        if self.status.get("phase") != status.RESTARTING:
            self._phase(status.PENDING, "Pending", gang.words or self.seen.trouble or "The coordinator starts.")
        self._look_again_soon(self.now - status.seconds_of(self.status["gangSince"]))
        if gang.ready and self.seen.reachable:
            attempt = self.status["attempt"]
            # The uid: a later BaguaJob of the same name must not be taken for this submission.
            self.actions.append(facts.Submit(f"{self.seen.uid}-{attempt}", attempt_name(self.seen, attempt)))
            self._look_again_soon(0.0)

    def _look_again_soon(self, age_s: float) -> None:
        pause = next((pause for until, pause in BRISK if age_s < until), self.settings.poll_s)
        self.again_s = min(pause, self.settings.poll_s)

    def _give_back(self, gang: Gang) -> None:
        """Gives up pods that are placed if the minimum is not complete: they would only keep others out."""
        words = "others of the minimum find no place"
        self.actions += [Delete("Pod", pod.name, words) for pod in self.seen.pods if not pod.leaving]
        pause = min(2 * self.policy.scheduling_policy.gang_timeout_seconds, LONGEST_BACKOFF_S)
        self.status.pop("gangSince", None)
        self.status["retryTime"] = status.stamp(self.now + pause)
        self._phase(status.PENDING, "Unschedulable", f"{gang.words} They are given back, and tried again later.")

    def _runs(self, task: Task) -> None:
        """Handles an attempt that goes on."""
        self.status.pop("gangSince", None)
        self.status.pop("retryTime", None)
        if self.policy.suspend and task.state in ("running", "waiting"):
            if not task.paused:
                self.actions.append(facts.Pause(task.job_id))
            self._phase(status.SUSPENDED, "Paused", "All ranks wait after their step; pods stay.")
        elif task.paused and not self.policy.suspend:
            self.actions.append(facts.Resume(task.job_id))
        elif task.state == "running":
            self._phase(status.RUNNING, "Running", task.growth)
        elif task.state == "waiting":
            self._phase(status.PENDING, "TooFewPods", task.reason)
        elif task.state == "stopping":
            self._stops(task)
        else:
            self._phase(status.STARTING, "Starting", task.reason)
        wanted = self.spec.wanted
        if self.spec.elastic and task.state in ("running", "waiting") and task.wanted != wanted:
            self.actions.append(facts.Scale(task.job_id, wanted))
        self._pods(task)

    def _stops(self, task: Task) -> None:
        """Says what an attempt waits for that is being stopped."""
        there = {pod.name for pod in self.seen.pods if not pod.ended}
        connected = {name for name, node in self.seen.nodes.items() if node.connected}
        silent = sorted((task.nodes & there) - connected)
        limit = self.spec.coordinator.fence_after_seconds
        words = f"{', '.join(silent)} can't be reached: ranks there end after fenceAfterSeconds ({limit} s)."
        self._phase(status.STOPPING, "Stopping", f"{task.reason} {words}" if silent else task.reason)

    def _pods(self, task: Task | None) -> None:
        actions, words = adjust(self.seen, self.spec, task, self.status["attempt"])
        self.actions += actions
        refused = self.spec.elastic is None and task is not None and len(task.nodes) not in (0, self.spec.replicas)
        if refused:
            words = "A static job can't be scaled while it runs: the next attempt has the new number of pods."
        reason = "ScaleRefused" if refused else REPLACED
        self.status = status.with_condition(self.status, "Changing", bool(words), reason, words, self.now)


def attempt_name(seen: Seen, attempt: int) -> str:
    """The name of an attempt at the coordinator, by which it is found."""
    return f"{seen.name}-{attempt}"
