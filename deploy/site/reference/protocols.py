"""Wire protocols, from the comments of proto/*.proto."""

from __future__ import annotations

import re
from pathlib import Path

from reference.markdown import escaped, table

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(
    r"((?:^//[^\n]*\n)*)^(service|message|enum) (\w+) \{([^\n]*\}|.*?\n\})([^\n]*)\n", re.DOTALL | re.MULTILINE
)
CALL = re.compile(r"((?:^  //[^\n]*\n)*)^  rpc (\w+)\((.*?)\) returns \((.*?)\)", re.MULTILINE)


def pages() -> dict[str, str]:
    """A page for each file, after one on how they belong together."""
    names = sorted(path.stem for path in (ROOT / "proto").glob("*.proto"))
    return {
        "protocols/README.md": _overview(names),
        **{f"protocols/{name}.md": _page(name) for name in names},
    }


def _overview(names: list[str]) -> str:
    lines = [f"- [{name}.proto]({name}.md)" for name in names]
    return "\n".join(
        [
            "# Wire protocols\n",
            "Control goes over gRPC. [Which file is spoken between whom](../../../proto/README.md):\n",
            *lines,
            "",
            "Gradients never travel there. Between hosts they go over [connections of the core's own]"
            "(../../../csrc/core/transport/README.md), and between a rank and its daemon through "
            "[shared memory](../../../csrc/README.md#the-one-path-through-it).\n",
        ]
    )


def _page(name: str) -> str:
    text = (ROOT / "proto" / f"{name}.proto").read_text()
    parts = [
        f"# {name}.proto\n",
        f"[The file](../../../proto/{name}.proto). Numbers of fields are those of the wire.\n",
    ]
    for comment, kind, title, body, behind in BLOCK.findall(text):
        parts += [f"## {kind} {title} {{: #{title} }}\n", f"{escaped(_words(comment + behind))}\n"]
        if kind == "service":
            rows = [
                [f"`{call}`", f"{_message(given)} → {_message(answer)}", escaped(_words(words))]
                for words, call, given, answer in CALL.findall(body)
            ]
            parts.append(table(("call", "messages", "meaning"), rows))
        else:
            parts.append(f"```protobuf\n{kind} {title} {{{body}\n```\n")
    return "\n".join(parts)


def _words(comment: str) -> str:
    return " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines())


def _message(text: str) -> str:
    stream, _, name = text.rpartition(" ")
    home = where(name)
    return f"{stream} [`{name}`]({home}.md#{name})" if home else f"{stream} `{name}`"


def where(message: str) -> str:
    """The file of a message; empty: none of ours."""
    for path in (ROOT / "proto").glob("*.proto"):
        if re.search(rf"^(?:message|enum) {message} ", path.read_text(), re.MULTILINE):
            return path.stem
    return ""


def enumeration(file: str, name: str) -> dict[str, str]:
    """Values of an enumeration with their comments."""
    text = (ROOT / "proto" / f"{file}.proto").read_text()
    body = next(body for _, _, title, body, _ in BLOCK.findall(text) if title == name)
    return {value: words for value, words in re.findall(r"^  (\w+) = \d+;(?:\s*// (.*))?$", body, re.MULTILINE)}
