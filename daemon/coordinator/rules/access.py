"""The authorization table: who may call what. Every call of every service is here, and nothing else lets a call pass.

``decide`` is a pure function of caller, rule and job. The interceptor asks it once before the body of a call is read
(the role), and once after (the job that the request names).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from bagua.base.errors import ForbiddenError, NotFoundError, ServiceError
from bagua.daemon.coordinator.rules.identity import CURRENT, EVERYWHERE, Identity, Role


class About(enum.Enum):
    """Part of the cluster that a call is about."""

    CLUSTER = enum.auto()  # nothing of one namespace
    NAMESPACE = enum.auto()  # the handler shows and makes what is in the caller's namespace alone
    JOB_SEEN = enum.auto()  # the request's job: of the caller's namespace
    JOB_CHANGED = enum.auto()  # and submitted by the caller


@dataclass(frozen=True)
class Rule:
    """Roles that may call. ``audited``: written down also when all is well; refusals always are."""

    roles: frozenset[Role]
    about: About = About.CLUSTER
    audited: bool = False


@dataclass(frozen=True)
class Owned:
    """Namespace and owner of a job."""

    namespace: str
    submitted_by: str


class Verdict(enum.Enum):
    """The answer to a call."""

    YES = enum.auto()
    ROLE = enum.auto()  # the role does not have this call
    HIDDEN = enum.auto()  # the job is of another namespace: as if there were none
    ANOTHERS = enum.auto()  # the caller sees the job, and it is another's
    SCOPE = enum.auto()  # the token is good for another job


_ADMIN = frozenset({Role.ADMIN})
_SUBMIT = frozenset({Role.ADMIN, Role.SUBMIT})
_READ = frozenset({Role.ADMIN, Role.SUBMIT, Role.READ})
_READ_JOB = _READ | {Role.JOB}
_SUBMIT_JOB = _SUBMIT | {Role.JOB}
_ANYBODY = frozenset(Role)
_NOBODY: frozenset[Role] = frozenset()

OPEN = "/grpc.health.v1.Health/"  # Strangers may ask for health, too

_JOBS = "/bagua.v1.JobService/"
_NODES = "/bagua.v1.NodeService/"
_ACCOUNTS = "/bagua.v1.AccountService/"
_RANKS = "/bagua.v1.RankService/"

TABLE: dict[str, Rule] = {
    # see and make jobs
    _JOBS + "SubmitJob": Rule(_SUBMIT, About.NAMESPACE, audited=True),
    _JOBS + "GetJob": Rule(_READ_JOB, About.JOB_SEEN),
    _JOBS + "ListJobs": Rule(_READ, About.NAMESPACE),
    _JOBS + "FindJob": Rule(_READ, About.NAMESPACE),
    _JOBS + "ListEvents": Rule(_READ_JOB, About.JOB_SEEN),
    _JOBS + "WatchJob": Rule(_READ_JOB, About.JOB_SEEN),
    _JOBS + "ReadLogs": Rule(_READ_JOB, About.JOB_SEEN, audited=True),
    _JOBS + "TraceJob": Rule(_READ_JOB, About.JOB_SEEN, audited=True),
    # change jobs
    _JOBS + "CancelJob": Rule(_SUBMIT_JOB, About.JOB_CHANGED, audited=True),
    _JOBS + "ScaleJob": Rule(_SUBMIT, About.JOB_CHANGED, audited=True),
    _JOBS + "PauseJob": Rule(_SUBMIT, About.JOB_CHANGED, audited=True),
    _JOBS + "ResumeJob": Rule(_SUBMIT, About.JOB_CHANGED, audited=True),
    # nodes are shared by all
    _JOBS + "ListNodes": Rule(_READ),
    _JOBS + "DrainNode": Rule(_ADMIN, audited=True),
    _JOBS + "UndrainNode": Rule(_ADMIN, audited=True),
    _JOBS + "UpgradeNode": Rule(_ADMIN, audited=True),
    # what a namespace has found, and its code
    _JOBS + "ListTuning": Rule(_READ, About.NAMESPACE),
    _JOBS + "GetTuning": Rule(_READ, About.NAMESPACE),
    _JOBS + "ForgetTuning": Rule(_SUBMIT, About.NAMESPACE, audited=True),
    _JOBS + "FindCode": Rule(_SUBMIT, About.NAMESPACE),
    _JOBS + "PutCode": Rule(_SUBMIT, About.NAMESPACE, audited=True),
    # accounts
    _ACCOUNTS + "WhoAmI": Rule(_ANYBODY),
    _ACCOUNTS + "CreateToken": Rule(_ADMIN, audited=True),
    _ACCOUNTS + "ListTokens": Rule(_ADMIN),
    _ACCOUNTS + "RevokeToken": Rule(_ADMIN, audited=True),
    _ACCOUNTS + "ListAudit": Rule(_ADMIN),
    # daemons: the handler checks each message of one that serves a single job
    _NODES + "Session": Rule(frozenset({Role.ADMIN, Role.NODE, Role.JOB})),
    _NODES + "DatabaseSilence": Rule(_ADMIN),  # other coordinators show the administrator's token
    # about the server itself
    OPEN + "Check": Rule(_ANYBODY),
    OPEN + "List": Rule(_ANYBODY),
    OPEN + "Watch": Rule(_ANYBODY),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Rule(_ANYBODY - {Role.JOB}),
    # ranks call these on their daemon's own socket, which is closed to other users; here nobody may
    _RANKS + "Join": Rule(_NOBODY),
    _RANKS + "ReportProgress": Rule(_NOBODY),
    _RANKS + "DescribeWaits": Rule(_NOBODY),
    _RANKS + "TakesNewcomers": Rule(_NOBODY),
    _RANKS + "Tune": Rule(_NOBODY),
    _RANKS + "ReportTrace": Rule(_NOBODY),
}


def decide(caller: Identity, rule: Rule, job_id: str | None = None, job: Owned | None = None) -> Verdict:
    """Decides whether ``caller`` may call what ``rule`` is for, about ``job_id`` (None: the request has not come yet),
    which belongs to ``job`` (None: there is no such job).
    """
    if caller.role not in rule.roles:
        return Verdict.ROLE
    if rule.about not in (About.JOB_SEEN, About.JOB_CHANGED) or job_id is None:
        return Verdict.YES
    if caller.scope is not None:
        return Verdict.YES if caller.scope.covers(job_id) else Verdict.SCOPE
    if caller.namespace != EVERYWHERE and (job is None or job.namespace != caller.namespace):
        return Verdict.HIDDEN
    changes = rule.about is About.JOB_CHANGED and caller.role is not Role.ADMIN
    if changes and job is not None and job.submitted_by != caller.name:
        return Verdict.ANOTHERS
    return Verdict.YES


def needs_owner(caller: Identity, rule: Rule) -> bool:
    """True if ``decide`` has to know where the job belongs."""
    about_a_job = rule.about in (About.JOB_SEEN, About.JOB_CHANGED)
    return about_a_job and caller.scope is None and caller.role is not Role.ADMIN


def refusal(verdict: Verdict, caller: Identity, method: str, job_id: str = "") -> ServiceError | None:
    """The error that a caller gets; None: it may."""
    name = method.rpartition("/")[2]
    match verdict:
        case Verdict.YES:
            return None
        case Verdict.HIDDEN:
            return unknown_job(job_id)
        case Verdict.ANOTHERS:
            return ForbiddenError(
                f"Job {job_id[:64]} is another's: {name} is for its submitter and administrators. [BG805]"
            )
        case Verdict.SCOPE:
            assert caller.scope is not None
            return _out_of_scope("job", caller.scope.job_id, job_id)
    if caller.scope is not None:
        return ForbiddenError(
            f"This token is good for job {caller.scope.job_id} alone: it does not allow {name}. [BG805]"
        )
    return ForbiddenError(
        f"{caller.name} has the role {caller.role}, which does not allow {name}. `bagua token whoami` shows your "
        "account; an administrator can make another token. [BG805]"
    )


def unknown_job(job_id: str) -> NotFoundError:
    """Returns the error for a job that does not exist, or that the caller may not know of."""
    return NotFoundError(f"There is no job {job_id[:64]!r}. `bagua job list` shows those there are. [BG810]")


# ---- what a daemon with a token for one job (``base/job_token.py``) says in its session


def check_job(job_id: str) -> None:
    """Raises ForbiddenError if this call may say or ask nothing of that job."""
    scope = CURRENT.get().scope
    if scope is not None and not scope.covers(job_id):
        raise _out_of_scope("job", scope.job_id, job_id)


def check_node(node_id: str) -> None:
    """Raises ForbiddenError if this call may not come from a daemon of that id."""
    scope = CURRENT.get().scope
    if scope is not None and scope.node_id != node_id:
        raise _out_of_scope("node", scope.node_id, node_id)


def _out_of_scope(kind: str, own: str, other: str) -> ForbiddenError:
    return ForbiddenError(f"This token is good for {kind} {own} alone, not for {other[:64]!r}. [BG805]")
