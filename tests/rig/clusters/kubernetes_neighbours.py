"""A neighbour of the operator: definitions of cert-manager with the fields that it writes.

Nothing is behind them. The API server prunes every other field, so what comes back is what such a cluster would store.
"""

STRING, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
ISSUER = {"type": "object", "required": ["name"], "properties": {"group": STRING, "kind": STRING, "name": STRING}}


def definition(group, version, kind, scope="Namespaced", **fields):
    """A CustomResourceDefinition whose ``spec`` has these fields."""
    plural = f"{kind.lower()}s"
    spec = {"type": "object", "properties": fields}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }


KEY = {"algorithm": STRING, "size": {"type": "integer"}, "encoding": STRING, "rotationPolicy": STRING}
NEIGHBOURS = [
    definition(
        *("cert-manager.io", "v1", "Certificate"),
        isCA={"type": "boolean"},
        secretName=STRING,
        commonName=STRING,
        duration=STRING,
        dnsNames=TEXTS,
        ipAddresses=TEXTS,
        usages=TEXTS,
        privateKey={"type": "object", "properties": KEY},
        issuerRef=ISSUER,
    ),
    definition(
        *("cert-manager.io", "v1", "ClusterIssuer", "Cluster"),
        selfSigned={"type": "object"},
        ca={"type": "object", "properties": {"secretName": STRING}},
    ),
]
