"""Jobs as documents and words, and the exit code that tells of their end."""

import json

from bagua.cli.display import tables
from bagua.client import describe
from bagua.dashboard.top_texts import job_head
from bagua.proto import common_pb2, job_pb2
from bagua.timeline.chrome import to_chrome
from bagua.timeline.shares import StepShare, straggler_words
from bagua.timeline.trace import Source, Span, Trace


def ended(state, reason, *ranks):
    spec = common_pb2.JobSpec(name="train", nnodes=1, nproc_per_node=max(1, len(ranks)))
    return job_pb2.Job(job_id="j1", spec=spec, state=state, reason=reason, ranks=ranks)


def exited(rank, code, signal=0, at=1.0):
    return common_pb2.RankStatus(
        rank=rank, state=common_pb2.RANK_STATE_EXITED, exit_code=code, signal=signal, exited_at=at
    )


def test_exit_code_of_the_rank_that_the_reason_names():
    job = ended(
        describe.FAILED, "rank 1 on node b exited with code 3: boom", exited(0, 1, at=1.0), exited(1, 3, at=2.0)
    )
    assert describe.exit_code(job) == 3
    assert describe.first_failed_rank(job) == job.ranks[1]


def test_exit_code_of_the_first_to_fail_when_the_reason_names_none():
    job = ended(describe.FAILED, "the network is gone", exited(0, 4, at=5.0), exited(1, 3, at=2.0), exited(2, 0))
    assert describe.exit_code(job) == 3


def test_a_rank_that_the_daemon_stopped_did_not_fail():
    """The reason names it, but another one ended by itself, or none did."""
    reason = "node a: all-reduce #0 of world: rank 1 passed 4 x float32, rank 0 passed 3 x float32"
    stopped = exited(1, 0, signal=15, at=1.0)
    job = ended(describe.FAILED, reason, exited(0, 3, at=2.0), stopped)
    assert describe.first_failed_rank(job) == job.ranks[0]
    assert describe.exit_code(job) == 3
    assert describe.exit_code(ended(describe.FAILED, reason, exited(0, 0), stopped)) == 1


def test_death_by_signal_as_in_a_shell():
    assert describe.exit_code(ended(describe.FAILED, "rank 0 was killed by SIGKILL", exited(0, -9, signal=9))) == 137


def test_documents_are_json_with_stable_keys():
    job = ended(describe.FAILED, "why", exited(0, 1))
    job.progress.metrics["loss"] = 0.5
    document = json.loads(json.dumps(describe.job_document(job)))
    assert set(document) == {
        *("job_id", "name", "state", "reason", "nnodes", "nproc_per_node", "entry", "args", "workdir", "generation"),
        *("joining", "wanted_nodes", "paused", "growth", "tuning", "step", "step_shares", "namespace"),
        *("created_at", "started_at", "finished_at", "waiting", "progress", "ranks", "elastic", "min_nodes", "gone"),
        *("submitted_by", "unix_user"),
    }
    assert document["state"] == "failed"
    assert document["progress"]["metrics"] == {"loss": 0.5}
    assert document["finished_at"] is None
    rank = document["ranks"][0]
    assert (rank["state"], rank["exit_code"]) == ("exited", 1)
    keys = (
        "rank local_rank node_id state pid exit_code signal error_tail reason log_path exited_at member last_generation"
    )
    assert set(rank) == set(keys.split())


def test_islands_are_told_where_they_have_several_ranks(capsys):
    """In a job of two islands one of which is gone."""
    job = ended(describe.FAILED, "why", exited(2, 1), exited(3, 0))
    job.spec.env["BAGUA_ISLAND_SIZE"] = "2"
    job.gone.add(rank=1, member=5, state=common_pb2.RANK_STATE_EXITED, last_generation=1)
    document = describe.job_document(job)
    assert document["island_size"] == 2
    assert [rank["island"] for rank in (*document["ranks"], *document["gone"])] == [1, 1, 0]
    tables.print_job(job, ())
    shown = capsys.readouterr().out
    assert "ranks, in islands of 2)" in shown and shown.count("island  ") == 2
    shares = [StepShare(rank, "a", 10.0 + rank, 0, 1) for rank in range(4)]
    assert straggler_words(shares, 2).startswith("rank 3 of island 1 on a")
    trace = Trace(job.job_id, 1, [Source("a", 3, spans=[Span("step", "", 0, 9)])], island_size=2)
    assert to_chrome(trace)["traceEvents"][0]["args"]["name"] == "rank 3 of island 1 (a)"
    assert "1 × 2 ranks in islands of 2" in str(job_head(job, ""))
