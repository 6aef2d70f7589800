"""A job that tunes itself in a service, and the commands that show what it found."""

import pytest
from rig.docs import page_scripts


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
