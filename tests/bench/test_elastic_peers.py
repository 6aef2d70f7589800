"""The comparison with other elastic systems: how it judges, and (--full) that it runs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.elastic_peers import Cell, Found, Results, Step, goes_on, judge, show, texts
from tests.bench.elastic_systems import FAULTS, Struck

HERE = Path(__file__).parent


def steps(*times: float, first: int = 1, tried: int = 0, ranks: int = 2) -> list[Step]:
    return [Step(at, first + index, ranks, first + index + tried) for index, at in enumerate(times)]


def killed(*victims: int, at: float = 3.5, ranks: int = 1) -> Struck:
    return Struck(at, frozenset(victims), ranks)


def write(folder: Path, pid: int, lines: list[Step]) -> None:
    text = "".join(f"{step.at * 1e9:.0f} {step.number} {step.ranks} {step.tried}\n" for step in lines)
    (folder / f"steps-{pid}").write_text(text)


def test_a_pause_is_between_new_steps_of_those_that_are_left() -> None:
    left = steps(1, 2, 3) + steps(6, 7, first=4, tried=1)
    found = judge({10: left, 11: steps(1, 2, 3)}, killed(11))
    assert found == Found(pause_s=2, step_s=1, in_vain=1)


def test_steps_that_are_done_again_are_not_new() -> None:
    before = {10: steps(1, 2, 3), 11: steps(1, 2, 3)}
    again = {12: steps(8, 9, 10, 11, first=2), 13: steps(8, 9, 10, 11, first=2)}
    found = judge(before | again, killed(11))
    assert found == Found(pause_s=6, step_s=1, in_vain=2), "steps 2 and 3 were done twice; step 4 came at 10"


def test_a_number_taken_over_before_the_fault_is_nothing_in_vain() -> None:
    left = steps(1, 2) + steps(3, first=5) + steps(4, 5, first=6, tried=-2)
    left[2] = Step(3, 5, 2, 3)
    assert judge({10: left, 11: steps(1, 2, 3)}, killed(11)).in_vain == 0


def test_a_newcomer_is_no_restart() -> None:
    survivors = {pid: steps(1, 2, 3, 4) + steps(7, 8, first=5, ranks=3) for pid in (10, 11)}
    found = judge(survivors | {12: steps(7, 8, first=5, ranks=3)}, killed())
    assert found == Found(pause_s=2, step_s=1, in_vain=0)


def test_who_joins_is_waited_for(tmp_path: Path) -> None:
    me, struck = os.getpid(), killed(at=3.5, ranks=2)
    write(tmp_path, me, steps(1, 2, 3, 4, 5, 6, 7, 8, 9, ranks=1))
    write(tmp_path, os.getppid(), [])
    assert not goes_on(tmp_path, struck), "it trains, but alone"
    for pid in (me, os.getppid()):
        write(tmp_path, pid, steps(1, 2, 3, ranks=1) + steps(4, 5, 6, 7, 8, first=4, ranks=2))
    assert goes_on(tmp_path, struck)


def test_steps_that_are_done_again_are_not_waited_for(tmp_path: Path) -> None:
    """Those that are left may train for long until they are started again, when one joins."""
    ended, struck = 2**22 + 1, killed(at=3.5)
    write(tmp_path, ended, steps(*range(1, 11)))
    write(tmp_path, os.getpid(), steps(*range(20, 30), first=4))
    assert not goes_on(tmp_path, struck), "ten steps were done before, and it is at the thirteenth"
    write(tmp_path, os.getpid(), steps(*range(20, 32), first=4))
    assert goes_on(tmp_path, struck)


def test_a_system_that_did_not_go_on_has_a_row() -> None:
    cell = Cell("silent", "torchrun", 1800.0, [], ["not within 120 s"])
    assert texts(cell) == ("-", "-", "1800 s", "-", "-", "0 of 1")
    cell.found.append(Found(pause_s=2, step_s=1, in_vain=0))
    assert texts(cell)[0] == "2.00 s" and texts(cell)[-1] == "1 of 2"


def test_the_page_gets_its_table_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [Cell("host", "bagua", None, [Found(pause_s=0.2, step_s=0.1, in_vain=0)], [])]
    options = argparse.Namespace(output="markdown", hosts=3, ranks=4, megabytes=100)
    show(options, Results(cells, {"torchft": "not installed"}, [1.0, 2.0, 3.0]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "|---" * 8 + "|"
    fault = "SIGKILL of 1 of 3 hosts with one rank each"
    assert lines[2] == f"| {fault} | bagua | 0.20 s | 0.20 s |  | 0.10 s | 0.0 | 1 of 1 |"
    assert lines[-2:] == ["torchft: not installed", "load of the machine before a start: median 2.0, most 3.0"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_comparison_runs(tmp_path: Path) -> None:
    size = ("--ranks", "2", "--hosts", "2", "--megabytes", "4", "--rounds", "1", "--steps", "3")
    systems = ("--systems", "bagua,torchrun-5s,torchft", "--log", str(tmp_path / "log"))
    command = (sys.executable, "-P", str(HERE / "elastic_peers.py"), *size, *systems, "--output", "json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    cells = {(cell["fault"], cell["system"]): cell for cell in document["cells"]}
    assert all(cells[fault, "bagua"]["found"][0]["in_vain"] == 0 for fault in FAULTS)
    assert all((fault, "torchrun-5s") in cells for fault in FAULTS)
    if "torchft" in document["missing"]:
        pytest.skip(f"bagua and torchrun ran; torchft: {document['missing']['torchft']}")
