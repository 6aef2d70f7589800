"""``bagua run`` as a user sees it: ends, exit codes, words, and that nothing is left behind."""

import hashlib
import json
import os
import re
import shlex
import signal
import sys
import time

import pytest
from rig import leaks
from rig.docs import pages
from rig.limits import SOON_S
from rig.ranks.elastic import JOIN

# Without torch, whose import costs two seconds of a core.
FAIL_ON_RANK_1 = f"""{JOIN}
def barrier():
    rank.wait(rank.submit(comm=0, kind=core.KINDS["barrier"], dtype=core.DTYPES["uint8"], count=0))

barrier()
if me == 1:
    raise ValueError("the second layer has no weights")
barrier()
print("never printed", flush=True)
"""

SLEEP = """
    import os, pathlib, time

    rank = os.environ["RANK"]
    pathlib.Path(f"pid-{rank}.tmp").write_text(str(os.getpid()))
    os.rename(f"pid-{rank}.tmp", f"pid-{rank}")
    time.sleep(300)
"""

# Ignores SIGTERM, and has a child that does too.
STUBBORN = """
    import os, pathlib, signal, subprocess, sys, time

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(300)"])
    rank = os.environ["RANK"]
    pathlib.Path(f"pid-{rank}.tmp").write_text(str(os.getpid()))
    os.rename(f"pid-{rank}.tmp", f"pid-{rank}")
    time.sleep(300)
"""


def pids(sandbox, ranks, within=90.0):
    """The ranks' process ids, once all have written theirs."""
    files = [sandbox.folder / f"pid-{rank}" for rank in range(ranks)]
    sandbox.wait_until(lambda: all(file.exists() for file in files), within)
    return [int(file.read_text()) for file in files]


def test_what_a_run_passes_on_and_tells(sandbox):
    """A module in another folder, with the user's environment, and no credential of the service. With JSON standard
    output is the document alone, and no path in it is gone."""
    secret, work = sandbox.folder / "hf", sandbox.folder / "work"
    secret.write_text("from-a-file\n")
    secret.chmod(0o600)
    work.mkdir()
    names = ("TEAM", "WANDB_API_KEY", "HF_TOKEN", "BAGUA_TOKEN", "BAGUA_JOB_SECRET", "RANK", "WORLD_SIZE")
    (work / "module_here.py").write_text(
        f"import os, sys\nprint(os.getcwd(), *map(os.environ.get, {names}), sys.argv[1:])\nsys.exit(7)"
    )
    own = {"TEAM": "x", "WANDB_API_KEY": "mine", "BAGUA_TOKEN": "t", "BAGUA_JOB_SECRET": "s"}
    options = ("--workdir", work, "--log-dir", "logs", "--secret-env", f"HF_TOKEN={secret}", "--output", "json")
    shape = ("--name", "n1", "--nproc_per_node", "2")
    done = sandbox.bagua("run", *options, *shape, "-m", "module_here", "-m", "--help", env=own)
    document = json.loads(done.out)
    assert (done.code, document["state"], document["name"], document["exit_code"]) == (7, "failed", "n1", 7), done.text
    lines = [f"{work} x mine from-a-file None None {rank} 2 ['-m', '--help']" for rank in (0, 1)]
    assert any(f"[rank {rank}] {line}" in done.err.splitlines() for rank, line in enumerate(lines))
    paths = [document["log_dir"], *(rank["log_path"] for rank in document["ranks"])]
    assert all(os.path.isabs(path) and os.path.exists(path) for path in paths), paths
    assert str(sandbox.runtime / "bagua") not in done.out
    sandbox.assert_all_gone(within=SOON_S)
    sandbox.assert_no_state_left()


def test_a_secret_is_in_the_memory_of_the_run_alone(sandbox):
    file, value = leaks.secret_file(sandbox.folder)
    config = sandbox.script("job.toml", f'[secret]\nHF_TOKEN = "{file}"\n')
    script = sandbox.script("look.py", leaks.LOOK)
    done = sandbox.bagua("run", "--config", config, "--keep-state", script)
    assert (done.code, done.out) == (3, f"{hashlib.sha256(value.encode()).hexdigest()}\n"), done.text
    assert list(sandbox.runtime.rglob("*.db")) and not leaks.files_with(value, sandbox.runtime)
    file.chmod(0o644)
    refused = sandbox.bagua("run", "--secret", f"HF_TOKEN={file}", script)
    assert refused.code and "open to other users" in refused.text and value not in refused.text


@pytest.mark.full  # seven ranks import torch; integration/torch_api/test_torch_islands.py has it without a service
def test_islands_by_the_variable_of_other_starters_and_a_model_that_no_island_shares(sandbox):
    script = sandbox.script(
        "t.py",
        "import bagua.torch_api as bagua\nbagua.init_process_group()\nprint(bagua.get_island(), bagua.get_rank())\n",
    )
    done = sandbox.bagua("run", "--nproc-per-node", "4", script, env={"BAGUA_ISLAND_SIZE": "2"})
    expected = {f"[rank {rank}] {rank // 2} {rank}" for rank in range(4)}
    assert done.code == 0 and expected <= set(done.out.splitlines()), done.text
    assert "each of 2 islands has trained a model of its own" in done.text
    refused = sandbox.bagua("run", "--nproc-per-node", "3", script, env={"BAGUA_ISLAND_SIZE": "2"})
    assert refused.code == 2 and "3 ranks can't be divided into islands of 2" in refused.text, refused.text
    script = sandbox.script("c10d.py", 'import torch\ntorch.distributed.init_process_group("bagua")\n')
    refused = sandbox.bagua("run", "--nproc-per-node", "2", "--island-size", "2", script)
    assert refused.code and "call bagua.init_process_group(), which makes it" in refused.text, refused.text


USAGE = {
    "nosuch.py": "nosuch.py does not exist",
    "-m --no-python x": "not both",
    "--workdir /nosuch a.py": "/nosuch: there is no such folder",
    "--env broken a.py": "write NAME=VALUE",
    "--algorithm local_sgd:intervall=3 -m bagua.examples.digits": "no parameter 'intervall'. Known: ",
}


def test_usage_errors(sandbox):
    """In one process: a start of the command line costs half a second of a core."""
    script = sandbox.script(
        "usage.py",
        f"""
        import sys
        from bagua.cli import main

        for words in {list(USAGE)}:
            sys.argv = ["bagua", "run", *words.split()]
            try:
                main.main()
            except SystemExit as end:
                print(f"code {{end.code}}", file=sys.stderr)
        """,
    )
    done = sandbox.run(sys.executable, "-P", script)
    assert done.err.count("code 2\n") == len(USAGE) and "Traceback" not in done.text, done.text
    told = " ".join(done.err.split())
    assert all(" ".join(words.split()) in told for words in USAGE.values()), done.text


def test_a_rank_that_raises_fails_the_job(sandbox):
    script = sandbox.script("train.py", FAIL_ON_RANK_1)
    done = sandbox.bagua("run", "--nnodes", "2", script)
    assert done.code == 1, done.text
    assert "never printed" not in done.text
    # A loaded machine may be slow to see rank 1's process end: then what the rank has told before is the reason, or
    # rank 0's error, which names it.
    assert re.search(r"\brank 1\b.*: ValueError: the second layer has no weights", last_line(done.err)), done.err
    # Its traceback stands in its output, once, and is not printed again at the end.
    assert done.out.count("[rank 1] ValueError: the second layer has no weights") == 1
    assert "Traceback" not in done.err
    sandbox.assert_all_gone(within=SOON_S)
    sandbox.assert_no_state_left()


def jobs_from_another_terminal(sandbox):
    """The jobs of a run that goes on, asked for as docs/profiling.md says."""
    (block,) = [block for block in pages.of_page("profiling") if "run-*" in block.text]
    command = f'bagua() {{ {shlex.join(sandbox.command)} "$@"; }}\n{block.text}'
    listed = sandbox.run("bash", "-c", command)
    assert listed.code == 0, listed.text
    return listed.out


def test_ctrl_c_ends_everything(sandbox):
    script = sandbox.script("wait.py", SLEEP)
    process = sandbox.start(*sandbox.command, "run", "--nnodes", "2", script)
    pids(sandbox, 2)
    assert "wait" in jobs_from_another_terminal(sandbox)
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = sandbox.finish(process, pressed, deadline=30)
    sandbox.assert_all_gone(within=SOON_S)
    assert done.code == 130, done.text
    assert last_line(done.err).startswith("Job wait was cancelled after")
    assert last_line(done.err).endswith(": stopped by the user.")
    after = re.split("^(?:starting|running)\n", done.err, flags=re.MULTILINE)[-1]  # ranks come before "running"
    assert after.count("\n") == 1, done.err  # one line after Ctrl-C
    sandbox.assert_no_state_left()


def test_second_ctrl_c_kills_at_once(sandbox):
    script = sandbox.script("stubborn.py", STUBBORN)
    patient = "from bagua.cli import main, run; run.STOP_GRACE_S = 200.0; main.main()"
    process = sandbox.start(sys.executable, "-P", "-c", patient, "run", "--nproc-per-node", "2", script)
    pids(sandbox, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)  # two signals at the same instant are one
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = sandbox.finish(process, pressed, deadline=30)
    assert done.code == 130, done.text
    assert done.seconds < SOON_S
    sandbox.assert_all_gone(within=SOON_S)
    sandbox.assert_no_state_left()


def test_ctrl_c_while_starting(sandbox):
    script = sandbox.script("a.py", "")
    process = sandbox.start(*sandbox.command, "run", script)
    sandbox.wait_until(lambda: len(sandbox.marked()) > 1, 10)
    process.send_signal(signal.SIGINT)
    done = sandbox.finish(process, time.monotonic(), deadline=30)
    assert done.code == 130, done.text
    assert last_line(done.err).startswith("Stopped") and "Traceback" not in done.text
    sandbox.assert_all_gone(within=SOON_S)
    sandbox.assert_no_state_left()


@pytest.mark.parametrize(
    "whom", ["command line", *(pytest.param(one, marks=pytest.mark.full) for one in ("coordinator", "node daemon"))]
)
def test_nothing_outlives_a_part_that_is_killed(sandbox, whom):
    script = sandbox.script("sleep.py", SLEEP)
    process = sandbox.start(*sandbox.command, "run", "--nproc-per-node", "2", script)
    ranks = pids(sandbox, 2)
    module = {"command line": "bagua.cli.main", "coordinator": "daemon.coordinator", "node daemon": "daemon.node"}[whom]
    victim = next(pid for pid, command in sandbox.marked().items() if module in command and pid not in ranks)
    os.kill(victim, signal.SIGKILL)
    done = sandbox.finish(process, time.monotonic(), deadline=30)
    sandbox.assert_all_gone(within=SOON_S)
    if whom != "command line":
        assert done.code == 1, done.text
        assert f"The {whom}" in done.err
        assert "was killed by SIGKILL" in done.err
        sandbox.assert_no_state_left()


COUNT = f"""{JOIN}
open(f"pid-{{me}}", "w").write(str(os.getpid()))
for _ in range(200):
    rank.wait(rank.submit(comm=0, kind=core.KINDS["barrier"], dtype=core.DTYPES["uint8"], count=0))
    time.sleep(0.02)
"""


def test_a_machine_that_sleeps_wakes_up_in_the_same_job(sandbox):
    """All processes stand still for longer than a daemon may be without its coordinator."""
    script = sandbox.script("count.py", COUNT)
    process = sandbox.start(*sandbox.command, "run", "--nproc-per-node", "2", script)
    pids(sandbox, 2)
    asleep = list(sandbox.marked())
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(12)
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    done = sandbox.finish(process, time.monotonic(), deadline=120)
    assert done.code == 0, done.text


def last_line(text):
    return text.rstrip().splitlines()[-1]


def test_help_is_quick_and_needs_no_torch(sandbox):
    done = sandbox.run(sandbox.command[0], "-X", "importtime", "-P", "-m", "bagua.cli.main", "--help")
    assert done.code == 0
    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
    assert imported.isdisjoint({"torch", "grpc", "numpy", "sqlalchemy"})
    assert "coordinator" in done.out
