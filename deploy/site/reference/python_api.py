"""The Python interface: all names in ``__all__`` of our modules, each described at one place.

Modules are read as text: importing them would import torch, Lightning and others.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from reference.markdown import anchor, escaped, table

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {"bagua_core": "client/bagua_core", "bagua.algorithms": "algorithms", "bagua.csrc": "csrc", "bagua": "client"}
"""Packages by their folder, the inner ones first."""
FIRST = (
    *("bagua.torch_api", "bagua.torch_api.algorithms", "bagua.algorithms", "bagua.torch_api.data_parallel"),
    *("bagua.torch_api.contrib", "bagua.torch_api.checkpoint", "bagua.torch_api.moe", "bagua.torch_api.communication"),
    *("bagua.client", "bagua.lightning", "bagua.accelerate", "bagua.loggers"),
)
"""Where a name is described that several modules have."""


@dataclass
class Module:
    """``names``: those of ``__all__``. ``imported``: name -> (module, name there). ``defined``: classes, functions and
    variables."""

    name: str
    words: str
    names: list[str] = field(default_factory=list)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    defined: set[str] = field(default_factory=set)

    @property
    def public(self) -> list[str]:
        """Names without those that the original has with an underscore, and without modules."""
        return [name for name in self.names if not name.startswith("_") and not _file(f"{self.name}.{name}")]


def public_modules() -> list[Module]:
    """Those that have ``__all__``; the first are ``FIRST``."""
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            if package == "bagua" and parts[0] in ("bagua_core", "version.py"):
                continue
            if "__all__" in path.read_text() and (module := read(name)) is not None and module.public:
                found.append(module)
    return sorted(found, key=lambda one: (FIRST.index(one.name) if one.name in FIRST else len(FIRST), one.name))


def _file(module: str) -> Path | None:
    for package, folder in FOLDERS.items():
        if module == package or module.startswith(f"{package}."):
            path = ROOT / folder / module[len(package) :].replace(".", "/").lstrip("/")
            return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
    return None


@cache
def read(name: str) -> Module | None:
    """A module of ours; None: there is none."""
    path = _file(name)
    if path is None:
        return None
    tree = ast.parse(path.read_text())
    module = Module(name, ast.get_docstring(tree) or "")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module.imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            module.defined.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            module.defined.add(node.targets[0].id)
            if node.targets[0].id == "__all__":
                module.names = list(ast.literal_eval(node.value))
    return module


def home(module: str, name: str) -> str:
    """Where an object is defined: ``bagua.torch_api.comm.primitives.send``."""
    found = read(module)
    if found is not None and name not in found.defined and name in found.imported:
        return home(*found.imported[name])
    return f"{module}.{name}"


def pages() -> dict[str, str]:
    """A page for each public module, after a list of them."""
    modules = public_modules()
    described: dict[str, str] = {}
    made = {f"python/{module.name}.md": _page(module, described) for module in modules}
    rows = [[f"[`{one.name}`]({one.name}.md)", escaped(_first(one.words)), str(len(one.public))] for one in modules]
    overview = (
        "# Python\n\nAll public modules. A name that several of them have, because the original Bagua had it there, is "
        "described once.\n\n" + table(("module", "contents", "names"), rows)
    )
    return {"python/README.md": overview, **made}


def _page(module: Module, described: dict[str, str]) -> str:
    """``described``: page and anchor of each object so far; grows."""
    parts, elsewhere = [f"# {module.name}\n", f"{escaped(_first(module.words))}\n"], []
    for name in module.public:
        origin = home(module.name, name)
        if origin in described:
            mark = anchor(f"{module.name}.{name}")
            elsewhere.append([f"{mark}`{name}`", f"[{described[origin].partition('#')[2]}]({described[origin]})"])
        else:
            described[origin] = f"{module.name}.md#{module.name}.{name}"
            parts.append(_entry(module, name, origin))
    if elsewhere:
        parts.append(table(("name", "described at"), elsewhere))
    return "\n".join(parts)


def _entry(module: Module, name: str, origin: str) -> str:
    owner, _, own_name = origin.rpartition(".")
    found = read(owner)
    if found is None or own_name not in found.defined:
        # Made when it is asked for, over classes of another package.
        return f"## `{name}` {{: #{module.name}.{name} }}\n\nMade when it is first used; see the module's page.\n"
    return f"::: {module.name}.{name}\n"


def _first(words: str) -> str:
    return " ".join(words.split("\n\n")[0].split())
