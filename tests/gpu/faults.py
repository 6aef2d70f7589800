"""Section: a rank is killed in an all-reduce. The others are freed and say why, soon; nothing stays on the card."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from rig.ranks.engine_hosts import make_ranks
from rig.ranks.placing import environment

import bagua.torch_api as bagua
from gpu import machine
from gpu.common import device_of
from gpu.engine_run import over_bagua_net
from gpu.findings import section
from gpu.training_rank import quiet

VICTIM = 1
SOON_S = 5.0
LEFT_MIB = 8
SETTLE_S = 5.0
CASE_S = 20.0
"""At least, for a case: ranks import torch, make contexts, and NCCL connects them."""
CASES = (
    ("flat", False, ((0, 1, 2),)),
    ("flat", True, ((0,), (1,), (2,))),
    ("hierarchical", False, ((0, 1), (2, 3))),
    ("staged", False, ((0, 1), (2,))),
)
"""(route, whether NCCL goes over Bagua-Net, ranks of each host)"""


def one_case(findings, device, case, limit_s):
    route, over_plugin, hosts = case
    name = f"{route}{' over Bagua-Net' if over_plugin else ''}, {' + '.join(str(len(host)) for host in hosts)}"
    before = machine.memory_used_mib() if device == "cuda" else None
    count = 16 << 20 if device == "cuda" else 1 << 20  # takes a while: the kill comes in the middle
    with tempfile.TemporaryDirectory() as folder, make_ranks(Path(folder)) as ranks:
        started = ranks.start(
            until_killed,
            hosts=hosts,
            environment={**environment(device, route), **(over_bagua_net(device) if over_plugin else {})},
            kind=device,
            count=count,
            victim=VICTIM,
            after=3,
        )
        killed = killed_at(ranks, limit_s - SOON_S)
        ranks.wait(2 * SOON_S)
        for rank in started:
            if rank.rank == VICTIM:
                continue
            found = rank.result()
            seconds = found["when"] - killed
            findings.check(
                f"{name}, rank {rank.rank}: freed within {SOON_S:.0f} s", seconds <= SOON_S, f"{seconds:.2f} s"
            )
            findings.check(
                f"{name}, rank {rank.rank}: says why", f"rank {VICTIM}" in found["error"], found["error"][:300]
            )
            findings.row("from the kill to the error", case=name, rank=rank.rank, s=seconds)
    if before is not None:
        nothing_left(findings, name, before)


def killed_at(ranks, limit_s):
    """When the victim killed itself, once it has. Raises RuntimeError if it did not: a slow start, or an error before,
    says nothing of what becomes of the others."""
    victim, deadline = ranks.started[VICTIM], time.monotonic() + limit_s
    ended = False
    while not ended and time.monotonic() < deadline:
        ended = victim.process.poll() is not None
        line, end, _ = victim.output.partition("KILLED ")[2].partition("\n")
        if end:
            return float(line)
        time.sleep(0.05)
    waits = " ".join(host.engine.waiting(0.0) for host in ranks.hosts)
    outputs = "\n".join(f"rank {rank.rank}: {rank.output[-200:]}" for rank in ranks.started)
    raise RuntimeError(f"Nobody was killed in {limit_s:.0f} s. {waits}\n{outputs}")


def nothing_left(findings, name, before):
    """The card's memory is what it was. The driver takes a moment to clear up after a process."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        after = machine.memory_used_mib()
        if after is None or after <= before + LEFT_MIB or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    ok = after is not None and after <= before + LEFT_MIB
    findings.check(f"{name}: nothing is left on the card", ok, f"{before} MiB before, {after} MiB after")


def work(findings, given):
    begun = time.monotonic()
    if given.device == "cuda" and machine.memory_used_mib() is None:
        findings.note("nvidia-smi does not say how much memory is used: what is left on the card was not looked at.")
    for index, case in enumerate(CASES):
        share = (given.seconds - (time.monotonic() - begun)) / (len(CASES) - index)
        with findings.guarded(str(case)):
            one_case(findings, given.device, case, max(CASE_S, share))


def until_killed(kind, count, victim, after):
    """All-reduces without end; the victim kills itself after some, in the middle of the next. The others return their
    error, and how long after the kill it came (by the clock that all processes share)."""
    quiet()
    device = device_of(kind)
    bagua.init_process_group()
    data = torch.ones(count, device=device)
    work = lambda: bagua.allreduce_inplace(data, op=bagua.ReduceOp.AVG)  # noqa: E731
    for _ in range(after):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    if bagua.get_rank() == victim:
        if device.type == "cuda":
            work()  # returns while the card is at it
        print(f"KILLED {time.monotonic()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
    except Exception as error:
        return {"error": str(error), "when": time.monotonic()}


if __name__ == "__main__":
    sys.exit(section("faults", work, __doc__))
