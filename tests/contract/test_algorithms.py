"""Every algorithm on real ranks of real engines, on one or two hosts, against one process of plain torch.

Ranks are started once per world and do one job after the other: the cases of tests/contract/algorithms, and the checks
that every algorithm must stand. After an error they are started again for the jobs that are left.

``--device fake`` runs all of it through the GPU leg over the fakes, ``--device cuda`` on a GPU; ``--route`` says how
operations travel. test_algorithms_device.py has what is run of it always.
"""

import subprocess
import sys
from itertools import pairwise

import pytest
from contract.algorithms import load_cases
from contract.algorithms.case import ISLANDS, TWO_HOSTS, WORLDS, volume_model
from contract.algorithms.general import CHECKS
from contract.algorithms.harness import Runner, check_reference
from contract.algorithms.mistakes import MISTAKES
from contract.algorithms.subjects import problem_with, registered_names
from rig.ranks.placing import environment

CASES = load_cases()
pytestmark = pytest.mark.timeout(1600)  # the first test of a world waits for all its jobs


def daemons_carry(config):
    """Whether all that ranks send goes through their daemons, which count bytes; other routes use NCCL."""
    return config.getoption("--device") == "cpu" or config.getoption("--route") == "staged"


@pytest.fixture(scope="session")
def runners(request, tmp_path_factory):
    """A runner for every world, which knows the jobs of all tests that were selected."""
    jobs = {}
    for item in request.session.items:
        marker = item.get_closest_marker("job")
        if marker is not None:
            world, name = marker.args
            if daemons_carry(request.config) or not name.startswith("volume "):
                jobs.setdefault(world, []).append(name)
    variables = environment(request.config.getoption("--device"), request.config.getoption("--route"))
    return {
        world: Runner(world, names, lambda: tmp_path_factory.mktemp("ranks"), variables)
        for world, names in jobs.items()
    }


OFTEN = ("2 hosts x 2", ISLANDS)
"""Where references are compared without --full. Bytes are counted on two hosts of one rank then. One rank alone trains
in integration/torch_api."""
EXACT = {
    *("gradient_allreduce", "gradient_allreduce own memory", "local_sgd", "diloco", "diloco after common steps"),
    *("streaming_diloco", "no_loco", "decentralized", "decentralized accumulation", "qadam full precision"),
}
"""Cases that are compared on islands: a codec's blocks lie elsewhere in shards than in a whole replica."""
REFUSED_BY_ISLANDS = {"async"}


def in_world(world, name, *values, full=False):
    """Parameters of a test that needs the results of a job in a world; ``full``: with --full only."""
    marks = [pytest.mark.job(world, name)]
    if full:
        marks.append(pytest.mark.full)
    return pytest.param(world, *values, marks=marks, id=f"{world}-{values[-1]}")


# Of each kind: gradients, gradients with a state of the codec, an optimizer of its own, models of neighbours, models
# now and then, a thread of its own.
OF_EACH_KIND = ("gradient_allreduce", "power_sgd", "qadam", "low_precision_decentralized", "streaming_diloco", "async")
OF_EVERY_ALGORITHM = ("switching",)
MISTAKEN = ("gradient_allreduce", "qadam", "async")
VARIANTS = {
    *(f"gradient_allreduce {one}" for one in ("fp16", "bf16", "fp8_e5m2", "minmax8", "topk", "own memory")),
    *("decentralized shift_one onebit everywhere", "decentralized shift_one topk everywhere"),
    *("low_precision_decentralized full precision, interval", "local_sgd minmax8", "no_loco of hosts", "async warm-up"),
}
"""Cases that differ from another one in what other tests look at: a codec, memory of one's own, an interval."""


def often_enough(world, subject, check):
    """Whether a check is made in a world without --full: each where it is most likely to fail; some of them with one
    algorithm of each kind."""
    if world == ISLANDS:
        return check == "trains"
    if check in MISTAKES:
        return world == "2 hosts, 1 and 2" and subject in MISTAKEN
    return world == "2 hosts x 2" and (subject in OF_EACH_KIND or check in OF_EVERY_ALGORITHM)


@pytest.mark.parametrize(
    ("world", "name"),
    [
        in_world(world, f"case {name}", name, full=world not in OFTEN or name in VARIANTS)
        for world in WORLDS
        for name in CASES
        if world in CASES[name].worlds or (world == ISLANDS and name in EXACT)
    ],
)
def test_equals_reference(runners, request, world, name):
    """Step by step, on every rank."""
    # NCCL adds in an order of its own, and a GPU rounds in its own way.
    loose = request.config.getoption("--device") == "cuda" or not daemons_carry(request.config)
    check_reference(name, world, runners[world].result(f"case {name}"), loose)


MEASURED = [name for name in CASES if CASES[name].bytes_sent is not None]


@pytest.mark.parametrize(
    ("world", "name"),
    [
        in_world(world, f"volume {name}", name, full=world != "2 hosts x 1" or name in VARIANTS)
        for world in TWO_HOSTS
        for name in MEASURED
        if world in CASES[name].worlds
    ],
)
def test_volume_on_the_wire(runners, request, world, name):
    """Bytes that a host sends per step are those of the formula."""
    if not daemons_carry(request.config):
        pytest.skip("bytes are counted by the daemons: --route staged")
    case = CASES[name]
    assert case.bytes_sent is not None
    wanted = case.bytes_sent(WORLDS[world], volume_model())
    found = runners[world].result(f"volume {name}")[0]
    assert abs(found - wanted) <= case.slack * wanted + 2048, f"{found:.0f} bytes per step, {wanted:.0f} by the formula"


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(name, marks=[pytest.mark.job("2 hosts x 2", name), *marks], id=f"2 hosts x 2-{name}")
        for name, marks in (("switch 6", []), ("switch 10", [pytest.mark.full]))
    ],
)
def test_switching_leaks_nothing(runners, job):
    """Through all algorithms, several times; the first two rounds warm up."""
    for rank, found in enumerate(runners["2 hosts x 2"].result(job)):
        first, last = found[1], found[-1]
        grown = {name: (value, last[name]) for name, value in first.items() if last[name] > value and name != "memory"}
        assert not grown, f"rank {rank}: {grown}"
        # An algorithm that kept one model of 1 MiB would keep one in every round. The allocator grows too, by up to
        # some MiB in one round, but not in each.
        sizes = [one["memory"] for one in found[1:]]
        least = min(after - before for before, after in pairwise(sizes))
        assert least < 3 * 2**18, f"rank {rank}: {sizes}"


def pytest_generate_tests(metafunc):
    """Checks for all registered algorithms, or for those that --algorithm names, in all worlds."""
    if "check" not in metafunc.fixturenames:
        return
    own = metafunc.config.getoption("--algorithm")
    for problem in filter(None, map(problem_with, own or ())):
        pytest.exit(problem, pytest.ExitCode.USAGE_ERROR)
    metafunc.parametrize(
        ("world", "subject", "check"),
        [
            in_world(
                world,
                f"check {subject} {check}",
                subject,
                f"{subject}-{check}",
                full=not own and not often_enough(world, subject, check),
            )
            for world in WORLDS
            for subject in own or registered_names()
            for check in (*CHECKS, *MISTAKES)
            if world != ISLANDS or subject not in REFUSED_BY_ISLANDS
        ],
    )


def test_stands(runners, world, subject, check):
    """A check that every algorithm must stand."""
    runners[world].result(f"check {subject} {check.rpartition('-')[2]}")


def test_algorithm_of_ones_own():
    """The suite is open to algorithms that it does not know."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "trains and x and 1-"]
    command += ["--algorithm", "bagua.algorithms:ByteGradAlgorithm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
