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
from rig.docs import pages
from rig.limits import SOON_S

FAIL_ON_RANK_1 = """
    import bagua.torch_api as bagua

    bagua.init_process_group()
    bagua.barrier()
    if bagua.get_rank() == 1:
        raise ValueError("the second layer has no weights")
    bagua.barrier()
    print("never printed", flush=True)
"""

WAIT_FOR_RANK_0 = """
    import os, pathlib, time
    import bagua.torch_api as bagua

    bagua.init_process_group()
    pathlib.Path(f"pid-{bagua.get_rank()}.tmp").write_text(str(os.getpid()))
    os.rename(f"pid-{bagua.get_rank()}.tmp", f"pid-{bagua.get_rank()}")
    if bagua.get_rank() == 0:
        time.sleep(300)
    bagua.barrier()
"""

# Without torch, whose import costs two seconds of a core.
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


@pytest.mark.full  # the others run scripts, too
def test_a_script_alone(sandbox):
    script = sandbox.script("hello.py", "import os, sys\nprint('hello', os.environ['RANK'], sys.argv[1:])\n")
    done = sandbox.bagua("run", script, "--epochs", "3", "-m", "--help")
    assert done.code == 0, done.text
    assert done.out == "hello 0 ['--epochs', '3', '-m', '--help']\n"
    assert "Job hello succeeded in" in done.err
    sandbox.assert_all_gone(within=SOON_S)
    sandbox.assert_no_state_left()


@pytest.mark.full  # test_examples.py has two nodes
def test_ranks_on_two_nodes(sandbox):
    text = "import os\nprint(*(os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NODE_RANK', 'COLOUR')))\n"
    script = sandbox.script("env.py", text)
    done = sandbox.bagua("run", "--nnodes", "2", "--nproc-per-node", "2", "--env", "COLOUR=red", script)
    assert done.code == 0, done.text
    expected = ["[rank 0] 0 4 0 0 red", "[rank 1] 1 4 1 0 red", "[rank 2] 2 4 0 1 red", "[rank 3] 3 4 1 1 red"]
    assert sorted(done.out.splitlines()) == expected


def test_the_users_environment_reaches_the_script_and_no_credential_of_the_service(sandbox):
    secret = sandbox.folder / "hf"
    secret.write_text("from-a-file\n")
    secret.chmod(0o600)
    program = 'echo "$TEAM $WANDB_API_KEY $HF_TOKEN ${BAGUA_TOKEN-none} ${BAGUA_JOB_SECRET-none}"'
    own = {"TEAM": "x", "WANDB_API_KEY": "mine", "BAGUA_TOKEN": "t", "BAGUA_JOB_SECRET": "s"}
    done = sandbox.bagua("run", "--secret-env", f"HF_TOKEN={secret}", "--no-python", "sh", "-c", program, env=own)
    assert (done.code, done.out) == (0, "x mine from-a-file none none\n"), done.text


def test_a_secret_is_in_the_memory_of_the_run_alone(sandbox):
    file, value = sandbox.folder / "hf", "s3cret-of-the-run"
    file.write_text(f"{value}\n")
    file.chmod(0o600)
    config = sandbox.script("job.toml", f'[secret]\nHF_TOKEN = "{file}"\n')
    script = sandbox.script(
        "look.py",
        """
        import hashlib, os, pathlib
        value = os.environ["HF_TOKEN"].encode()
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            if process.name != str(os.getpid()):
                try:
                    if value in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                        print("seen in", process)
                except OSError:
                    pass  # it has ended meanwhile
        print(hashlib.sha256(value).hexdigest())
        raise SystemExit(3)  # what failed keeps its state: database and logs
        """,
    )
    done = sandbox.bagua("run", "--config", config, "--keep-state", script)
    assert (done.code, done.out) == (3, f"{hashlib.sha256(value.encode()).hexdigest()}\n"), done.text
    written = [path for path in sandbox.runtime.rglob("*") if path.is_file()]
    assert any(path.suffix == ".db" for path in written), written
    assert not [path for path in written if value.encode() in path.read_bytes()]
    file.chmod(0o644)
    refused = sandbox.bagua("run", "--secret", f"HF_TOKEN={file}", script)
    assert refused.code and "open to other users" in refused.text and value not in refused.text


def test_with_json_standard_output_is_the_document_alone(sandbox):
    script = sandbox.script("say.py", "print('something')\n")
    done = sandbox.bagua("run", "--output", "json", "--name", "n1", "--nproc_per_node", "2", script)
    assert done.code == 0, done.text
    document = json.loads(done.out)
    assert {"[rank 0] something", "[rank 1] something"} <= set(done.err.splitlines())
    assert (document["state"], document["name"], document["exit_code"]) == ("succeeded", "n1", 0)
    assert [rank["exit_code"] for rank in document["ranks"]] == [0, 0]


@pytest.mark.parametrize(
    "keep", [["--log-dir", "logs"], *(pytest.param(keep, marks=pytest.mark.full) for keep in (["--keep-state"], []))]
)
def test_no_path_in_the_document_is_gone(sandbox, keep):
    done = sandbox.bagua("run", "--output", "json", *keep, sandbox.script("fail.py", "raise SystemExit(3)\n"))
    assert done.code == 3, done.text
    document = json.loads(done.out)
    paths = [document["log_dir"], *(rank["log_path"] for rank in document["ranks"])]
    assert all(os.path.isabs(path) and os.path.exists(path) for path in paths) if keep else not any(paths), paths
    assert str(sandbox.runtime / "bagua") not in done.out or "--keep-state" in keep


def test_programs_modules_folders_and_logs(sandbox):
    work = sandbox.folder / "work"
    work.mkdir()
    (work / "module_here.py").write_text("import os\nprint('module in', os.getcwd())\n")
    done = sandbox.bagua("run", "--workdir", work, "--log-dir", sandbox.folder / "logs", "-m", "module_here")
    assert (done.code, done.out) == (0, f"module in {work}\n"), done.text
    assert [path.read_text() for path in (sandbox.folder / "logs").iterdir()] == [f"module in {work}\n"]
    done = sandbox.bagua("run", "--no-python", "/bin/sh", "-c", "echo $WORLD_SIZE; exit 7")
    assert (done.code, done.out) == (7, "1\n"), done.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch.py"], "nosuch.py does not exist"),
        (["--workdir", "/nosuch", "a.py"], "/nosuch: there is no such folder"),
        (["--env", "broken", "a.py"], "write NAME=VALUE"),
        (["-m", "--no-python", "x"], "not both"),
        (["--nnodes", "0", "x.py"], "--nnodes"),
    ],
)
def test_usage_errors(sandbox, arguments, words):
    done = sandbox.bagua("run", *arguments)
    assert done.code == 2, done.text
    assert words in done.err
    assert "Traceback" not in done.text
    assert done.seconds < SOON_S


def test_module_that_does_not_exist(sandbox):
    done = sandbox.bagua("run", "--nproc-per-node", "2", "-m", "nosuch.module")
    assert done.code == 1, done.text
    assert "No module named" in done.err
    assert "exited with code 1" in done.err


def test_state_folder_that_can_not_be_used(sandbox):
    blocked = sandbox.folder / "file"
    blocked.write_text("")
    script = sandbox.script("a.py", "")
    done = sandbox.bagua("run", script, env={"XDG_RUNTIME_DIR": str(blocked)})
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert str(blocked) in done.err
    assert "Traceback" not in done.text


@pytest.mark.full  # integration/node/test_node_build.py has one, too
def test_a_core_that_can_not_be_built(sandbox):
    script = sandbox.script("a.py", "print('never')")
    done = sandbox.bagua("run", script, env={"BAGUA_CACHE_DIR": str(sandbox.folder / "cache"), "CXX": "/bin/false"})
    assert (done.code, done.out) == (1, ""), done.text
    assert "error: Building the native core failed" in done.err
    assert "Traceback" not in done.err.split("The last lines were")[0]
    sandbox.assert_all_gone(within=SOON_S)
    sandbox.assert_no_state_left()


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


@pytest.mark.full  # integration/node/test_node_jobs.py kills one, too
def test_a_rank_that_is_killed_fails_the_job_soon(sandbox):
    script = sandbox.script("wait.py", WAIT_FOR_RANK_0)
    process = sandbox.start(*sandbox.command, "run", "--nnodes", "2", script)
    victim = pids(sandbox, 2)[1]
    os.kill(victim, signal.SIGKILL)
    done = sandbox.finish(process, time.monotonic(), deadline=30)
    assert done.seconds < SOON_S, done.text
    assert done.code == 137, done.text
    assert "rank 1" in last_line(done.err)
    assert "SIGKILL. The kernel's out-of-memory killer may have ended it" in last_line(done.err)
    sandbox.assert_all_gone(within=SOON_S)


def jobs_from_another_terminal(sandbox):
    """The jobs of a run that goes on, asked for as docs/profiling.md says."""
    (block,) = [block for block in pages.of_page("profiling") if "run-*" in block.text]
    command = f'bagua() {{ {shlex.join(sandbox.command)} "$@"; }}\n{block.text}'
    listed = sandbox.run("bash", "-c", command)
    assert listed.code == 0, listed.text
    return listed.out


@pytest.mark.parametrize(
    "program", [SLEEP, pytest.param(WAIT_FOR_RANK_0, marks=pytest.mark.full)], ids=["sleep", "wait"]
)
def test_ctrl_c_ends_everything(sandbox, program):
    script = sandbox.script("wait.py", program)
    process = sandbox.start(*sandbox.command, "run", "--nnodes", "2", script)
    pids(sandbox, 2)
    if program == SLEEP:
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


@pytest.mark.full  # test_second_ctrl_c_kills_at_once
def test_ctrl_c_ends_ranks_that_will_not(sandbox):
    script = sandbox.script("stubborn.py", STUBBORN)
    process = sandbox.start(*sandbox.command, "run", "--nproc-per-node", "2", script)
    pids(sandbox, 2)
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = sandbox.finish(process, pressed, deadline=30)
    sandbox.assert_all_gone(within=SOON_S)
    assert done.code == 130, done.text


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


@pytest.mark.parametrize("whom", ["command line", pytest.param("coordinator", marks=pytest.mark.full), "node daemon"])
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


COUNT = """
    import os, pathlib, time
    import torch
    import bagua.torch_api as bagua

    bagua.init_process_group()
    pathlib.Path(f"pid-{bagua.get_rank()}").write_text(str(os.getpid()))
    sums = [bagua.allreduce_inplace(torch.ones(8)) or time.sleep(0.02) for _ in range(200)]
"""


@pytest.mark.parametrize("options", [(), ("--elastic",)], ids=["static", "elastic"])
def test_a_machine_that_sleeps_wakes_up_in_the_same_job(sandbox, options):
    """All processes stand still for longer than a daemon may be without its coordinator."""
    script = sandbox.script("count.py", COUNT)
    process = sandbox.start(*sandbox.command, "run", "--nproc-per-node", "2", *options, script)
    pids(sandbox, 2)
    asleep = list(sandbox.marked())
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(12)
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    done = sandbox.finish(process, time.monotonic(), deadline=120)
    assert done.code == 0, done.text


@pytest.mark.full  # unit tests draw the bar
def test_a_terminal_gets_a_bar(sandbox):
    script = sandbox.script(
        "report.py",
        """
        import time
        import bagua.torch_api as bagua

        bagua.init_process_group()
        for step in range(1, 21):
            if bagua.get_rank() == 0:
                bagua.report(step=step, total=20, metrics={"loss": 1 / step})
            print("line", step, flush=True)
            time.sleep(0.1)
        """,
    )
    ours, theirs = os.openpty()
    process = sandbox.start(
        *sandbox.command,
        *("run", "--nproc-per-node", "2", script),
        stdout=theirs,
        stderr=theirs,
        env={"TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    text = read_all(ours, process)
    assert process.returncode == 0, text
    assert "loss 0." in text
    assert "━" in text
    lines = text.replace("\r", "\n").split("\n")
    for step in range(1, 21):
        assert sum(line.endswith(f"[rank 1] line {step}") for line in lines) == 1, text


def read_all(descriptor, process):
    """The output of a program to a terminal until it ended."""
    found = b""
    with os.fdopen(descriptor, "rb", buffering=0) as terminal:
        try:
            while data := terminal.read(65536):
                found += data
        except OSError:  # how Linux says that the other side is closed
            pass
    process.wait(timeout=30)
    return found.decode()


def last_line(text):
    return text.rstrip().splitlines()[-1]


def test_help_is_quick_and_needs_no_torch(sandbox):
    done = sandbox.run(sandbox.command[0], "-X", "importtime", "-P", "-m", "bagua.cli.main", "--help")
    assert done.code == 0
    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
    assert imported.isdisjoint({"torch", "grpc", "numpy", "sqlalchemy"})
    assert "coordinator" in done.out


@pytest.mark.full
def test_other_programs_help_is_theirs(sandbox):
    assert "--database-url" in sandbox.bagua("coordinator", "--help").out
    assert "--data-host" in sandbox.bagua("daemon", "--help").out
    assert "--host" in sandbox.bagua("certs", "--help").out
