"""Schemas of what a BaguaJob hands on to Kubernetes, as far as the operator reads it or a schema can refuse it. They
stand in the CustomResourceDefinition, and ``misfit`` checks by them where an older definition is installed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Schema = dict[str, Any]
OPEN: Schema = {"x-kubernetes-preserve-unknown-fields": True}
TYPES = {"object": dict, "array": list, "string": str}
NAMED = {"object": "an object", "array": "a list", "string": "a text"}


def _object(required: Iterable[str] = (), **properties: Schema) -> Schema:
    """An object with fields of these schemas, and with any others."""
    made: Schema = {"type": "object", **OPEN}
    if properties:
        made["properties"] = properties
    if required:
        made["required"] = list(required)
    return made


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


TEXT: Schema = {"type": "string"}
LABEL: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
# Manifests may have amounts as numbers, too.
AMOUNT: Schema = {
    **OPEN,
    "minimum": 0,
    "pattern": r"^\+?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?$",
}
RESOURCES = _object(requests=_map(AMOUNT), limits=_map(AMOUNT))
_CONTAINER = _object(
    ["name"],
    name=LABEL,
    image=TEXT,
    command=_list(TEXT),
    args=_list(TEXT),
    env=_list(_object(["name"], name=TEXT, value=TEXT)),
    envFrom=_list(_object()),
    volumeMounts=_list(_object(["name", "mountPath"], name=TEXT, mountPath=TEXT)),
    resources=RESOURCES,
    securityContext=_object(),
)
TEMPLATE = _object(
    metadata=_object(labels=_map(TEXT), annotations=_map(TEXT)),
    spec=_object(
        containers=_list(_CONTAINER),
        initContainers=_list(_CONTAINER),
        volumes=_list(_object(["name"], name=LABEL)),
        securityContext=_object(),
        nodeSelector=_map(TEXT),
        tolerations=_list(_object()),
        imagePullSecrets=_list(_object()),
    ),
)
# The longest label of a job's objects is NAME-coordinator and a hash of 10 digits.
NAME: Schema = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 40}


def misfit(value: Any, schema: Schema, where: str) -> str:
    """Says in words where a value does not fit; empty: it does."""
    kind = schema.get("type")
    if kind and not isinstance(value, TYPES[kind]):
        return f"{where} is not {NAMED[kind]}"
    if isinstance(value, int | float) and value < schema.get("minimum", value):
        return f"{where}: {value} is less than {schema['minimum']}"
    # Not match: patterns of JSON Schema fit anywhere.
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return f"{where}: {value[:100]!r} does not fit {schema['pattern']}"
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        return f"{where} has {len(value)} letters, and {schema['maxLength']} are allowed"
    if isinstance(value, list) and "items" in schema:
        return next(filter(None, (misfit(one, schema["items"], f"{where}[{at}]") for at, one in enumerate(value))), "")
    if not isinstance(value, dict):
        return ""
    absent = [name for name in schema.get("required", ()) if name not in value]
    if absent:
        return f"{where} has no {absent[0]}"
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    found = (misfit(one, known.get(name, others), f"{where}.{name}") for name, one in value.items())
    return next(filter(None, found), "")
