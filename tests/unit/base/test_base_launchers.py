"""Which launcher started a process, from its environment alone; that of srun is as Slurm 22.05 sets it."""

import pytest

from bagua.base import checkpoint_folder, launchers
from bagua.base.errors import UsageError
from bagua.cli.cluster import slurm

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_GTIDS": "2,3",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "4",
}
BATCH = {**{name: value for name, value in STEP.items() if "STEP" not in name}, "SLURM_PROCID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "7",
}


def placed(environment, *names):
    found = launchers.placement(environment)
    return [found.get(name) for name in names]


def test_srun():
    found = launchers.placement(STEP)
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "gpu07",
    }
    assert 10000 <= int(port) < 30000
    assert (
        port
        == launchers.placement({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1"})["MASTER_PORT"]
    )
    assert port != launchers.placement({**STEP, "SLURM_STEP_ID": "1"})["MASTER_PORT"]
    assert placed({**STEP, "SLURM_STEP_RESV_PORTS": "12345-12348"}, "MASTER_PORT") == ["12345"]
    given = {"MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert placed({**STEP, **given}, *given) == ["h", "1"]


@pytest.mark.parametrize("tasks, ids", [("3,1", "3"), ("2(x2)", "1,3"), ("", "2,3")])
def test_hosts_whose_ranks_are_not_equally_many_find_out_themselves(tasks, ids):
    environment = {**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_GTIDS": ids}
    assert placed(environment, "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK") == ["2", None, "0"]


def test_torchs_names_win_and_a_batch_script_is_no_rank():
    assert launchers.placement({**STEP, "RANK": "0", "WORLD_SIZE": "1"}) == {}
    assert launchers.placement(BATCH) == launchers.placement({}) == {}
    assert launchers.placement({**STEP, "SLURM_PTY_PORT": "1"}) == {}
    assert launchers.outer({**STEP, "RANK": "0"}) is launchers.SRUN


def test_mpirun_inside_of_slurm_goes_before_it():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
    assert placed({**STEP, **OPEN_MPI}, *names) == ["1", "2", "1", "2", "0", "127.0.0.1"]
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_JOB_NODELIST": "a-1,b", "SLURM_JOB_NUM_NODES": "2"}
    assert placed(hydra, *names) == ["3", "4", None, None, None, "a-1"]
    assert placed({"PMI_RANK": "3", "PMI_SIZE": "4"}, "MASTER_ADDR", "MASTER_PORT") == [None, None]


def test_pbs(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("h1\nh1\nh2\nh2\n")
    job = {"PBS_JOBID": "5.server", "PBS_NODEFILE": str(nodes)}
    task = {**job, "PBS_VNODENUM": "3", "PBS_TASKNUM": "4", "PBS_NODENUM": "1"}
    assert placed(task, "RANK", "WORLD_SIZE", "MASTER_ADDR") == ["3", "4", "h1"]
    assert launchers.placement(job) == {}
    assert launchers.larger_allocation(job) == "PBS job 5.server has 4 slots"


def test_the_first_of_slurms_hosts():
    cases = {"n[003-004,7],m1": "n003", "a-b-1,c": "a-b-1", "r[1-2]n[4,5]": "r1n4", "127.0.0.[1-2]": "127.0.0.1"}
    assert {text: launchers.first_of(text) for text in cases} == cases


def test_ranks_of_a_node_as_slurm_was_asked():
    assert slurm.ranks_per_node({"SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "4"}) == 8
    assert slurm.ranks_per_node({"SLURM_TASKS_PER_NODE": "2(x3)"}) == 2
    assert slurm.ranks_per_node({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "4"}) == 4
    assert slurm.ranks_per_node({}) == 1
    with pytest.raises(UsageError, match="different numbers of tasks"):
        slurm.ranks_per_node({"SLURM_TASKS_PER_NODE": "3,1"})


def test_a_checkpoint_that_is_asked_for(tmp_path):
    assert not checkpoint_folder.requested(tmp_path)
    checkpoint_folder.request(tmp_path)
    assert checkpoint_folder.requested(tmp_path) and not checkpoint_folder.answered(tmp_path)
    checkpoint_folder.answer(tmp_path, 7)
    assert not checkpoint_folder.requested(tmp_path) and checkpoint_folder.answered(tmp_path) == 7
    checkpoint_folder.forget_request(tmp_path)
    assert not checkpoint_folder.answered(tmp_path)
