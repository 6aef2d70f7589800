"""Requests that the coordinator may send to a node, and the processes that follow."""

from pathlib import Path

import pytest

from bagua.daemon.node.ranks.launch import LaunchError, check_program, environment, read_secrets
from bagua.daemon.node.rules.job_specification import NO_HOST, Program, SpecificationError, parse_specification
from bagua.proto import common_pb2, node_pb2


def run_job(**changes):
    fields = {
        "job_id": "j-1",
        "generation": 4,
        "spec": common_pb2.JobSpec(entry="train.py", args=["-v"], stop_grace_s=3.0),
        "host_index": 1,
        "hosts": [node_pb2.HostPlan(node_id="a", ranks=[0, 1]), node_pb2.HostPlan(node_id="b", ranks=[3, 2])],
        "job_key": bytes(32),
        "master_addr": "10.0.0.1",
        "master_port": 29500,
    }
    return node_pb2.RunJob(**(fields | changes))


def test_a_plan():
    parsed = parse_specification(run_job(), "b")
    assert (parsed.host_index, parsed.ranks, parsed.world_size, parsed.stop_grace_s) == (1, (2, 3), 4, 3.0)


def test_newcomers_begin_among_themselves():
    joining = [node_pb2.HostPlan(node_id="c", members=[7, 9]), node_pb2.HostPlan(node_id="b", members=[8])]
    spec = common_pb2.JobSpec(entry="train.py", elastic=True)
    there = parse_specification(run_job(spec=spec, joining=joining), "b")
    assert there.joining == (8,) and there.members == (2, 3)
    alone = parse_specification(run_job(spec=spec, joining=joining, host_index=NO_HOST), "c")
    assert alone.joining == (7, 9) and alone.ranks == alone.members == () and alone.all_members == (0, 1, 2, 3)
    env = environment(alone, 9, base={}, secrets={}, rank_socket=Path("/s"), cache=Path("/c"))
    told = [env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")]
    assert told == ["9", "2", "1", "2", "0"]
    with pytest.raises(SpecificationError, match="are not new"):
        parse_specification(run_job(spec=spec, joining=[node_pb2.HostPlan(node_id="b", members=[3])]), "b")
    with pytest.raises(SpecificationError, match="host index"):
        parse_specification(run_job(host_index=NO_HOST), "c")


@pytest.mark.parametrize(
    "changes",
    [
        {"job_id": ""},
        {"job_id": "../x"},
        {"job_id": ".x"},
        {"job_id": "x" * 200},
        {"hosts": []},
        {"host_index": 2},
        {"hosts": [node_pb2.HostPlan(ranks=[0]), node_pb2.HostPlan(ranks=[0])]},
        {"hosts": [node_pb2.HostPlan(ranks=[0]), node_pb2.HostPlan()]},
        {"host_index": 0, "hosts": [node_pb2.HostPlan(ranks=range(2000))]},
        {"job_key": b""},
        {"master_port": 70000},
        {"spec": common_pb2.JobSpec()},
        {"spec": common_pb2.JobSpec(entry="x\0y")},
        {"spec": common_pb2.JobSpec(entry="x", env={"A=B": "1"})},
        {"spec": common_pb2.JobSpec(entry="x", secret_env={"A=B": "/f"})},
        {"spec": common_pb2.JobSpec(entry="x", env={"A": "1\0"})},
        {"spec": common_pb2.JobSpec(entry="x", env={"A": "1" * (2 << 20)})},
    ],
)
def test_plans_that_make_no_sense(changes):
    with pytest.raises(SpecificationError):
        parse_specification(run_job(**changes), "b")


def test_environment_of_a_rank():
    spec = common_pb2.JobSpec(entry="x", env={"MINE": "1", "BOTH": "job", "RANK": "x", "MALLOC_TOP_PAD_": "1"})
    parsed = parse_specification(run_job(spec=spec), "b")
    base = {"BOTH": "daemon", "HOME": "/h", "WORLD_SIZE": "9", "PYTHONUNBUFFERED": ""}
    env = environment(parsed, 3, base=base, secrets={}, rank_socket=Path("/s"), cache=Path("/c"))
    assert (env["MINE"], env["BOTH"], env["HOME"]) == ("1", "job", "/h")
    assert [env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["3", "4", "1", "2"]
    assert [env[name] for name in ("NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")] == [
        "1",
        "1",
        "10.0.0.1",
        "29500",
    ]
    assert [env[name] for name in ("BAGUA_JOB_ID", "BAGUA_DAEMON_SOCKET", "BAGUA_CACHE_DIR")] == ["j-1", "/s", "/c"]
    assert env["OMP_NUM_THREADS"] == "1" and env["MALLOC_TOP_PAD_"] == "1" and env["PYTHONUNBUFFERED"] == ""
    assert "PYTHONSAFEPATH" not in env and "MALLOC_TRIM_THRESHOLD_" in env
    spec.env["BAGUA_ISLAND_SIZE"] = "2"
    env = environment(
        parse_specification(run_job(spec=spec), "b"), 3, base=base, secrets={}, rank_socket=Path("/s"), cache=None
    )
    assert env["MALLOC_MMAP_THRESHOLD_"] == "1048576" and "MALLOC_TRIM_THRESHOLD_" not in env
    alone = parse_specification(run_job(host_index=0, hosts=[node_pb2.HostPlan(ranks=[0])]), "b")
    assert "OMP_NUM_THREADS" not in environment(alone, 0, base={}, secrets={}, rank_socket=Path("/s"), cache=Path("/c"))
    kept = environment(parsed, 2, base={"OMP_NUM_THREADS": "4"}, secrets={}, rank_socket=Path("/s"), cache=Path("/c"))
    assert kept["OMP_NUM_THREADS"] == "4"


def test_programs_are_looked_at_before_a_build(tmp_path):
    (tmp_path / "a.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    folder = str(tmp_path)
    for good in (Program("a.py", workdir=folder), Program("package", workdir=folder), Program(str(tmp_path / "a.py"))):
        check_program(good, {})
    check_program(Program("anything", is_module=True, workdir=folder), {})
    check_program(Program("sh", no_python=True, workdir=folder), {"PATH": "/bin:/usr/bin"})
    for bad, words in [
        (Program("b.py", workdir=folder), "b.py does not exist"),
        (Program("a.py", workdir=folder + "/none"), "working directory"),
        (Program("x", workdir=folder + "/a.py"), "is not a folder"),
        (Program(folder), "without a __main__.py"),
        (Program("sh", no_python=True, workdir=folder, env={"PATH": folder}), "not in PATH"),
        (Program("./a.py", no_python=True, workdir=folder), "not executable"),
    ]:
        with pytest.raises(LaunchError, match=words):
            check_program(bad, {"PATH": "/bin:/usr/bin"})


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"s3cret", 0o644, "chmod 600"),
        (b"s3cret\0", 0o600, "zero byte"),
        (b"s3cret\xff", 0o600, "not UTF-8"),
        (b"s3cret" * 20_000, 0o600, "65536 bytes"),
        (None, 0, "can't be read on node n: No such file"),
    ],
)
def test_a_secret_that_can_not_be_taken_is_named_and_not_shown(tmp_path, content, mode, words):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(LaunchError, match=words) as error:
        read_secrets(Program("x", secret_env={"HF_TOKEN": str(file)}), "n")
    assert "HF_TOKEN" in str(error.value) and str(file) in str(error.value) and "s3cret" not in str(error.value)
