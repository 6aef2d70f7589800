"""The Python interface: all names in ``__all__`` of our modules, each described at one place.

Modules are read as text: importing them would import torch, Lightning and others.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from reference import made_late
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
        return [name for name in self.names if not name.startswith("_") and not self._is_module(name)]

    def _is_module(self, name: str) -> bool:
        owner, own_name = self.imported.get(name, (self.name, name))
        found = self if owner == self.name else read(owner)
        if found is not None and found is not self and own_name in found.imported:
            return found._is_module(own_name)
        defined = found is not None and own_name in found.defined  # a function may lie beside a module of its name
        return not defined and _file(f"{owner}.{own_name}") is not None


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
    """A page for each module that describes something, one for the others, and a list of all."""
    described: dict[str, str] = {}
    made: dict[str, str] = {}
    others = [
        "# Other paths\n",
        "The original Bagua has these names at these paths, too. They are described elsewhere.\n",
    ]
    rows = []
    modules = public_modules()
    for module in modules:
        own = [_entry(module, name, described) for name in module.public if home(module.name, name) not in described]
        pointers = _pointers(module, described)
        title = f"{module.name} {{: #{module.name} }}\n"
        if own:
            words = f"{escaped(_first(module.words))}\n"
            made[f"python/{module.name}.md"] = "\n".join([f"# {title}", words, *own, *pointers])
            rows.append([f"[`{module.name}`]({module.name}.md)", escaped(_first(module.words)), str(len(own))])
        else:
            others += [f"## {title}", *pointers]
    overview = "# Python\n\nPublic modules and the number of names that are described there. The original Bagua had "
    overview += "[some names at several paths](other-paths.md).\n\n"
    overview += table(("module", "contents", "names"), rows)
    return {"python/README.md": overview, **made, "python/other-paths.md": "\n".join(others)}


def _pointers(module: Module, described: dict[str, str]) -> list[str]:
    """A table of the module's names that another one describes; empty: there are none."""
    rows = []
    for name in module.public:
        place = described[home(module.name, name)]
        if place != f"{module.name}.md#{module.name}.{name}":
            rows.append([f"{anchor(f'{module.name}.{name}')}`{name}`", f"[{place.partition('#')[2]}]({place})"])
    return [table(("name", "described at"), rows)] if rows else []


def _entry(module: Module, name: str, described: dict[str, str]) -> str:
    """The description of a name, made by mkdocstrings. ``described``: page and anchor of each object so far; grows."""
    origin = home(module.name, name)
    described[origin] = f"{module.name}.md#{module.name}.{name}"
    owner, _, own_name = origin.rpartition(".")
    found = read(owner)
    if found is None or own_name not in found.defined:
        file = _file(module.name)
        assert file is not None
        return made_late.entry(file.parent, f"{module.name}.{name}")
    if _file(f"{module.name}.{name}"):  # a module has the same name
        return f"{anchor(f'{module.name}.{name}')}\n\n::: {origin}\n"
    return f"::: {module.name}.{name}\n"


def _first(words: str) -> str:
    return " ".join(words.split("\n\n")[0].split())
