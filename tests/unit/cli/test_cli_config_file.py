"""Options from a file: ``--config``, and the file that ``--print-config`` writes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bagua.base.errors import UsageError
from bagua.cli import config_file, run
from bagua.cli.app import app
from bagua.cli.job import submit as job


def taken(folder: Path, text: str, command: str = "run") -> dict[str, Any]:
    path = folder / "job.toml"
    path.write_text(text)
    return config_file.values(path, command)


def printed(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--print-config"])
    assert done.exit_code == 0, done.output
    return tomllib.loads(done.stdout)


def test_keys_are_those_of_the_commands(tmp_path: Path) -> None:
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


def test_a_file_serves_both_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "max-restarts = 2\nplacement-timeout = 5\nname = 'n'"
    assert taken(tmp_path, text) == {"max_restarts": 2, "name": "n"}
    assert "placement-timeout (of `bagua job submit`) has no meaning for `bagua run`" in capsys.readouterr().err
    assert taken(tmp_path, text, "job submit") == {"placement_timeout": 5, "name": "n"}
    assert "max-restarts (of `bagua run`)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words",
    [
        ("nproc-per-nod = 2", "Do you mean nproc-per-node?"),
        ("adopt = true", "no option 'adopt'"),
        ("config = 'x'", "no option 'config'"),
        ("Name = 'x'", "no option 'Name'"),
        ("name = 3", "name is 3: it must be a text"),
        ("elastic = 'yes'", 'elastic is "yes": it must be true or false'),
        ("elastic = 1", "true or false"),
        ("respawn = true", "respawn is true: it must be a whole number"),
        ("respawn = -1", "respawn is -1: it must be from 0 to 1000"),
        ("placement-timeout = -0.5", "at least 0"),
        ("placement-timeout = 'soon'", "a number"),
        ("nproc-per-node = 0", "nproc-per-node: '0' is neither a number"),
        ("nproc-per-node = 1.5", "a whole number"),
        ("nnodes = '3:1'", "Write 1:3"),
        ("env = 'A=1'", "a list of texts, or a table of texts"),
        ("args = [1]", "a list of texts"),
        ("only-rank = ['0']", "a list of whole numbers"),
        ("[env]\nA = 1", "a list of texts, or a table of texts"),
        ("output = 'yaml'", "one of text, json"),
        ("log_dir = 'a'\nlog-dir = 'b'", "there twice"),
        ("name = ", "is no TOML"),
        ('[env]\n"A=B" = "c"', "'A=B' can't be the name of a variable"),
        ('[env]\n"" = "c"', "'' can't be the name of a variable"),
        ("args = " + 3000 * "[", "too many brackets"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=r"--config .*job\.toml") as refused:
        taken(tmp_path, text)
    assert words in str(refused.value)


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        config_file.values(tmp_path / "absent.toml", "run")
    (tmp_path / "large.toml").write_bytes(b"#" * (config_file.MAX_BYTES + 1))
    with pytest.raises(UsageError, match="no file of options"):
        config_file.values(tmp_path / "large.toml", "run")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="no TOML"):
        config_file.values(tmp_path / "binary.toml", "run")


def test_a_mark_of_byte_order_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "marked.toml").write_bytes("\ufeffname = 'x'".encode())
    assert config_file.values(tmp_path / "marked.toml", "run") == {"name": "x"}


def test_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('script = "a.py"\nnproc-per-node = 2\nname = "file"\n[env]\nA = "1"\n')
    found = printed("run", "--config", str(path), "--name", "line")
    assert found == {"script": "a.py", "nproc-per-node": 2, "name": "line", "env": ["A=1"]}


def test_what_is_printed_can_be_read(tmp_path: Path) -> None:
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
