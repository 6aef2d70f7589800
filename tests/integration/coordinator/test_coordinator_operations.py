"""Maintenance beside a real coordinator, where something is wrong (e2e/pages/test_pages.py: where all is well)."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import grpc
import pytest

from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

SPEC = c.JobSpec(entry="t.py", nnodes=1, nproc_per_node=1, placement_timeout_s=3600.0)


@pytest.fixture
def shell(tmp_path, coordinator):
    """Runs a line as an operator would, where the coordinator's state folder is the usual one."""
    shims = tmp_path / "bin"
    shims.mkdir()
    (shims / "bagua").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m bagua.cli.main "$@"\n')
    (shims / "bagua").chmod(0o755)
    env = {**os.environ, "PATH": f"{shims}:{os.environ['PATH']}", "BAGUA_STATE_DIR": str(coordinator.state_dir)}

    def run(line):
        return subprocess.run(line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)

    return run


def test_a_check_that_finds_something_ends_with_1(shell, coordinator, client, tmp_path):
    job_id = client.submit(SPEC).job_id
    assert shell("bagua coordinator backup b.db").returncode == 0
    with closing(sqlite3.connect(tmp_path / "b.db")) as database:
        database.execute("UPDATE jobs SET state = 42")
        database.commit()
    done = shell("bagua coordinator check b.db")
    assert done.returncode == 1 and f"problem: job {job_id} is in state 42" in done.stdout


def test_a_daemon_that_is_too_new_is_refused_with_the_order_of_upgrades(shared, connect):
    hello = n.Hello(
        node_id="a", address="127.0.0.1", boot_id="b", slots=1, version="9.1", protocol=90, oldest_protocol=89
    )
    peer = connect(shared, "a", welcome=False, hello=n.NodeFact(hello=hello))
    with pytest.raises(grpc.RpcError) as error:
        peer.next()
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "The daemon on node a has bagua 9.1 (protocol 90, from 89 on), which is too new" in error.value.details()
