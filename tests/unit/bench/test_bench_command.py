"""How the commands read their options, and results that come with the output of a job."""

from __future__ import annotations

import pytest

from bagua.base.errors import ServiceError, UsageError
from bagua.bench.units import RESULT_MARK
from bagua.cli.bench import common as bench
from bagua.cli.bench import train
from bagua.cli.bench.tasks import ResultCatcher, Task
from bagua.cli.display.terminal import Terminal


def test_systems_of_train_have_the_baselines_first() -> None:
    found = train.train_systems("gradient_allreduce,gradient_allreduce:minmax8", "ddp,powersgd1")
    assert [system["name"] for system in found] == [
        "no communication",
        "ddp",
        "ddp powersgd1",
        "bagua",
        "bagua minmax8",
    ]
    assert [system.get("algorithm") for system in found[3:]] == [
        "gradient_allreduce",
        "gradient_allreduce:codec=minmax8",
    ]
    assert len(train.train_systems("gradient_allreduce", "none")) == 2
    with pytest.raises(UsageError, match="--algorithms"):
        train.train_systems("gradient_allreduce:zip", "ddp")
    with pytest.raises(UsageError, match="bagua bench accuracy"):
        train.train_systems("qadam", "ddp")


def test_algorithms_of_train_keep_their_settings() -> None:
    found = train.parse_algorithms("power_sgd:rank=1,start_after=2,async,gradient_allreduce:onebit")
    assert list(found) == ["power_sgd:rank=1,start_after=2", "async", "onebit"]
    assert list(found.values()) == ["power_sgd:rank=1,start_after=2", "async", "gradient_allreduce:codec=onebit"]


def test_networks_have_some_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "check_possible", lambda *_: None)
    assert bench.networks_of(None, None) == ([None], 1)
    networks, nodes = bench.networks_of(["1gbit", "none,5ms"], None)
    assert [network.name for network in networks if network] == ["1gbit", "none,5ms"]
    assert nodes == 2
    assert bench.networks_of(["1gbit"], 4)[1] == 4
    for nnodes in (1, 17):
        with pytest.raises(UsageError, match="2 to 16 hosts"):
            bench.networks_of(["1gbit"], nnodes)
    with pytest.raises(UsageError, match="not a network"):
        bench.networks_of(["quick"], None)


def test_a_result_is_taken_out_of_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    catcher = ResultCatcher(Terminal(aside=True))
    with pytest.raises(ServiceError, match="did not arrive"):
        catcher.result()
    catcher.terminal.line("[rank 1] hello")
    catcher.terminal.line(f'[rank 0] {RESULT_MARK}{{"rows": []}}')
    assert catcher.result() == {"rows": []}
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "[rank 1] hello\n"


def test_jobs_in_namespaces_tell_the_peer_its_device() -> None:
    task = Task("bagua.bench.ranks.train", {"a": 1}, 2, 1, {"OMP_NUM_THREADS": "1"}, namespaces=("x", "y"), result="/r")
    spec = task.spec()
    assert spec.env["GLOO_SOCKET_IFNAME"] == "net0"
    assert list(spec.args) == ['{"a": 1}', "/r"]
    assert spec.is_module
    assert "GLOO_SOCKET_IFNAME" not in Task("m", {}, 1, 1).spec().env
