"""Islands of an elastic job: a lost rank costs its island, a whole island joins, and each sample is used once."""

import os
import signal

import pytest
from e2e.conftest import PATIENT_S
from e2e.elastic.test_elastic_promise import Training
from rig.docs import pages


@pytest.mark.full
def test_a_lost_rank_costs_its_island_and_a_whole_one_joins(idle_service, sandbox):
    service = idle_service
    service.start_coordinator()
    service.start_node("node-a", 4)
    service.start_node("node-b", 2)
    options = ("--nnodes", "1", "--nproc-per-node", "4", "--island-size", "2", "--respawn", "8")
    training = Training(service, sandbox.folder / "diaries", *options, within=PATIENT_S)

    os.kill(training.pids[3], signal.SIGKILL)
    sandbox.wait_until(lambda: not os.path.exists(f"/proc/{training.pids[2]}"), PATIENT_S)
    training.wait_for_steps(training.pids[:2])
    sandbox.wait_until(lambda: len(service.job(training.id)["ranks"]) == 4, PATIENT_S)
    pids = [rank["pid"] for rank in service.job(training.id)["ranks"]]
    assert pids[:2] == training.pids[:2] and not set(pids[2:]) & set(training.pids)
    training.wait_for_steps(pids)
    assert {diary.world for pid, diary in training.finish().items() if pid in pids} == {4}
    job = service.job(training.id)
    told = " ".join(event["reason"] for event in job["events"])
    assert "rank 3 of island 1 on node node-a was killed by SIGKILL" in told
    assert "; island 1 lost; 1 island (2 ranks) goes on" in told
    assert "1 island (2 newcomers) prepares" in told and "1 island (2 ranks) joins" in told
    assert [rank["island"] for rank in (*job["ranks"], *job["gone"])] == [0, 0, 1, 1, 1, 1]


@pytest.mark.full
def test_the_page(sandbox):
    """The first two commands, one of them elastic; the third is `bagua job submit` with the same options."""
    page = "concepts/islands"
    pages.write_files(f"docs/{page}.md", sandbox.folder)
    [commands] = [block for block in pages.of_page(page) if block.is_commands]
    for _, command in list(commands.commands)[:2]:
        done = sandbox.bagua(*command.split()[1:], deadline=PATIENT_S)
        assert done.code == 0 and "island 1 of" in done.text, done.text


@pytest.mark.full
def test_islands_go_whole(idle_service, sandbox):
    """The coordinator dies, a rank is stopped, the job is scaled, paused and drained: each sample counts once."""
    service = idle_service
    service.start_coordinator()
    for name in ("node-a", "node-b", "node-c"):
        service.start_node(name, 2)
    options = ("--nnodes", "1:3", "--nproc-per-node", "2", "--island-size", "2")
    training = Training(service, sandbox.folder / "diaries", *options, within=PATIENT_S)

    def islands_are(*nodes):
        """The nodes of all ranks, once the job has these; all of them train."""
        job = sandbox.wait_until(
            lambda: (
                (now := service.job(training.id))["state"] == "running"
                and [rank["node_id"] for rank in now["ranks"]] == [node for node in nodes for _ in range(2)]
                and now
            ),
            PATIENT_S,
            lambda: str(service.job(training.id)),
        )
        pids = [rank["pid"] for rank in job["ranks"]]
        training.wait_for_steps(pids)
        return pids

    first, *_ = islands = list(dict.fromkeys(training.nodes.values()))
    pids = islands_are(*islands)

    service.coordinator.kill()
    service.coordinator.wait()
    training.wait_for_steps(pids, more=20)
    service.start_coordinator()
    sandbox.wait_until(lambda: service.connected_nodes() == set(islands), PATIENT_S)
    assert islands_are(*islands) == pids, "no rank was started anew"

    os.kill(pids[3], signal.SIGSTOP)
    sandbox.wait_until(lambda: not os.path.exists(f"/proc/{pids[2]}"), PATIENT_S)
    gone = {rank["pid"]: rank for rank in service.job(training.id)["gone"]}
    assert "SIGSTOP" in gone[pids[3]]["error_tail"]

    service.call("job", "scale", training.id, "1")
    assert islands_are(first) == pids[:2]
    service.call("job", "pause", training.id)
    service.wait_for_state(training.id, ["waiting"], PATIENT_S)
    assert [rank["pid"] for rank in service.job(training.id)["ranks"]] == pids[:2], "they wait in memory"
    service.call("job", "resume", training.id)
    service.call("job", "scale", training.id, "3")
    sandbox.wait_until(lambda: len(service.job(training.id)["ranks"]) == 6, PATIENT_S)
    service.call("node", "drain", first)
    left = [rank["node_id"] for rank in service.job(training.id)["ranks"] if rank["node_id"] != first][::2]
    islands_are(*left)
    training.finish()
    job = service.job(training.id)
    assert {rank["exit_code"] for rank in job["gone"] if rank["pid"] in pids[:2] + pids[4:]} == {0}
