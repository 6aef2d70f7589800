"""The client library on a whole daemon: that of ``bagua run``."""

import os
import subprocess
import sys

SCRIPT = """
import bagua.torch_api as bagua
from bagua.torch_api.job.session import current
bagua.init_process_group()
current().companion.leave()  # as by a planned change
current().dismissed = True
"""


def test_a_rank_that_leaves_its_job_ends_well(tmp_path, short_folder):
    """Also while a thread still frees Gloo's group: the end of the interpreter would abort the process in it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "bagua.cli.main", "run", "--elastic", "--nproc-per-node", "1", str(script)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(short_folder), "BAGUA_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
