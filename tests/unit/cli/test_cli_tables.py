"""Tables of `bagua job show`."""

from bagua.base.islands import VARIABLE
from bagua.cli.display import tables
from bagua.proto import common_pb2, job_pb2


def test_a_mate_of_a_lost_rank_ended_with_its_island(capsys):
    """Its daemon ends it, and hears no exit code; nobody knows how ranks of a lost host ended."""
    job = job_pb2.Job(job_id="job-1", spec=common_pb2.JobSpec(env={VARIABLE: "2"}))
    for number, signal in ((2, 9), (3, 0), (4, 0), (5, 0)):
        rank = job.gone.add(member=number, rank=number, node_id="node-a", last_generation=1, signal=signal)
        rank.state = common_pb2.RANK_STATE_EXITED if signal else common_pb2.RANK_STATE_UNSPECIFIED
    tables.print_job(job, [])
    rows = capsys.readouterr().out.partition("gone:")[2].splitlines()[2:6]
    assert [" ".join(row.split()[4:]) for row in rows] == ["signal 9", "with its island", "unknown", "unknown"]
