"""Commands about this machine, and about a training: ``bagua doctor``, ``bagua advise`` and ``bagua tune``."""

import json
import socket
from contextlib import suppress

import pytest
from rig.docs import page_scripts

from bagua.tuning.profile import REFERENCE, StepProfile

ADVISED_S = 300.0  # a rank that imports torch, and the advice: 15 s of a core
ADVISED = """
    import sys, torch, bagua.torch_api as bagua
    bagua.init_process_group()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = model.with_bagua([optimizer])
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    print("the end of the script")
"""


def test_this_machine_is_fit(sandbox):
    done = sandbox.bagua("doctor")
    assert done.code == 0, done.text
    for what in ("compiler", "ninja", "torch", "GPU", "/dev/shm", "locked memory", "cores", "network"):
        assert what in done.out
    assert "GB/s on one core" in done.out  # what encryption between hosts costs
    assert "This machine is fit." in done.out


def test_a_machine_that_is_not(sandbox):
    """No compiler, a state folder that can't be written, and the port is in use."""
    blocked = sandbox.folder / "file"
    blocked.write_text("")
    env = {"CXX": "no-such-compiler", "BAGUA_STATE_DIR": str(blocked / "state")}
    with socket.socket() as taken:
        with suppress(OSError):  # something else uses it
            taken.bind(("127.0.0.1", 7670))
            taken.listen()
        done = sandbox.bagua("doctor", "--output", "json", env=env)
    document = json.loads(done.out)
    found = {check["name"]: check for check in document["checks"]}
    assert done.code == 1 and document["fit"] is False
    assert found["C++ compiler"]["status"] == "fail" and "apt-get install g++" in found["C++ compiler"]["fix"]
    assert found["port"]["status"] == "warn" and "BAGUA_STATE_DIR" in done.out
    assert all(check["fix"] for check in found.values() if check["status"] != "ok")


@pytest.mark.full
def test_a_script_is_recorded_ended_and_advised_on(sandbox):
    """One that is too short is told so."""
    sandbox.script("train.py", ADVISED)
    command = ("advise", "--network", "1gbit", "--steps", "3", "--save", "p.json", "--output", "json", "train.py")
    done = sandbox.bagua(*command, "1000", deadline=ADVISED_S)
    assert done.code == 0, done.text
    found = json.loads(done.out)
    assert (found["recorded_steps"], found["model_bytes"]) == (3, 4 * (64 * 64 + 64 + 64 * 8 + 8))
    assert "3 steps were recorded; the script ends here" in done.err and "the end of the script" not in done.err
    saved = StepProfile.load(sandbox.folder / "p.json")
    assert set(saved.speeds.codecs) == set(REFERENCE.codecs) and saved.speeds != REFERENCE
    done = sandbox.bagua(*command, "6", deadline=ADVISED_S)
    assert done.code and "train.py ended before 3 training steps" in done.err and "--steps" in done.err
    assert "the end of the script" in done.err
    assert "ended after 6 training steps, and 8 are needed" in done.err


@pytest.mark.full
def test_a_job_tunes_itself_and_says_what_it_found(service):
    sandbox = service.sandbox
    script = sandbox.script("train.py", page_scripts.of_autotuning())
    assert service.json("tune", "list")["tunings"] == []
    job_id = service.submit("--autotune", "--nnodes", "2", "--env", "BAGUA_IS_OUTPUT_AUTOTUNE_LOG=1", script)
    job = service.wait_for_state(job_id, ["succeeded", "failed"], within=120)
    assert job["state"] == "succeeded", job
    (found,) = service.json("tune", "list")["tunings"]
    assert found["job_id"] == job_id and found["tried"] >= 1 and found["network"].startswith("2 hosts of 1, ")
    assert job["tuning"] and job["tuning"] in service.call("job", "show", job_id).out
    picture = sandbox.folder / "tried.png"
    shown = service.call("tune", "show", found["id"][:6], "--plot", str(picture)).out
    assert found["model"] in shown and "step time" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    (first, *_) = service.json("tune", "show", found["id"])["trials"]
    assert first["seconds"] > 0 and first["reason"] and first["setting"]
    assert "bagua: tuning: " in service.call("job", "logs", job_id).out
    assert service.call("tune", "forget", found["id"]).out == f"forgotten: {found['id']}\n"
    assert service.json("tune", "list")["tunings"] == []
