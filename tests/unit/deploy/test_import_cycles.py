"""No module of our packages is part of an import cycle, whatever the place of the import; and imports inside functions
have a reason."""

import ast
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def sources():
    """Our modules by their dotted names."""
    mapping = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    found = {}
    for package, folder in sorted(mapping.items(), key=lambda item: -len(item[1])):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path not in found.values() and "__pycache__" not in path.parts:
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


def names_of(node, module, is_package):
    """Dotted names that an import statement may mean, longest first for each."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        start = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
        base = ".".join([*start, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def imported(tree, module, path, known):
    """Our modules that a syntax tree imports."""
    found = set()
    for node in ast.walk(tree):
        for name in names_of(node, module, path.name == "__init__.py"):
            while name and name not in known:
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {"", module}


def cycle_in(graph):
    """One cycle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_is_part_of_a_cycle():
    known = sources()
    graph = {name: imported(ast.parse(path.read_text()), name, path, known) for name, path in known.items()}
    assert len(graph) > 150 and graph["bagua.torch_api.train.model"]
    assert not cycle_in(graph)
