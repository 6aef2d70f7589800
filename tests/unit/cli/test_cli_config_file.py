"""Options from a file: ``--config``, and the file that ``--print-config`` writes."""

import tomllib

import pytest
from typer.testing import CliRunner

from bagua.base.errors import UsageError
from bagua.cli import config_file, run
from bagua.cli.app import app
from bagua.cli.job import submit as job


def taken(folder, text, command="run"):
    path = folder / "job.toml"
    path.write_text(text)
    return config_file.values(path, command)


def printed(*arguments):
    done = CliRunner().invoke(app, [*arguments, "--print-config"])
    assert done.exit_code == 0, done.output
    return tomllib.loads(done.stdout)


def test_keys_are_those_of_the_commands(tmp_path):
    found = taken(
        tmp_path,
        """
        script = "train.py"
        args = ["--lr", "0.1"]
        nnodes = "1:2"
        nproc_per_node = 2
        elastic = true
        respawn = 3
        only-rank = [0, 1]
        output = "json"
        log-dir = "logs"
        [env]
        A = "x=y"
        """,
    )
    assert found == {
        "script": "train.py",
        "args": ["--lr", "0.1"],
        "nnodes": "1:2",
        "nproc_per_node": "2",
        "elastic": True,
        "respawn": 3,
        "only_rank": [0, 1],
        "output": "json",
        "log_dir": "logs",
        "env": ["A=x=y"],
    }


@pytest.mark.parametrize(
    "text, words",
    [
        ("nproc-per-nod = 2", "Do you mean nproc-per-node?"),
        ("adopt = true", "no option 'adopt'"),
        ("name = 3", "name is 3: it must be a text"),
        ("elastic = 'yes'", 'elastic is "yes": it must be true or false'),
        ("respawn = -1", "respawn is -1: it must be from 0 to 1000"),
        ("placement-timeout = -0.5", "at least 0"),
        ("placement-timeout = 'soon'", "a number"),
        ("nproc-per-node = 0", "nproc-per-node: '0' is neither a number"),
        ("nnodes = '3:1'", "Write 1:3"),
        ("env = 'A=1'", "a list of texts, or a table of texts"),
        ("only-rank = ['0']", "a list of whole numbers"),
        ("output = 'yaml'", "one of text, json"),
        ("log_dir = 'a'\nlog-dir = 'b'", "there twice"),
        ('[env]\n"A=B" = "c"', "'A=B' can't be the name of a variable"),
        ('[env]\n"" = "c"', "'' can't be the name of a variable"),
        ("args = " + 3000 * "[", "too many brackets"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, text, words):
    with pytest.raises(UsageError, match=r"--config .*job\.toml") as refused:
        taken(tmp_path, text)
    assert words in str(refused.value)


def test_the_command_line_wins(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('script = "a.py"\nnproc-per-node = 2\nname = "file"\n[env]\nA = "1"\n')
    found = printed("run", "--config", str(path), "--name", "line")
    assert found == {"script": "a.py", "nproc-per-node": 2, "name": "line", "env": ["A=1"]}


def test_what_is_printed_can_be_read(tmp_path):
    """Every option that a file may hold is in what is printed, given or as a comment."""
    arguments = ["--nnodes", "1:2", "--nproc-per-node", "4", "--respawn", "1", "--env", 'Q="a\\b"', "--only-rank", "1"]
    for command, function in ((["run"], run.run), (["job", "submit"], job.submit)):
        done = CliRunner().invoke(app, [*command, *arguments, "--print-config", "train.py", "--epochs", "3"])
        assert done.exit_code == 0, done.output
        path = tmp_path / "printed.toml"
        path.write_text(done.stdout)
        assert printed(*command, "--config", str(path)) == tomllib.loads(done.stdout)
        assert tomllib.loads(done.stdout)["args"] == ["--epochs", "3"]
        for one in config_file.declared(function).values():
            assert f"{one.key} = " in done.stdout
        everything = "\n".join(line.removeprefix("# ") for line in done.stdout.splitlines() if " = " in line)
        path.write_text("\n".join(line for line in everything.splitlines() if not line.startswith("tls")))
        config_file.values(path, " ".join(command))  # comments are right, too
