"""``python -m bagua.operator.crd``: prints the CustomResourceDefinition, which ``deploy/kubernetes/crd`` holds."""

from __future__ import annotations

from typing import Any

from bagua.operator import schemas
from bagua.operator.job import GROUP, KIND, PLURAL, VERSION, Spec

# CEL rules by the place that they are about. ``job.parse`` checks those that need no former state, too.
RULES = {
    (): [
        ("has(self.elastic) || self.replicas == oldSelf.replicas", "replicas: only an elastic job can be scaled"),
        ("has(self.elastic) == has(oldSelf.elastic)", "elastic: a job stays elastic, or static"),
        ("self.run == oldSelf.run", "run: make another BaguaJob for another program"),
        ("self.nprocPerNode == oldSelf.nprocPerNode", "nprocPerNode can't be changed"),
        (
            "!has(self.elastic) || self.replicas >= self.elastic.minReplicas",
            "replicas must be at least elastic.minReplicas",
        ),
        (
            "!has(self.elastic) || self.elastic.maxReplicas == 0 || self.replicas <= self.elastic.maxReplicas",
            "replicas must be at most elastic.maxReplicas",
        ),
        (
            "has(self.elastic) || self.runPolicy.suspendMode == 'Release'",
            "runPolicy.suspendMode: only an elastic job can be paused",
        ),
    ],
    ("elastic",): [
        ("self.maxReplicas == 0 || self.maxReplicas >= self.minReplicas", "maxReplicas is less than minReplicas"),
        ("self == oldSelf", "elastic: limits can't be changed"),
    ],
    ("run",): [
        (
            " + ".join(f"(has(self.{name}) && self.{name} != '' ? 1 : 0)" for name in ("script", "module", "program"))
            + " == 1",
            "give exactly one of script, module and program",
        ),
    ],
}

COLUMNS = [  # name, type, place, priority: 1 is shown by `kubectl get -o wide` alone
    ("Phase", "string", ".status.phase", 0),
    ("Pods", "string", ".status.pods", 0),
    ("Step", "integer", ".status.step", 0),
    ("Restarts", "integer", ".status.failures", 1),
    ("Reason", "string", ".status.message", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
]


def definition() -> dict[str, Any]:
    """Makes the CustomResourceDefinition."""
    schema = {
        "type": "object",
        "description": "A training job of Bagua: node daemons as pods, and a coordinator of its own.",
        "required": ["spec"],
        "properties": {
            "metadata": {"type": "object", "properties": {"name": schemas.NAME}},
            "spec": spec_schema(),
            "status": _STATUS,
        },
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority}
            for name, kind, path, priority in COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["bg"],
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def spec_schema() -> dict[str, Any]:
    """The structural schema of ``spec``, with its CEL rules."""
    whole = Spec.model_json_schema(by_alias=True)
    found = _structural(whole, whole.get("$defs", {}))
    for place, rules in RULES.items():
        target = found
        for name in place:
            target = target["properties"][name]
        target["x-kubernetes-validations"] = [{"rule": rule, "message": message} for rule, message in rules]
    return found


def _structural(schema: dict[str, Any], definitions: dict[str, Any], optional: bool = False) -> dict[str, Any]:
    """A schema of pydantic without references, titles and nulls, as Kubernetes wants it. ``optional``: nothing stands
    for it where it is not given."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):  # of Kubernetes
        words = {"description": " ".join(schema["description"].split())} if "description" in schema else {}
        return {**{key: value for key, value in schema.items() if key not in ("title", "default")}, **words}
    if "$ref" in schema:
        kept = {key: value for key, value in schema.items() if key in ("default", "description")}
        schema = {**definitions[schema["$ref"].rpartition("/")[2]], **kept}
    if "anyOf" in schema:  # an optional field
        # Structural schemas know no union with null.
        [one] = [part for part in schema["anyOf"] if part.get("type") != "null"]
        schema = {**one, **{key: value for key, value in schema.items() if key not in ("anyOf", "default")}}
        return _structural(schema, definitions, True)
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: _structural(part, definitions) for name, part in value.items()}
        elif key == "items":
            found[key] = _structural(value, definitions)
        elif key == "description":
            found[key] = " ".join(value.split())
        elif key not in ("title", "$defs", "additionalProperties") and (key != "default" or value != ""):
            found[key] = value
    parts = found.get("properties", {})
    if parts and not found.get("required") and not optional:
        found["default"] = {}  # the API server fills in the defaults of its fields
    return found


def _fields(**described: str) -> dict[str, Any]:
    """Schemas of fields: each has its type or format, and after a colon its description."""
    found: dict[str, Any] = {}
    for name, text in described.items():
        kind, _, words = text.partition(": ")
        schema = {"type": "string", "format": kind} if kind == "date-time" else {"type": kind}
        found[name] = {**schema, "description": words} if words else schema
    return found


_CONDITION = {
    "type": "object",
    "required": ["type", "status"],
    "properties": {
        **_fields(type="string", status="string", reason="string", message="string"),
        **_fields(lastTransitionTime="date-time", lastUpdateTime="date-time: When reason or message changed last."),
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
    },
}
_STATUS = {
    "type": "object",
    "description": "Written by the operator.",
    "properties": {
        **_fields(
            phase="string: Pending, Starting, Running, Stopping, Suspended, Restarting, Succeeded, Failed",
            message="string: Why, in words.",
            pods="string: Pods in the job, or that have succeeded / pods wanted.",
            replicas="integer: Pods of node daemons.",
            selector="string: Selects the pods of node daemons.",
            jobId="string: Id of the present attempt at the coordinator.",
            attempt="integer: Counts submissions, from 0.",
            failures="integer: Attempts that failed.",
            step="integer: The last training step that was reported.",
            startTime="date-time",
            completionTime="date-time",
            gangSince="date-time: Pods wait for being complete since then.",
            retryTime="date-time: Nothing is tried before.",
            observedGeneration="integer",
        ),
        "replicaStatuses": {
            "type": "object",
            "description": "Pods, in the words of Kubeflow. All are of the kind Worker.",
            "properties": {
                "Worker": {
                    "type": "object",
                    "properties": _fields(active="integer", succeeded="integer", failed="integer"),
                }
            },
        },
        "conditions": {
            "type": "array",
            "items": _CONDITION,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    },
}


def main() -> None:
    """Prints the CustomResourceDefinition as YAML."""
    import yaml

    print("# Made by `python -m bagua.operator.crd`: change deploy/kubernetes/operator/job.py instead.")
    print(yaml.safe_dump(definition(), sort_keys=False, width=120), end="")


if __name__ == "__main__":
    main()
