"""The Python interface: all names in ``__all__`` of our modules, each described at one place.

griffe, which reads sources for mkdocstrings, finds them: importing them would import torch, Lightning and others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import griffe

from reference import made_late
from reference.markdown import anchor, escaped, table

# Where a name is described that several modules have.
FIRST = (
    *("bagua.torch_api", "bagua.torch_api.algorithms", "bagua.algorithms", "bagua.torch_api.data_parallel"),
    *("bagua.torch_api.contrib", "bagua.torch_api.checkpoint", "bagua.torch_api.moe", "bagua.torch_api.communication"),
    *("bagua.client", "bagua.lightning", "bagua.accelerate", "bagua.loggers"),
)


@cache
def sources() -> griffe.ModulesCollection:
    """Reads all of our modules, with the places that imported names come from."""
    loader = griffe.GriffeLoader(allow_inspection=False)  # inspection imports a module
    for package in ("bagua", "bagua_core"):
        loader.load(package)
    loader.resolve_aliases(external=False)
    return loader.modules_collection


def origin(module: griffe.Module, name: str) -> griffe.Object | None:
    """Finds where a name of a module is defined; None: not by an import, a statement or a file."""
    # An import counts more than a module of the same name beside it, here and where it leads.
    owner, _, own_name = module.imports.get(name, "").rpartition(".")
    if owner and owner != module.path:
        return origin(sources()[owner], own_name)
    found = module.members.get(name)
    return None if found is None or (found.is_attribute and found.value is None) else found


def public(module: griffe.Module) -> list[str]:
    """Names without those that the original has with an underscore, and without modules."""
    names = [str(name) for name in module.exports or ()]
    return [n for n in names if not n.startswith("_") and not ((found := origin(module, n)) and found.is_module)]


def public_modules() -> list[griffe.Module]:
    """Modules with an ``__all__`` that names anything; the first are ``FIRST``."""

    def below(module: griffe.Module) -> Iterator[griffe.Module]:
        yield module
        for inner in module.modules.values():
            if not inner.is_alias:
                yield from below(inner)

    found = [one for package in sources().members.values() for one in below(package) if public(one)]
    return sorted(found, key=lambda one: (FIRST.index(one.path) if one.path in FIRST else len(FIRST), one.path))


def pages() -> dict[str, str]:
    """A page for each module that describes something, one for the others, and a list of all."""
    described: dict[str, str] = {}
    made: dict[str, str] = {}
    others = [
        "# Other paths\n",
        "The original Bagua has these names at these paths, too. They are described elsewhere. Modules of "
        "`bagua.algorithms` are at `bagua.torch_api.algorithms`, too.\n",
    ]
    rows = []
    modules = public_modules()
    for module in modules:
        own = [_entry(module, name, described) for name in public(module) if _home(module, name) not in described]
        pointers = _pointers(module, described)
        title = f"{module.path} {{: #{module.path} }}\n"
        if own:
            words = f"{escaped(_first(module))}\n"
            made[f"python/{module.path}.md"] = "\n".join([f"# {title}", words, *own, *pointers])
            rows.append([f"[`{module.path}`]({module.path}.md)", escaped(_first(module)), str(len(own))])
        else:
            others += [f"## {title}", *pointers]
    overview = "# Python\n\nPublic modules and the number of names that are described there. The original Bagua had "
    overview += "[some names at several paths](other-paths.md).\n\n"
    overview += table(("module", "contents", "names"), rows)
    return {"python/README.md": overview, **made, "python/other-paths.md": "\n".join(others)}


def _pointers(module: griffe.Module, described: dict[str, str]) -> list[str]:
    """A table of the module's names that another one describes; empty: there are none."""
    rows = []
    for name in public(module):
        place = described[_home(module, name)]
        if place != f"{module.path}.md#{module.path}.{name}":
            rows.append([f"{anchor(f'{module.path}.{name}')}`{name}`", f"[{place.partition('#')[2]}]({place})"])
    return [table(("name", "described at"), rows)] if rows else []


def _entry(module: griffe.Module, name: str, described: dict[str, str]) -> str:
    """The description of a name, made by mkdocstrings. ``described``: page and anchor of each object so far; grows."""
    path = f"{module.path}.{name}"
    described[_home(module, name)] = f"{module.path}.md#{path}"
    found = origin(module, name)
    if found is None:
        return made_late.entry(module.filepath.parent, path)
    if isinstance(module.members.get(name), griffe.Module):  # beside the object
        return f"{anchor(path)}\n\n::: {found.path}\n"
    return f"::: {path}\n"


def _home(module: griffe.Module, name: str) -> str:
    found = origin(module, name)
    return found.path if found else f"{module.path}.{name}"


def _first(module: griffe.Module) -> str:
    words = module.docstring.value if module.docstring else ""
    return " ".join(words.split("\n\n")[0].split())
