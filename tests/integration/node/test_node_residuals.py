"""A daemon is killed: what error feedback has kept on its host goes on with the next one, to the last bit."""

import asyncio
from pathlib import Path

import pytest

from bagua.proto import common_pb2, node_pb2

PROGRAM = """
import array, hashlib, os, time, grpc, random
import bagua.csrc
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.proto import rank_pb2
from bagua.proto.rank_pb2_grpc import RankServiceStub
core = bagua.csrc.load()
me, job, count = int(os.environ["RANK"]), os.environ["BAGUA_JOB_ID"], 5000
channel = grpc.insecure_channel("unix:" + os.environ["BAGUA_DAEMON_SOCKET"])
service = RankServiceStub(channel)
reply = service.Join(rank_pb2.JoinRequest(job_id=job, rank=me, pid=os.getpid(), wire_version=WIRE_VERSION), timeout=60)
rank = core.Rank(data_socket=reply.data_socket, token=reply.data_token, rank=me)
segment = rank.alloc(4 * count)
numbers, draw, results = memoryview(segment).cast("f")[:count], random.Random(me), hashlib.sha256()
encoded = dict(comm=0, kind=core.KINDS["allreduce"], dtype=core.DTYPES["float32"], op=core.OPS["AVG"], count=count)
encoded |= dict(codec=core.CODECS["onebit"], residual=1, src=(segment.id, 0), dst=(segment.id, 0))
for step in range(40):
    if step == 20:
        print("half", flush=True)
        while not os.path.exists(job + ".go"):
            time.sleep(0.01)
    contribution = array.array("f", (draw.uniform(-1.0, 1.0) for _ in range(count)))
    while True:
        numbers[:] = contribution
        try:
            rank.wait(rank.submit(**encoded, residual_sides=1 + step % 2))
            break
        except core.Regrouped:
            while rank.enter(60.0) is None:
                pass
    results.update(numbers)
print("end", results.hexdigest(), flush=True)
numbers.release()
rank.close()
"""


class TwoHosts:
    """The coordinator's side of jobs with a rank on each of two hosts."""

    def __init__(self, folder, *ends):
        self.folder = folder
        self.ends = ends
        self.script = folder / "script.py"
        self.script.write_text(PROGRAM)

    async def run(self, job, generation):
        """Both hosts get it, each with the other's address once that is known."""
        spec = common_pb2.JobSpec(
            entry=str(self.script), workdir=str(self.folder), nnodes=2, nproc_per_node=1, elastic=True
        )
        addresses = ["", ""]
        for _ in range(2):
            hosts = [
                node_pb2.HostPlan(
                    node_id=node, address="127.0.0.1", ranks=[n], members=[n], engine_address=addresses[n]
                )
                for n, node in enumerate(("n", "other"))
            ]
            for index, end in enumerate(self.ends):
                run = node_pb2.RunJob(job_id=job, generation=generation, spec=spec, host_index=index, hosts=hosts)
                run.job_key, run.master_addr, run.master_port = bytes(32), "127.0.0.1", 12345
                await end.send(run=run)
            addresses = [
                (await end.job_until(job, lambda known: known.engine_address)).engine_address for end in self.ends
            ]

    async def printed(self, job, word):
        """The first line of each rank that begins with ``word``."""
        found = []
        async with asyncio.timeout(240):
            for end in self.ends:
                log = Path(
                    (await end.job_until(job, lambda known: known.ranks and known.ranks[0].log_path)).ranks[0].log_path
                )
                while not (lines := [line for line in log.read_text().splitlines() if line.startswith(word)]):
                    assert not any(rank.exit_code for rank in end.jobs[job].ranks), log.read_text()
                    await asyncio.sleep(0.02)
                found += lines
        return found


@pytest.mark.full
async def test_residuals_outlive_the_daemon(end, daemon, other_host, tmp_path):
    other, other_daemon = other_host
    hosts = TwoHosts(tmp_path, end, other)
    results = {}
    for job in ("undisturbed", "killed"):
        await hosts.run(job, generation=1)
        await hosts.printed(job, "half")
        if job == "killed":
            known = len(other.hellos)
            other_daemon.proper().kill()
            await other.until(lambda known=known: len(other.hellos) > known)
            assert "was killed and started again" in other.jobs[job].suspended
            await hosts.run(job, generation=2)
        (tmp_path / f"{job}.go").touch()
        results[job] = await hosts.printed(job, "end")
        for one in hosts.ends:
            await one.stop_job(job, generation=2)
            await one.stopped(job)
    assert len({*results["undisturbed"], *results["killed"]}) == 1, results
