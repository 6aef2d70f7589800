"""What is checked on the command line before anything is started."""

from pathlib import Path

import pytest

from bagua.cli import options
from bagua.cli.options import UsageError
from bagua.cli.run import check_script, default_name


def test_variables() -> None:
    assert options.parse_env(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
    assert options.parse_env(None) == {}
    for broken in ("A", "=1", ""):
        with pytest.raises(UsageError, match="NAME=VALUE"):
            options.parse_env([broken])


def test_algorithm_becomes_a_variable() -> None:
    assert options.job_env(["A=1"], "") == {"A": "1"}
    assert options.job_env(None, "bytegrad:average=false") == {"BAGUA_ALGORITHM": "bytegrad:average=false"}
    for broken, words in (("bytegard", "Known:"), ("bytegrad:average", "key=value")):
        with pytest.raises(UsageError, match=words):
            options.job_env(None, broken)


def test_names() -> None:
    assert default_name("/somewhere/train.py", module=False) == "train"
    assert default_name("bagua.examples.digits", module=True) == "digits"


def test_scripts(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    check_script("a.py", tmp_path)
    check_script(str(tmp_path / "a.py"), Path("/"))
    with pytest.raises(UsageError, match=r"b\.py does not exist"):
        check_script("b.py", tmp_path)
    with pytest.raises(UsageError, match="__main__"):
        check_script(".", tmp_path)
    (tmp_path / "__main__.py").touch()
    check_script(".", tmp_path)


def test_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert options.resolve_workdir(None) == tmp_path
    with pytest.raises(UsageError, match="no such folder"):
        options.resolve_workdir(Path("nosuch"))
