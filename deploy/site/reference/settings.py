"""Settings of the coordinator and of the operator, from their classes and the comments there."""

from __future__ import annotations

import inspect
import re
from typing import Any

import man

from bagua.daemon.coordinator.admin.settings import Settings as Coordinator
from bagua.operator.settings import Settings as Operator
from reference.markdown import anchor, escaped, table

CLASSES: dict[str, Any] = {"the coordinator": Coordinator, "the operator of Kubernetes": Operator}
COMMANDS = {Coordinator: "bagua coordinator", Operator: "bagua operator"}


def variable(kind: Any, name: str) -> str:
    """The environment variable of a field."""
    return f"{kind.model_config['env_prefix']}{name.upper()}"


def page() -> str:
    """A table for each class."""
    parts = [
        "# Settings\n",
        "Each of them is an environment variable, and a line of the file that systemd reads. Many are options, too. "
        "Daemons have [options](command-line/bagua-daemon.md) with [variables](variables.md#of-options).\n",
    ]
    for title, kind in CLASSES.items():
        options = {option.name: option.help for option in man.commands()[COMMANDS[kind]].params}
        words = comments(kind) | {name: text for name, text in options.items() if text}
        rows = []
        for name, field in kind.model_fields.items():
            bounds = ", ".join(_bound(bound) for bound in field.metadata)
            mark = anchor(variable(kind, name).lower())
            rows.append([f"{mark}`{variable(kind, name)}`", _default(field), bounds, escaped(words.get(name, ""))])
        parts += [f"## Of {title}\n", table(("setting", "default", "bounds", "meaning"), rows)]
    return "\n".join(parts)


def _default(field: Any) -> str:
    if field.is_required() or field.default_factory or field.default in (None, "", ()):
        return ""
    return f"`{', '.join(field.default) if isinstance(field.default, tuple) else field.default}`"


def _bound(bound: Any) -> str:
    signs = {"gt": "over", "ge": "at least", "lt": "below", "le": "at most"}
    return " ".join(f"{word} {getattr(bound, name):g}" for name, word in signs.items() if hasattr(bound, name))


def comments(kind: Any) -> dict[str, str]:
    """Words about each field: a comment before it or behind it, or the string that follows."""
    found: dict[str, str] = {}
    before, last = "", ""
    for line in inspect.getsource(kind).splitlines():
        text = line.strip()
        if declared := re.match(r"(\w+): [^#]+?=[^#]*(?:#\s*(.+))?$", text):
            last = declared[1]
            found[last] = (declared[2] or before).strip()
            before = ""
        elif text.startswith("# "):
            before += text[1:]
        elif last and (string := re.fullmatch(r'"""(.+)"""', text)):
            found[last] = string[1]
        else:
            before, last = "", ""
    return found
