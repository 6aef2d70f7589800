"""Section: NCCL's all-reduce between two ranks over Bagua-Net, beside NCCL's own sockets, in turns. Both ranks are in
one process, so that their kernels run on the card at the same time."""

import json
import os
import sys
import tempfile
import time

from rig.ranks.placing import environment as environment_of

import bagua.csrc
from bagua.base.net_plugin import NAME, variables
from gpu.common import median, run_alone
from gpu.findings import section
from gpu.net_pair_ranks import MARK

SIZES = [1 << power for power in range(10, 29)]  # 1 KiB to 256 MiB
REHEARSED = [1 << 10, 1 << 16]
TURNS = 2
LARGE = 8 << 20
TARGET_LARGE, TARGET = 1.3, 1.0
TABLE = "all-reduce, 2 ranks on one card, in one process"


def one_turn(environment, device, sizes, limit_s):
    # A module that is loaded late may wait for a kernel that waits for this one.
    environment = {**environment, "CUDA_MODULE_LOADING": "EAGER"}
    if device != "cuda":
        environment |= environment_of("fake")
    with tempfile.TemporaryDirectory() as folder:
        words = ["--seconds", f"{limit_s:.0f}", "--folder", folder, "--sizes", *map(str, sizes)]
        output = run_alone("gpu.net_pair_ranks", environment, words, limit_s + 15)
    found = json.loads(output.partition(MARK)[2].splitlines()[0])
    return {**found, "seconds": {int(size): seconds for size, seconds in found["seconds"].items()}}, output


def networks(device):
    if device != "cuda":
        return {"NCCL's sockets": {}, "Bagua-Net": {}}  # the fakes know one network
    common = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "lo"}
    return {
        "NCCL's sockets": {**common, "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"},
        "Bagua-Net": {**common, **variables(bagua.csrc.net_plugin(), os.environ)},
    }


def compare(findings, taken):
    """A row for each size that both have, in the place of earlier ones; returns which targets were missed."""
    own, ours = taken.get("NCCL's sockets", {}), taken.get("Bagua-Net", {})
    missed = []
    findings.forget(TABLE)
    for size in sorted(own.keys() & ours.keys()):
        before, now = median(own[size]), median(ours[size])
        met = before / now >= (TARGET_LARGE if size >= LARGE else TARGET)
        if not met:
            missed.append(f"{size} B: {before / now:.2f}")
        findings.row(
            TABLE,
            bytes=size,
            **{"sockets us": before * 1e6, "Bagua-Net us": now * 1e6, "GB/s": size / now / 1e9, "times": before / now},
            target="met" if met else "missed",
        )
    return missed


def work(findings, given):
    begun = time.monotonic()
    sizes = SIZES if given.device == "cuda" else REHEARSED
    taken, missed = {}, []
    for number in range(TURNS):
        for name, environment in networks(given.device).items():
            left = given.seconds - (time.monotonic() - begun)
            if number and left < given.seconds / 2 / TURNS:
                findings.note("Time sufficed for one turn only.")
                continue
            with findings.guarded(f"{name}, turn {number}"):
                found, words = one_turn(environment, given.device, sizes, max(10.0, left / 2))
                findings.check(f"{name}: the sum is right", found["right"])
                if found["stopped"]:
                    findings.check(f"{name}: goes to its end", False, found["stopped"])
                if given.device == "cuda":
                    wanted = NAME if name == "Bagua-Net" else "Socket"
                    findings.check(f"{name}: NCCL uses it", f"Using network {wanted}" in words, words[-600:])
                for size, seconds in found["seconds"].items():
                    taken.setdefault(name, {}).setdefault(size, []).append(seconds)
        missed = compare(findings, taken)  # after each turn: a section that is stopped keeps its figures
    findings.note(
        f"Targets: {TARGET} times at every size, {TARGET_LARGE} at 8 MiB and above. Missed: {missed or 'none'}."
    )


if __name__ == "__main__":
    sys.exit(section("net_pair", work, __doc__))
