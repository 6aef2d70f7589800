"""Entries for classes that a function makes when they are first used, over a class of a framework that may be absent.

mkdocstrings does not look into functions; griffe, its reader of docstrings, is given the text of the class.
"""

from __future__ import annotations

import ast
from pathlib import Path

from griffe import Docstring, DocstringSection

from reference.markdown import escaped


def entry(folder: Path, anchor: str) -> str:
    """Signature and docstring of the class that ``anchor`` names, which a function below ``folder`` makes. Raises
    LookupError if none does."""
    name = anchor.rpartition(".")[2]
    made, base = _find(folder, name)
    call = ast.unparse(_arguments(made))
    kind = f"A class over `{base}` of the framework, made when it is first used."
    words = Docstring((ast.get_docstring(made) or "").replace("``", "`")).parse("google", warnings=False)
    parts = [f"## `{name}` {{: #{anchor} }}", f"```python\n{name}({call})\n```", kind, *map(_section, words)]
    return "\n\n".join(parts) + "\n"


def _find(folder: Path, name: str) -> tuple[ast.ClassDef, str]:
    for path in sorted(folder.glob("*.py")):
        for function in ast.parse(path.read_text()).body:
            for node in function.body if isinstance(function, ast.FunctionDef) else ():
                if isinstance(node, ast.ClassDef) and node.name == name:
                    given = function.args.args[0].annotation if function.args.args else None  # type[Callback]
                    return node, ast.unparse(given.slice if isinstance(given, ast.Subscript) else node.bases[0])
    raise LookupError(f"no function below {folder} makes a class {name}")


def _arguments(made: ast.ClassDef) -> ast.arguments:
    for node in made.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            del node.args.args[0]  # self
            return node.args
    return ast.arguments([], [], None, [], [], None, [])


def _section(section: DocstringSection) -> str:
    if section.kind.value == "parameters":
        rows = [f"- `{one.name}`: {escaped(' '.join(one.description.split()))}" for one in section.value]
        return "\n".join(["**Arguments**", "", *rows])
    return escaped(str(section.value))
