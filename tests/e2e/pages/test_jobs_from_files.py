"""Jobs as docs/jobs.md describes them: options in a file, code that is shipped, and the client in Python."""

import contextlib
import io
import json
import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs" / "jobs.md"
SCRIPT = "import os, sys\nfrom lib import word\nprint(word, os.environ['RANK'], sys.argv[1:], os.environ.get('A'))\n"


def project(sandbox):
    folder = sandbox.folder / "project"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "lib.py").write_text("word = 'shipped'\n")
    return folder


def test_a_job_from_a_file_in_code_that_is_shipped(service):
    sandbox = service.sandbox
    project(sandbox)
    config = sandbox.script(
        "job.toml",
        """
        script = "train.py"
        args = ["--epochs", "3"]
        nnodes = 2
        working-dir = "project"
        only-rank = [1]
        quiet = true
        [env]
        A = "file"
        """,
    )
    done = service.call("job", "submit", "--config", config, "--watch", "--env", "A=line", "--output", "json")
    assert done.code == 0, done.text
    assert json.loads(done.out.splitlines()[-1])["state"] == "succeeded"
    assert "[rank 1] shipped 1 ['--epochs', '3'] line" in done.err and "[rank 0]" not in done.err
    assert "quiet (of `bagua run`) has no meaning" in done.err
    copies = [path for path in sandbox.state.rglob("code") if path.parent.parent.name == "jobs"]
    assert not copies, "copies go with their jobs"
    plain = service.call(
        "job", "logs", "--no-prefix", "--only-rank", "0", json.loads(done.out.splitlines()[-1])["job_id"]
    )
    assert plain.out == "shipped 0 ['--epochs', '3'] line\n"
    for arguments, words in (
        (("--working-dir", "project", "absent.py"), "does not exist in the working directory"),
        (("--working-dir", "project", "--workdir", "/tmp", "train.py"), "not both"),
        (("--config", "job.toml", "--only-rank", "7"), "the job has ranks 0 to 1"),
    ):
        refused = service.call("job", "submit", *arguments)
        assert refused.code == 2 and words in refused.err, refused.text


def test_the_example_of_the_documentation(service, monkeypatch):
    example = re.search(r"## From Python\n+<!--.*?-->\n```python\n(.*?)```", DOCS.read_text(), re.S)
    assert example is not None
    monkeypatch.chdir(project(service.sandbox))
    for name in ("BAGUA_STATE_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, service.sandbox.env[name])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example[1], {})
    lines = printed.getvalue().splitlines()
    assert lines[-1] == "JOB_STATE_SUCCEEDED"
    assert printed.getvalue().count("shipped") == 2
    kinds = [line.partition(" ")[0] for line in lines]
    assert kinds.index("submitted") < kinds.index("placed") < kinds.index("rank_started")
