"""The GPU leg over fakes of CUDA and NCCL: results, order of streams, resources, choice of routes.

NCCL's communicators block, and are children of those that don't, unless a case says otherwise.
"""

import pytest

ONE_HOST, TWO_HOSTS = [[0, 1, 2]], [[0, 1], [2, 3]]
LAYOUTS = [("staged", [[0, 1], [2]]), ("flat", [[0], [1], [2]]), ("hierarchical", TWO_HOSTS)]
CODECS = {"fp16": 1e-4, "minmax8": 2e-3, "onebit": 0.35, "topk": 0.35}
"""Mean error of six steps, with the residual of each step in the next."""


@pytest.mark.parametrize(("route", "hosts"), LAYOUTS)
def test_a_route(make_job, route, hosts):
    codecs = CODECS if route != "staged" else {}
    kinds, order, many, communicators, _, *encoded = make_job(hosts).run(
        ("results.kinds", {"route": route, "counts": [1000, 3, 1]}),
        ("streams.order", {"route": route}),
        ("streams.many", {"route": route, "steps": 40, "buckets": 4}),
        ("routes.communicators", {"route": route, "rounds": 6}),
        ("streams.during_a_capture", {"route": route}),
        *(("results.encoded", {"route": route, "codec": codec, "steps": 6, "count": 50_000}) for codec in codecs),
    )
    world = sum(len(there) for there in hosts)
    # All kinds, dtypes and reductions give what numpy gives, without a wait of the host.
    for found in kinds:
        assert found["route"] == route and found[f"ops_{route}"] > 0 and found["in_flight"] <= 4
        assert (found["nccl"][0] > 0) == (route != "staged") and found["nccl"][0] == found["nccl"][1]
        left = found["left"]
        assert left["allocated"] == left["communicators"] == 0 and left["streams"] == 1 and left["events"] <= 200, left
    total = world * (world + 1) / 2 * world**2
    for found in order:
        assert found == {"result": [total, True], "early": False, "done": True, "times": True}
    for found in many:
        assert found["right"]
        # A staged route gives memory back shortly after its result: a step may find that of the previous one in use.
        assert found["made"][-1][0] <= 2 * 4 + 2, found["made"]
    for found in communicators:
        first, last = found["left"][1], found["left"][-1]
        assert all(last[name] <= first[name] for name in ("streams", "allocated", "communicators", "registered")), found
        assert found["threads"] <= found["left"][0]["threads"], "each round adds a thread"
    # Replicas have the same bits; error feedback keeps the sum of steps near the truth; exact elements are exact.
    for codec, results in zip(codecs, encoded, strict=True):
        for found in results:
            assert found["digests"] == results[0]["digests"], codec
            assert found["exact"] and found["route"][route] == 6 and found["error"] < CODECS[codec], (codec, found)


def test_encoded_without_kernels(make_job):
    """The daemons encode instead, for all ranks, if one has no kernels, or a GPU that is too old for them."""
    lacking = {1: {"BAGUA_DEVICE_KERNELS": ""}, 2: {"FAKE_KERNELS_LOAD": "209"}}  # cudaErrorNoKernelImageForDevice
    case = ("results.encoded", {"route": "flat", "codec": "minmax8", "steps": 2, "count": 5000}, lacking)
    [results] = make_job([[0], [1], [2]]).run(case)
    assert all(found["route"]["staged"] == 2 for found in results)
    assert "kernels" not in results[0]["missing"] and "kernels" in results[1]["missing"]
    assert "can't run on GPU" in results[2]["missing"]["kernels"]


def everywhere(ranks, **variables):
    return dict.fromkeys(range(ranks), variables)


def test_calls_and_devices(make_job):
    """CUDA may put streams of one priority on one queue: a stream that waits for other ranks must not hold up what they
    wait for."""
    refused, waited, crossed, device, two, forked = make_job([[0], [1]]).run(
        ("routes.refused", {}),
        ("routes.made_while_another_waits", {}),
        ("streams.crossed", {}, everywhere(2, FAKE_CUDA_ONE_QUEUE="1")),
        ("streams.on_another_device", {}),
        ("streams.two_devices", {}),
        ("endings.forked", {"route": "staged"}),
    )
    for said in refused:
        assert all(said) and "captured" in said[-1] and "communicator 5 does not exist" in said[2], said
    assert all(waited + crossed + two)
    assert device == [{"result": [3.0, True], "device": 0}] * 2
    assert all("forked child" in found["said"] and found["status"] == 0 for found in forked)


ON_ONE_GPU = everywhere(2, FAKE_CUDA_BUS_ID="0000:01:00.0")
CHOICES = [
    ({}, "flat"),
    (ON_ONE_GPU, "staged"),
    (everywhere(2, BAGUA_DEVICE_NCCL=""), "staged"),
    (everywhere(2, BAGUA_DEVICE_ROUTE="staged"), "staged"),
    (everywhere(2, BAGUA_DEVICE_ROUTE="flat", BAGUA_DEVICE_DRIVER=""), "flat"),
    (everywhere(2, FAKE_NCCL_NO_INIT="1"), "staged"),
]
NO_ROUTES = [
    ("flat", {1: {"BAGUA_DEVICE_NCCL": ""}}, "rank 1: no NCCL: BAGUA_DEVICE_NCCL is empty"),
    ("flat", {1: {"FAKE_NCCL_VERSION": "22005"}}, "rank 0 has NCCL 22907, rank 1 has 22005"),
    ("flat", ON_ONE_GPU, "invalid usage"),
    ("staged", {0: {"BAGUA_DEVICE_DRIVER": ""}}, "rank 0: no waits on memory: BAGUA_DEVICE_DRIVER is empty"),
    ("hierarchical", {}, "not the same number, 2 or more, on each of several hosts"),
]


def told_by_all(job):
    """Returns the error that a case raised, which is the same at all members."""
    said = {result["raised"].splitlines()[-1] for result in job.lines().values()}
    assert len(said) == 1, said
    return said.pop()


def test_choice_of_route(make_job):
    """All ranks choose the same; several ranks on one GPU, or none with NCCL, go through the daemon. A route that is
    forced and can't be had is the same clear error at all members."""
    job = make_job([[0, 1]])
    forced = [
        {rank: {"BAGUA_DEVICE_ROUTE": route, **of_rank.get(rank, {})} for rank in (0, 1)}
        for route, of_rank, _ in NO_ROUTES
    ]
    no_way = everywhere(2, BAGUA_DEVICE_DRIVER="", BAGUA_DEVICE_ROUTE="flat")
    nothing = everywhere(2, BAGUA_DEVICE_DRIVER="", BAGUA_DEVICE_NCCL="")
    job.start(
        *(("routes.report", {}, of_rank) for of_rank, _ in CHOICES),
        *(("routes.report", {}, of_rank) for of_rank in forced),
        ("routes.no_way", {"route": "flat"}, no_way),
        ("routes.report", {}, nothing),
    )
    for of_rank, route in CHOICES:
        found = [result["result"]["route"] for result in job.lines().values()]
        assert found == [route] * 2, (of_rank, found)
    for route, _, why in NO_ROUTES:
        words = told_by_all(job)
        assert f"route {route} (BAGUA_DEVICE_ROUTE) can't be had" in words and why in words
    for result in job.lines().values():
        assert "send" in result["result"] and "BAGUA_DEVICE_DRIVER is empty" in result["result"]
    assert all("no way for tensors of GPUs" in result["raised"] for result in job.lines().values())


def test_choice_on_two_hosts(make_job):
    """A communicator whose shape has no meaning for the forced route chooses for itself, and says so."""
    chosen, forced = make_job(TWO_HOSTS).run(
        ("routes.report", {}), ("routes.report", {"route": "hierarchical", "members": [0, 1]})
    )
    assert len({found["route"] for found in chosen}) == 1
    for rank, found in enumerate(forced):
        assert found["route"] == ("flat" if rank < 2 else "hierarchical")
        assert ("hierarchical" in found["impossible"]) == (rank < 2)


FAILURES = [
    ({1: {"FAKE_NCCL_NO_INIT": "1"}}, "rank 1: NCCL: making a communicator", "no network that this fake likes"),
    ({2: {"FAKE_NCCL_NO_INIT": "late"}}, "rank 2: NCCL: making a communicator", "no network that this fake likes"),
    ({0: {"FAKE_NCCL_NO_ID": "1"}}, "rank 0: NCCL: making an id", "unhandled system error"),
]


def test_a_route_that_cannot_be_set_up(make_job):
    """Another one is taken, and all members know whose fault it was and what NCCL said; forced, it is an error at all
    members, also at those that wait in NCCL for the one that failed."""
    job = make_job(ONE_HOST)
    job.start(
        *(("routes.report", {}, of_rank) for of_rank, _, _ in FAILURES),
        *(
            ("routes.report", {}, {rank: {"BAGUA_DEVICE_ROUTE": "flat", **of_rank.get(rank, {})} for rank in range(3)})
            for of_rank, _, _ in FAILURES
        ),
    )
    for _, who, words in FAILURES:
        for result in job.lines().values():
            found = result["result"]
            assert found["route"] == "staged" and list(found["failed"]) == ["flat"]
            assert list(found["impossible"]) == ["hierarchical"]  # one host
            assert who in found["failed"]["flat"] and words in found["failed"]["flat"]
            assert found["left"]["communicators"] == 0
    for _, who, words in FAILURES:
        said = told_by_all(job)
        assert "route flat (BAGUA_DEVICE_ROUTE) can't be had for all ranks" in said and who in said and words in said


def test_communicators_that_do_not_block(make_job):
    """Nothing blocks if one rank does not want it, nor where NCCL is too old for it: no reason is given for either. If
    one rank can't make a child, all go on without, also those that waited for it, and know its reason."""
    flat = {"route": "flat"}
    results = make_job(ONE_HOST).run(
        ("routes.report", flat, {1: {"BAGUA_NCCL_BLOCKING": "0"}}),
        ("routes.report", flat, everywhere(3, FAKE_NCCL_VERSION="21705")),
        ("routes.report", flat, {1: {"FAKE_NCCL_NO_SPLIT": "1"}}),
        ("routes.report", flat, {1: {"FAKE_NCCL_NO_SPLIT": "late"}}),
    )
    for number, ranks in enumerate(results):
        for found in ranks:
            assert found["route"] == "flat" and found["failed"] == {} and found["blocking"] == 0
            assert found["left"]["communicators"] == 0
            why = found["undivided"]
            assert "rank 1: NCCL: " in why and "unhandled system error" in why if number > 1 else why == ""
