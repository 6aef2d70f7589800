"""The wire version goes up when something changes that ranks, daemons and hosts of a job say to each other.

Beside the number lie digests of what defines that, comments, layout, docstrings and words for people aside. After a
change: raise the number in ``csrc/wire_version.py``, or see that others would still read the same, and then
``python tests/unit/csrc/test_wire_version.py`` records the new digests.
"""

import ast
import hashlib
import json
import re
from pathlib import Path

from bagua.csrc.wire_version import WIRE_VERSION

ROOT = Path(__file__).resolve().parents[3]
RECORD = Path(__file__).with_name("wire_formats.json")
NATIVE = {
    "shared memory": ("channel/layout.h", "channel/meeting.h", "kernel/reduce.h"),
    "messages of a rank and its daemon": ("channel/protocol.h", "../../proto/rank.proto"),
    "handshake of hosts": ("transport/handshake.h", "transport/handshake.cpp"),
    "frames of hosts": ("transport/frame.h", "transport/seal.h", "transport/seal.cpp"),
    "control messages of hosts": ("engine/remote/control.h", "engine/remote/control.cpp"),
    "codecs": ("codec/*.h", "codec/*.cpp"),
    "Bagua-Net": ("../nccl_net/wire.h",),  # which has a number of its own, for it works without jobs
    "ways of collectives": ("collective/*.h", "collective/*.cpp"),
}
DECLARED = ("handshake of hosts", "frames of hosts")
"""Parts of which structures and labels count, and not the code that moves them."""
RANKS = ("client/torch_api", "client/c10d")
EXCHANGES = frozenset(
    "gather_rows gather_texts _gather_bytes transfer exchange_bytes broadcast_json raise_together send_flags largest "
    "broadcast_tensors _broadcast_known publish".split()
)
CONTENTS = re.compile(r"tell|tell_\w+|hear|describe|_key|senders_of|call_the_roll")
ROOMS = ("comm", "data", "train")
"""Functions of these rooms by which ranks make and read messages."""

_CPP = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


def plain_native(text):
    """Code without comments, layout, and literals with words for people."""
    kept = _CPP.sub(lambda found: found[0] if found[0][0] == '"' and " " not in found[0] else " ", text)
    return " ".join(re.findall(r"\w+|[^\w\s]", kept))


def declared(text):
    """The structures, enumerations and labels of native code."""
    blocks = re.findall(r"\b(?:struct|enum)\b[^;(){}]*\{(?:[^{}]|\{[^{}]*\})*\}", plain_native(text))
    labels = [found for found in _CPP.findall(text) if re.fullmatch(r'"[\w-]+"', found)]
    return " ".join(blocks + labels)


class _Plain(ast.NodeTransformer):
    """Drops docstrings, and literals with words for people."""

    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Constant(self, node):
        return ast.Constant("") if isinstance(node.value, str) and " " in node.value else node

    def visit_JoinedStr(self, node):
        return ast.Constant("")


def plain_python(node):
    return ast.unparse(_Plain().visit(node))


def exchanging(tree, contents=True):
    """What ranks send to each other, and how: functions that exchange something, that make or read messages, and the
    tuples and layouts that these consist of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
            names = {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in calls}
            if names & EXCHANGES or (contents and CONTENTS.fullmatch(node.name)):
                yield node
        elif (
            contents
            and isinstance(node, ast.ClassDef)
            and any(getattr(base, "id", "") == "NamedTuple" for base in node.bases)
        ):
            yield node
        elif isinstance(node, ast.Assign) and "struct.Struct" in ast.unparse(node):
            yield node


def definitions():
    """The text that defines each part."""
    found = {}
    for part, patterns in NATIVE.items():
        files = [path for pattern in patterns for path in sorted((ROOT / "csrc" / "core").glob(pattern))]
        assert len(files) >= len(patterns), part
        plain = declared if part in DECLARED else plain_native
        found[part] = "\n".join(plain(path.read_text()) for path in files)
    for folder in RANKS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            nodes = exchanging(ast.parse(path.read_text()), contents=not {*ROOMS}.isdisjoint(path.parts))
            if texts := [plain_python(node) for node in nodes]:
                found[f"messages of ranks in {path.relative_to(ROOT / 'client')}"] = "\n".join(sorted(texts))
    return found


def digests(found):
    return {part: hashlib.sha256(text.encode()).hexdigest()[:12] for part, text in found.items()}


def test_a_change_of_what_is_said_has_a_number():
    recorded, now = json.loads(RECORD.read_text()), digests(definitions())
    changed = [part for part in {**recorded["parts"], **now} if recorded["parts"].get(part) != now.get(part)]
    assert recorded["wire_version"] == WIRE_VERSION, f"record what version {WIRE_VERSION} says: {__doc__}"
    assert not changed, f"{', '.join(changed)}: {__doc__}"


if __name__ == "__main__":
    RECORD.write_text(json.dumps({"wire_version": WIRE_VERSION, "parts": digests(definitions())}, indent=2) + "\n")
