"""The part of the daemon's environment that ranks see, and their secrets."""

import json
from pathlib import Path

import pytest

PRINT = "import json, os\nprint(json.dumps(dict(os.environ)))\n"


async def seen(end, job_id, script, **spec):
    await end.run_script(job_id, script, **spec)
    job = await end.exited(job_id)
    assert job.ranks[0].exit_code == 0, job
    return json.loads(Path(job.ranks[0].log_path).read_text())


@pytest.fixture(autouse=True)
def operator(monkeypatch):
    variables = {"VAULT_TOKEN": "s3cret", "WANDB_API_KEY": "s3cret", "BAGUA_TOKEN": "s3cret", "TEAM_NAME": "x"}
    for name, value in {**variables, "NCCL_DEBUG": "WARN"}.items():
        monkeypatch.setenv(name, value)


async def test_secrets_of_the_operator_do_not_reach_ranks(end, daemon, script):
    env = await seen(end, "job", script(PRINT))
    assert env["NCCL_DEBUG"] == "WARN" and env["PATH"]
    assert not {"VAULT_TOKEN", "WANDB_API_KEY", "BAGUA_TOKEN", "TEAM_NAME"} & env.keys()
    assert "s3cret" not in "".join(env.values())
    told = daemon.log()
    assert "VAULT_TOKEN" in told and "--pass-env" in told and "s3cret" not in told


async def test_named_variables_and_secrets_from_files_do(end, start_daemon, script, tmp_path, state):
    file = tmp_path / "hf"
    file.write_text("s3cret-of-the-job\n")
    file.chmod(0o600)
    daemon = await start_daemon("--pass-env", "TEAM_*,WANDB_API_KEY")
    env = await seen(end, "job", script(PRINT), secret_env={"HF_TOKEN": str(file)})
    assert (env["TEAM_NAME"], env["WANDB_API_KEY"], env["HF_TOKEN"]) == ("x", "s3cret", "s3cret-of-the-job")
    assert "VAULT_TOKEN" not in env and "s3cret" not in daemon.log()
    for path in (state / "node-n").rglob("*"):
        if path.is_file() and path.name != "rank-0.log":  # which the script wrote
            assert b"s3cret" not in path.read_bytes(), path
