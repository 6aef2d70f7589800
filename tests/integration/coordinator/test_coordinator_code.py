"""Code that is shipped, through a real coordinator: from a client's folder to the stream of a node."""

import pytest

from bagua.base.code_archive import pieces_of
from bagua.base.errors import ConfigError, InvalidRequestError
from bagua.client import pack
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n


def test_from_a_folder_to_a_node(coordinator, client, connect, tmp_path):
    peer = connect(coordinator, "a")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    packed = pack(folder)
    data = b"".join(packed.parts(1 << 20))
    job = client.submit(script="train.py", working_dir=folder, nproc_per_node=2, args=["--x"], name="shipped")
    assert job.spec.code == packed.archive and job.spec.workdir == "" and job.spec.name == "shipped"
    run = peer.expect(n.RunJob)
    assert run.spec.code == packed.archive
    got = b""
    for piece in range(pieces_of(packed.archive.bytes)):
        question = n.CodeQuestion(request_id=7 + piece, job_id=job.job_id, piece=piece)
        peer.send(n.NodeFact(code=question))
        answer = peer.expect(n.CodeAnswer)
        assert (answer.request_id, answer.error) == (7 + piece, "")
        got += answer.data
    assert got == data
    peer.send(n.NodeFact(code=n.CodeQuestion(request_id=9, job_id="job-of-another", piece=0)))
    assert "no archive of code" in peer.expect(n.CodeAnswer).error
    client.put_code(packed)  # it is there
    client.cancel(job.job_id)


def test_what_is_refused(client, tmp_path):
    digest = "0" * 64
    for code, workdir, words in (
        (c.CodeArchive(digest=digest, bytes=5), "", "upload it before"),
        (c.CodeArchive(digest="x", bytes=5), "", "no SHA-256"),
        (c.CodeArchive(digest=digest, bytes=5), "../x", "leads out"),
        (c.CodeArchive(digest=digest, bytes=5), "/x", "leads out"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            client.submit(c.JobSpec(entry="t.py", nnodes=1, nproc_per_node=1, code=code, workdir=workdir))
    (tmp_path / "a.py").touch()
    for arguments, words in (
        ({"script": "absent.py", "working_dir": tmp_path}, "does not exist in the working directory"),
        ({"script": "a.py", "working_dir": tmp_path / "absent"}, "does not exist"),
        ({"script": " "}, "name of the script is missing"),
        ({"script": "a.py", "nnodes": 0}, "nnodes is 0"),
        ({"script": "a.py", "nproc_per_node": "2"}, "whole number"),
        ({"script": "a.py", "args": "--x"}, "a list of texts"),
        ({"script": "a.py", "respawn": 1}, "elastic=True"),
        ({"script": "a.py", "module": True, "no_python": True}, "not both"),
        ({"script": "a.py", "algorithm": "bytegard"}, "Known:"),
    ):
        with pytest.raises(ConfigError, match=words):
            client.submit(**arguments)
    with pytest.raises(TypeError, match="not both"):
        client.submit(c.JobSpec(entry="t.py"), script="t.py")
    with pytest.raises(TypeError, match="nodes"):
        client.submit(script="t.py", nodes=2)
