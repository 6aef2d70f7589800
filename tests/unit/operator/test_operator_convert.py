"""Manifests of the original's kind Bagua become BaguaJobs."""

from __future__ import annotations

from bagua.operator.convert import convert
from bagua.operator.job import parse


def old(command, roles=None, **spec):
    """A manifest as the original's samples are."""
    template = {"spec": {"hostNetwork": True, "containers": [{"name": "bagua", "image": "i:1", "command": command}]}}
    given = roles or {"master": {"replicas": 1, "template": template}, "worker": {"replicas": 2, "template": template}}
    given = {name: {"template": template, **role} for name, role in given.items()}
    metadata = {"name": "sample", "namespace": "bagua", "resourceVersion": "12"}
    return {
        "apiVersion": "bagua.kuaishou.com/v1alpha1",
        "kind": "Bagua",
        "metadata": metadata,
        "spec": {"replicaSpecs": given, **spec},
    }


def test_a_static_job():
    command = [
        "python",
        "-m",
        "bagua.distributed.launch",
        "--nproc_per_node=4",
        "--nnodes",
        "3",
        "/work/train.py",
        "--lr",
        "1",
    ]
    made, notes = convert(old(command, enableElastic=False))
    assert made["apiVersion"] == "bagua.dev/v1" and made["metadata"] == {"name": "sample", "namespace": "bagua"}
    assert made["spec"] == {
        "image": "i:1",
        "replicas": 3,
        "nprocPerNode": 4,
        "run": {"script": "/work/train.py", "args": ["--lr", "1"], "env": []},
    }
    assert any("hostNetwork" in note for note in notes)


def test_an_elastic_job_needs_no_etcd():
    command = [
        "bash",
        "-c",
        "python -m bagua.distributed.run --nnodes=1:5 --nproc_per_node 2 --rdzv_backend=etcd -m my.train",
    ]
    roles = {"etcd": {"replicas": 1}, "worker": {"replicas": 3, "restartPolicy": "ExitCode"}}
    policy = {"ttlSecondsAfterFinished": 60, "cleanPodPolicy": "None", "backoffLimit": 2}
    policy["schedulingPolicy"] = {"queue": "q", "minAvailable": 2}
    made, notes = convert(old(command, roles, enableElastic=True, minReplicas=1, maxReplicas=5, runPolicy=policy))
    spec = parse(made["spec"])
    assert spec.elastic and (spec.minimum, spec.wanted, spec.maximum) == (1, 3, 5)
    assert spec.run.module == "my.train" and spec.nproc_per_node == 2
    new, _ = convert(old(["python", "-m", "bagua.distributed.launch", "--nproc_per_node=gpu", "t.py"]))
    assert new["spec"]["nprocPerNode"] == "auto"
    assert spec.run_policy.restart_policy == "ExitCode" and spec.run_policy.backoff_limit == 2
    assert spec.run_policy.scheduling_policy.queue == "q"
    assert any("etcd" in note for note in notes) and any("minAvailable" in note for note in notes)


def test_what_belongs_to_the_pod_goes_into_the_template():
    one = old(["python", "train.py"])
    container = one["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]
    container |= {"env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {}}}]}
    container |= {
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "resources": {"limits": {"nvidia.com/gpu": 2}},
    }
    one["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["volumes"] = [{"name": "data", "emptyDir": {}}]
    made, _ = convert(one)
    assert made["spec"]["run"]["env"] == [{"name": "A", "value": "1"}]
    assert made["spec"]["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    [daemon] = made["spec"]["template"]["spec"]["containers"]
    assert daemon["name"] == "daemon" and daemon["env"][0]["name"] == "B" and daemon["volumeMounts"]
    assert made["spec"]["template"]["spec"]["volumes"] == [{"name": "data", "emptyDir": {}}]
