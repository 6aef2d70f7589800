"""The part of the daemon's environment that ranks see, and their secrets."""

import json
from pathlib import Path

PRINT = "import json, os\nprint(json.dumps(dict(os.environ)))\n"


async def test_what_reaches_ranks(end, start_daemon, script, tmp_path, state, monkeypatch):
    """No secrets of the operator, but variables that are named, and secrets from files."""
    operators = {"VAULT_TOKEN": "s3cret", "WANDB_API_KEY": "s3cret", "BAGUA_TOKEN": "s3cret", "TEAM_NAME": "x"}
    for name, value in {**operators, "OTHER_NAME": "y", "NCCL_DEBUG": "WARN"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "hf"
    file.write_text("s3cret-of-the-job\n")
    file.chmod(0o600)
    daemon = await start_daemon("--pass-env", "TEAM_*,WANDB_API_KEY")
    await end.run_script("job", script(PRINT), secret_env={"HF_TOKEN": str(file)})
    job = await end.exited("job")
    assert job.ranks[0].exit_code == 0, job
    env = json.loads(Path(job.ranks[0].log_path).read_text())
    assert env["NCCL_DEBUG"] == "WARN" and env["PATH"]
    assert (env["TEAM_NAME"], env["WANDB_API_KEY"], env["HF_TOKEN"]) == ("x", "s3cret", "s3cret-of-the-job")
    assert not {"VAULT_TOKEN", "BAGUA_TOKEN", "OTHER_NAME"} & env.keys()
    told = daemon.log()
    assert "VAULT_TOKEN" in told and "--pass-env" in told and "s3cret" not in told
    for path in (state / "node-n").rglob("*"):
        if path.is_file() and path.name != "rank-0.log":  # which the script wrote
            assert b"s3cret" not in path.read_bytes(), path
