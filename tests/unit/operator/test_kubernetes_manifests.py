"""Manifests under deploy/kubernetes, and those that the operator makes: rendered, and validated without a cluster."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from bagua.operator import crd, objects, pods
from bagua.operator.facts import Seen
from bagua.operator.job import parse
from bagua.operator.settings import Settings

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
VERSION = "1.31"
OURS = ("BaguaJob", "ServiceMonitor", "ClusterIssuer", "Certificate", "PodGroup")
"""Kinds of other definitions, which the validator does not know."""
RUN = {"script": "train.py", "secretEnv": [{"name": "HF_TOKEN", "secretName": "hf", "key": "token"}]}

SPEC = parse({"image": "b:1", "run": RUN, "replicas": 2, "elastic": {"maxReplicas": 4}})
BODY = {"metadata": {"name": "j", "namespace": "n", "uid": "u"}, "spec": {}}
SEEN = Seen(BODY, api_groups=frozenset({pods.KUEUE}))


def validate(manifest):
    """Raises where a field is unknown or has another type."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    if manifest["kind"] not in OURS:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def rendered(overlay):
    """The output of `kubectl kustomize`."""
    program = (
        [shutil.which("kubectl"), "kustomize"] if shutil.which("kubectl") else [shutil.which("kustomize"), "build"]
    )
    if program[0] is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    done = subprocess.run([*program, str(FOLDER / "overlays" / overlay)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def test_the_definition_is_fresh():
    held = yaml.safe_load((FOLDER / "crd" / "baguajobs.yaml").read_text())
    assert held == crd.definition(), "run `python -m bagua.operator.crd > deploy/kubernetes/crd/baguajobs.yaml`"
    validate(held)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid(overlay):
    found = rendered(overlay)
    assert {"CustomResourceDefinition", "Deployment", "ClusterRole"} <= {one["kind"] for one in found}
    for one in found:
        validate(one)
        if one["kind"] == "BaguaJob":
            parse(one["spec"])
        if one["kind"] in ("Deployment", "StatefulSet"):
            pod = one["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"]
            assert all(part["securityContext"]["readOnlyRootFilesystem"] for part in pod["containers"])


def test_the_operator_makes_valid_objects():
    made = objects.infrastructure(SEEN, SPEC, "mark", True)
    made += [objects.certificate(SEEN, Settings(issuer="ClusterIssuer/bagua"))]
    made += [pods.pod(SEEN, SPEC, 0, 0, True), objects.volcano_group(SEEN, SPEC)]
    kinds = {"Pod", "StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget", "PersistentVolumeClaim"}
    assert kinds <= {one["kind"] for one in made}
    for one in made:
        validate(one)


RULES = [
    ({}, {}, True),
    ({"replicas": 3}, {}, True),
    ({"elastic": None, "replicas": 3}, {"elastic": None}, False),
    ({"elastic": None}, {}, False),
    ({"replicas": 5}, {}, False),
    ({"nprocPerNode": 2}, {}, False),
    ({"run": {"script": "other.py"}}, {}, False),
    ({"run": {"script": "a", "module": "b"}}, {"run": {"script": "a", "module": "b"}}, False),
    ({"run": {"args": []}}, {"run": {"args": []}}, False),
    ({"elastic": {"minReplicas": 3, "maxReplicas": 2}}, {"elastic": {"minReplicas": 3, "maxReplicas": 2}}, False),
    ({"runPolicy": {"suspendMode": "Pause"}}, {}, True),
    ({"elastic": None, "runPolicy": {"suspendMode": "Pause"}}, {"elastic": None}, False),
]


@pytest.mark.parametrize(("new", "former", "fine"), RULES)
def test_cel_rules(new, former, fine):
    """Of the API server from Kubernetes 1.25 on; here by another implementation of the language."""
    celpy = pytest.importorskip("celpy")

    def spec(changes):
        base = {"image": "b", "replicas": 2, "nprocPerNode": 1, "run": {"script": "t.py"}}
        base |= {"elastic": {"minReplicas": 1, "maxReplicas": 4}, "runPolicy": {"suspendMode": "Release"}, **changes}
        return {key: value for key, value in base.items() if value is not None}

    assert all(holds(celpy, place, spec(new), spec(former)) for place in crd.RULES) == fine


def holds(celpy, place, new, former):
    """Whether all rules of one place hold; where there is nothing there are none."""
    for name in place:
        new, former = new.get(name), former.get(name)
    if new is None:
        return True
    environment = celpy.Environment()
    for rule, _ in crd.RULES[place]:
        if "oldSelf" in rule and former is None:
            continue
        program = environment.program(environment.compile(rule))
        given = {"self": celpy.json_to_cel(new), "oldSelf": celpy.json_to_cel(former or {})}
        if not program.evaluate(given):
            return False
    return True
