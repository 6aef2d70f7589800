"""No module of our packages is part of an import cycle, whatever the place of the import; and imports inside functions
have a reason."""

import ast
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

LOADED_LATE = {
    "bagua.base.system_limits": "Windows lacks `resource`, and the command line is imported there, to refuse in words",
    "bagua.bench": "a benchmark loads plots, builders and its peers when it comes to them",
    "bagua.cli": "a command starts in a tenth of a second: it loads what it needs, when it needs it",
    "bagua.client.packing": "a client packs seldom, and the library for patterns takes as long as a call",
    "bagua.csrc.build": "torch's builder takes a second, and runs in a process of its own",
    "bagua.distributed": "a job on several hosts becomes torchrun, which needs no command of ours",
    "bagua.daemon": "a daemon loads health, metrics, certificates and migrations if its settings ask for them",
    "bagua.otel.tracing": "OpenTelemetry is an extra, and takes as long as a command to import",
    "bagua.examples": "scikit-learn and the frameworks are extras",
    "bagua.operator": "kopf and lightkube take half a second and are extras; --help needs neither",
    "bagua.torch_api.notebook": "IPython and cloudpickle are an extra, and most ranks need neither",
}
"""Packages and modules that import inside functions, and why. The rank's side does not, but for notebooks."""


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


def test_imports_inside_functions_have_a_reason():
    used = set()
    for name, path in sources().items():
        if path.name == "__init__.py" or not imports_inside_functions(ast.parse(path.read_text())):
            continue
        reasons = [prefix for prefix in LOADED_LATE if f"{name}.".startswith(f"{prefix}.")]
        assert reasons, f"{name} imports inside a function: import at the top, or say here why not"
        used.update(reasons)
    assert used == set(LOADED_LATE), "a reason that nobody needs any more"


def imports_inside_functions(tree):
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(isinstance(node, ast.Import | ast.ImportFrom) for function in functions for node in ast.walk(function))
