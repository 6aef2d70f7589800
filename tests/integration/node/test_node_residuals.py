"""A daemon is killed: what error feedback has kept on its host goes on with the next one, to the last bit."""

import asyncio
from pathlib import Path

import pytest
from rig.node_daemon import Pair, plan
from rig.ranks.elastic import JOIN

PROGRAM = f"""{JOIN}
import array, hashlib, random
count = 5000
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
        self.ends = ends
        script = folder / "script.py"
        script.write_text(PROGRAM)
        self.spec = {"entry": str(script), "workdir": str(folder), "nnodes": 2, "nproc_per_node": 1, "elastic": True}

    async def run(self, job, generation):
        """Both hosts get it, each with the other's address once that is known."""
        addresses = ["", ""]
        for _ in range(2):
            hosts = [plan([n], node, members=[n], engine_address=addresses[n]) for n, node in enumerate(("n", "other"))]
            for index, end in enumerate(self.ends):
                await end.run(job, hosts, generation, host_index=index, **self.spec)
            told = [await end.job_until(job, lambda known: known.engine_address) for end in self.ends]
            addresses = [one.engine_address for one in told]

    async def printed(self, job, word):
        """The first line of each rank that begins with ``word``."""
        found = []
        async with asyncio.timeout(240):
            for end in self.ends:
                known = await end.job_until(job, lambda known: known.ranks and known.ranks[0].log_path)
                log = Path(known.ranks[0].log_path)
                while not (lines := [line for line in log.read_text().splitlines() if line.startswith(word)]):
                    assert not any(rank.exit_code for rank in end.jobs[job].ranks), log.read_text()
                    await asyncio.sleep(0.02)
                found += lines
        return found


@pytest.mark.full
async def test_residuals_outlive_the_daemon(short_folder, tmp_path):
    pairs = [await Pair(short_folder / node, "--node-id", node).start() for node in ("n", "other")]
    other = pairs[1].end
    hosts = TwoHosts(tmp_path, pairs[0].end, other)
    results = {}
    try:
        for job in ("undisturbed", "killed"):
            await hosts.run(job, generation=1)
            await hosts.printed(job, "half")
            if job == "killed":
                known = len(other.hellos)
                pairs[1].daemon.proper().kill()
                await other.until(lambda known=known: len(other.hellos) > known)
                assert "was killed and started again" in other.jobs[job].suspended
                await hosts.run(job, generation=2)
            (tmp_path / f"{job}.go").touch()
            results[job] = await hosts.printed(job, "end")
            for one in hosts.ends:
                await one.end_job(job, generation=2)
    finally:
        for pair in pairs:
            await pair.stop()
    assert len({*results["undisturbed"], *results["killed"]}) == 1, results
