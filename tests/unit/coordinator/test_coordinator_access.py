"""The authorization table covers every call, and its decisions are those of a plain table."""

from pathlib import Path

import grpc_health.v1.health_pb2 as health_pb2
import grpc_reflection.v1alpha.reflection_pb2 as reflection_pb2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bagua.proto
from bagua.base.job_token import Scope
from bagua.daemon.coordinator.api.interceptors import _NOT_IN_TABLE
from bagua.daemon.coordinator.rules.access import TABLE, About, Owned, Verdict, decide, needs_owner, refusal
from bagua.daemon.coordinator.rules.identity import EVERYWHERE, Identity, Role
from bagua.proto import account_pb2, common_pb2, job_pb2, node_pb2, rank_pb2

FILES = (account_pb2, common_pb2, job_pb2, node_pb2, rank_pb2, health_pb2, reflection_pb2)


def every_method():
    return {
        f"/{service.full_name}/{method.name}"
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def test_every_call_of_every_service_has_an_entry_and_nothing_else_has():
    later = {"/grpc.health.v1.Health/List"}  # which older versions of that package lack
    assert set(TABLE) - later == every_method() - later


def test_no_protocol_file_is_missing_here():
    (folder,) = bagua.proto.__path__
    known = {Path(file.__file__).stem for file in FILES}
    assert {path.stem for path in Path(folder).glob("*_pb2.py")} <= known


def test_calls_about_a_job_have_a_job_in_their_request():
    for method, rule in TABLE.items():
        service, _, name = method.rpartition("/")
        if rule.about in (About.JOB_SEEN, About.JOB_CHANGED):
            found = job_pb2.DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods_by_name[name]
            assert "job_id" in found.input_type.fields_by_name, method


# The same table in plain letters: A all, S its namespace's jobs and its own ones, R sees, N a daemon, J its one job.
PLAIN = {
    "ASRJ": "GetJob ListEvents WatchJob ReadLogs TraceJob",
    "ASR": "ListJobs FindJob ListNodes ListTuning GetTuning",
    "ASJ": "CancelJob",
    "AS": "SubmitJob ScaleJob PauseJob ResumeJob ForgetTuning FindCode PutCode",
    "A": "DrainNode UndrainNode UpgradeNode CreateToken ListTokens RevokeToken ListAudit DatabaseSilence",
    "ANJ": "Session",
    "ASRN": "ServerReflectionInfo",
    "ASRNJ": "WhoAmI Check List Watch",
    "": "Join ReportProgress DescribeWaits TakesNewcomers Tune ReportTrace",
}
SEES = PLAIN["ASRJ"].split()
CHANGES = ["CancelJob", "ScaleJob", "PauseJob", "ResumeJob"]
LETTERS = {Role.ADMIN: "A", Role.SUBMIT: "S", Role.READ: "R", Role.NODE: "N", Role.JOB: "J"}

NAMES = st.sampled_from(["ann", "ben"])
SPACES = st.sampled_from(["red", "blue"])
JOBS = st.sampled_from(["job-1", "job-2", ""])


@st.composite
def callers(draw):
    role = draw(st.sampled_from(list(Role)))
    namespace = EVERYWHERE
    if role is Role.SUBMIT or (role is Role.READ and draw(st.booleans())):
        namespace = draw(SPACES)
    scope = Scope(draw(st.sampled_from(["job-1", "job-2"])), "n") if role is Role.JOB else None
    return Identity(draw(NAMES), role, namespace, scope)


def plain(caller, name, job_id, job):
    letters = next(letters for letters, names in PLAIN.items() if name in names.split())
    if LETTERS[caller.role] not in letters:
        return False
    if name not in SEES + CHANGES or caller.role is Role.ADMIN:
        return True
    if caller.role is Role.JOB:
        return caller.scope is not None and caller.scope.job_id == job_id
    if caller.namespace != EVERYWHERE and (job is None or job.namespace != caller.namespace):
        return False
    return name in SEES or job is None or job.submitted_by == caller.name


@settings(max_examples=200, deadline=None)
@given(callers(), st.sampled_from(sorted(TABLE)), JOBS, st.none() | st.builds(Owned, SPACES, NAMES))
def test_decisions_are_those_of_a_plain_table(caller, method, job_id, job):
    rule, name = TABLE[method], method.rpartition("/")[2]
    known = job if needs_owner(caller, rule) else None
    early, verdict = decide(caller, rule), decide(caller, rule, job_id, known)
    assert (verdict is Verdict.YES) == plain(caller, name, job_id, job)
    assert early is Verdict.YES or early is verdict  # the first answer refuses nothing that the second lets in
    assert (refusal(verdict, caller, method, job_id) is None) == (verdict is Verdict.YES)


@pytest.mark.parametrize("role", list(Role))
def test_a_call_without_an_entry_is_nobodys(role):
    assert decide(Identity("x", role), _NOT_IN_TABLE) is Verdict.ROLE
