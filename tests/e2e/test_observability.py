"""The story of a job, and a bundle for support, from a service that runs."""

import json
import tarfile

SCRIPT = """
import sys
print("hello, api_key=planted-in-output", flush=True)
sys.exit("no more data")
"""


def test_a_job_is_explained_and_bundled_without_secrets(service):
    sandbox = service.sandbox
    script = sandbox.script("fails.py", SCRIPT)
    options = ("--env", "HF_TOKEN=planted-in-env", "--no-python")
    job_id = service.submit(*options, "python3", str(script), "--password", "planted-in-args")
    service.wait_for_state(job_id, ["failed"], within=60)

    page = service.call("job", "explain", job_id)
    assert page.code == 0 and page.out.startswith(f"Job {job_id} failed after ")
    assert "rank 0 on node" in page.out and "exited with code 1: no more data" in page.out.splitlines()[0]
    marked = service.json("job", "explain", job_id)["events"]
    assert {event["mark"] for event in marked} >= {"loss", "change", "end"}

    log = sandbox.folder / "service.log"
    log.write_text("connecting to postgresql://bagua:planted-in-log@db/bagua\n")
    target = sandbox.folder / "bundle.tar.gz"
    made = service.call("support-bundle", "-o", target, "--log", log, "--metrics", "http://127.0.0.1:9/metrics")
    assert made.code == 0, made.text
    with tarfile.open(target) as tar:
        found = {
            member.name.removeprefix("bagua-support/"): tar.extractfile(member).read() for member in tar.getmembers()
        }
    whole = b"\n".join(found.values())
    assert b"planted" not in whole and (sandbox.state / "token").read_bytes().strip() not in whole
    assert b"no more data" in found[f"jobs/{job_id}/explain.txt"] and b"hello" in found[f"jobs/{job_id}/log.txt"]
    assert {"versions.json", "settings.json", "doctor.json", "cluster/nodes.json", "logs/0-service.log"} <= found.keys()
    assert json.loads(found["schema.json"])["bagua.db"]
    notes = json.loads(found["manifest.json"])["notes"]
    assert list(notes) == ["metrics/0.txt"] and "refused" in notes["metrics/0.txt"]
    assert target.stat().st_size < 2 << 20
