"""Input from outside is checked, and bounded."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.base.errors import InvalidRequestError
from bagua.daemon.coordinator.rules.domain import HostRecord, JobRecord, Phase, RankRecord, RankState
from bagua.daemon.coordinator.rules.translate import (
    MAX_RANKS,
    checked_hello,
    checked_spec,
    job_message,
    local_job,
    spec_from_wire,
)
from bagua.daemon.coordinator.streams.directives import Order, Run
from bagua.proto import common_pb2, node_pb2

texts = st.text(max_size=30)
seconds = st.floats(allow_nan=True, allow_infinity=True)
sizes = st.integers(0, 2**32 - 1)


@given(
    st.builds(
        common_pb2.JobSpec,
        name=texts,
        entry=texts,
        args=st.lists(texts, max_size=3),
        env=st.dictionaries(texts, texts, max_size=3),
        workdir=texts,
        nnodes=sizes,
        nproc_per_node=sizes,
        placement_timeout_s=seconds,
        stop_grace_s=seconds,
        master_port=sizes,
        elastic=st.booleans(),
        min_nodes=st.just(0) | sizes,
        max_nodes=st.just(0) | sizes,
    )
)
def test_a_spec_is_sound_or_refused(spec):
    try:
        checked = checked_spec(spec)
    except InvalidRequestError as error:
        assert str(error).startswith("spec.")
        return
    assert 1 <= checked.nnodes * checked.nproc_per_node <= MAX_RANKS
    assert 1 <= checked.least_nodes <= checked.nnodes
    assert math.isfinite(checked.placement_timeout_s) and checked.stop_grace_s >= 0
    assert "\0" not in spec.entry and spec.entry.strip()
    assert spec_from_wire(checked.wire) == checked
    assert common_pb2.JobSpec.FromString(checked.wire) == spec


@given(st.binary(max_size=200))
def test_any_fact_is_translated_or_refused(data):
    fact = node_pb2.LocalJob()
    try:
        fact.ParseFromString(data)
    except Exception:
        return
    try:
        found = local_job(fact)
    except InvalidRequestError:
        return
    assert found.phase in Phase and all(rank.state in RankState for rank in found.ranks)


def test_texts_that_databases_refuse_are_cleaned():
    rank = common_pb2.RankStatus(rank=1, pid=2**32 - 1, error_tail="a\0b", exited_at=float("nan"))
    fact = local_job(node_pb2.LocalJob(job_id="j", error="\0", ranks=[rank]))
    assert fact.error == "�" and fact.ranks[0].error_tail == "a�b"
    assert fact.ranks[0].pid < 2**31 and fact.ranks[0].exited_at == 0.0
    assert fact.ranks[0].state is RankState.WAITING


def test_an_answer_has_the_last_lines_of_the_ranks_that_ended_first():
    spec = checked_spec(common_pb2.JobSpec(entry="t.py", nnodes=1, nproc_per_node=4_000))
    tail = "x" * 8_000
    ranks = [
        RankRecord(rank, rank, "a", RankState.EXITED, error_tail=tail, exited_at=9e3 - rank) for rank in range(4_000)
    ]
    host = HostRecord(0, "a", "h", "::1", "boot", 0, 4_000, ranks=tuple(ranks))
    message = job_message(JobRecord("job-1", spec, 1.0, hosts=(host,)))
    assert message.ByteSize() < 10_000_000
    assert message.ranks[3_999].error_tail == tail and not message.ranks[0].error_tail
    assert len(message.ranks) == 4_000


@pytest.mark.parametrize("field", ["node_id", "address", "boot_id", "hostname", "version"])
def test_a_hello_with_a_nul_is_refused(field):
    hello = node_pb2.Hello(node_id="a", address="h", boot_id="b")
    setattr(hello, field, "x\0")
    with pytest.raises(InvalidRequestError, match=f"hello.{field}"):
        checked_hello(hello)


def test_values_of_secrets_are_not_in_answers_and_reach_the_node():
    spec = common_pb2.JobSpec(entry="t.py", nnodes=1, nproc_per_node=1, env={"HF_TOKEN": "s3cret", "LR": "1"})
    spec.secret_env["WANDB_API_KEY"] = "/run/secrets/wandb"
    job = JobRecord("job-1", checked_spec(spec), 1.0, hosts=(HostRecord(0, "n", "h", "127.0.0.1", "b", 0, 1),))
    answer = job_message(job)
    assert dict(answer.spec.env) == {"HF_TOKEN": "***", "LR": "1"} and b"s3cret" not in answer.SerializeToString()
    assert dict(answer.spec.secret_env) == {"WANDB_API_KEY": "/run/secrets/wandb"}
    run = node_pb2.Directive.FromString(Order(Run("job-1", 1), job).to(job.hosts[0])).run
    assert dict(run.spec.env) == {"HF_TOKEN": "s3cret", "LR": "1"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"env": {"HF_TOKEN": "***"}}, r"'HF_TOKEN' is '\*\*\*'"),
        ({"secret_env": {"A": "relative"}}, "absolute path"),
        ({"secret_env": {"A": ""}}, "absolute path"),
        ({"secret_env": {"A": "/" + "x" * 5000}}, "absolute path"),
        ({"secret_env": {"A=B": "/f"}}, "can't be the name"),
        ({"secret_env": {"A": "/f\0"}}, "NUL"),
        ({"secret_env": {"A": "/f"}, "env": {"A": "1"}}, "is in spec.env, too"),
    ],
)
def test_variables_that_make_no_sense(more, words):
    with pytest.raises(InvalidRequestError, match=words):
        checked_spec(common_pb2.JobSpec(entry="t.py", nnodes=1, nproc_per_node=1, **more))
