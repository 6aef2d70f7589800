"""Names of a script that mean something of torch, wherever and under whatever name it imports them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

DDP = "torch.nn.parallel.DistributedDataParallel"
INIT = "torch.distributed.init_process_group"
# Other paths of the same objects.
_HOMES = {
    "torch.nn.parallel.distributed.DistributedDataParallel": DDP,
    "torch.distributed.distributed_c10d.init_process_group": INIT,
}
# Names that ``import *`` brings from these modules, as far as they matter here.
_STARS = {
    "torch.nn.parallel": ("DistributedDataParallel", "DataParallel"),
    "torch.distributed": ("init_process_group",),
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Meaning = str | ast.expr | None  # a dotted path, the expression that was assigned, or something else


@dataclass
class Scope:
    """The names that a module, class or function binds."""

    outer: Scope | None
    is_class: bool = False
    bound: dict[str, list[tuple[Meaning, Scope]]] = field(default_factory=dict)
    elsewhere: dict[str, Scope] = field(default_factory=dict)

    def bind(self, name: str, meaning: Meaning) -> None:
        """Adds what the name may be."""
        self.elsewhere.get(name, self).bound.setdefault(name, []).append((meaning, self))

    def module(self) -> Scope:
        return self if self.outer is None else self.outer.module()


class Names:
    """The dotted path of each name and attribute of a tree (``path``), as far as it comes from torch."""

    def __init__(self, tree: ast.Module) -> None:
        self._scopes: dict[ast.AST, Scope] = {}
        self.top = Scope(None)
        self._visit(tree)

    def path(self, node: ast.AST, depth: int = 0) -> str:
        """Returns a path as in "torch.distributed.barrier"; "" for what is not known to come from torch."""
        if isinstance(node, ast.Attribute):
            value = self.path(node.value, depth)
            return _home(f"{value}.{node.attr}") if value else ""
        if isinstance(node, ast.Name) and (scope := self._scopes.get(node)) is not None:
            return self._meaning(node.id, scope, depth)
        return ""

    def binds(self, name: str) -> bool:
        return any(name in scope.bound for scope in {id(one): one for one in self._scopes.values()}.values())

    def _meaning(self, name: str, scope: Scope, depth: int) -> str:
        inner: Scope | None = scope
        while inner is not None:
            if name in inner.bound and (inner is scope or not inner.is_class):
                # A name may have a stand-in where an import fails. What comes from torch counts.
                return next(filter(None, (self._read(*one, depth) for one in inner.bound[name])), "")
            inner = inner.outer
        return ""

    def _read(self, meaning: Meaning, scope: Scope, depth: int) -> str:
        if isinstance(meaning, str):
            return meaning if meaning.split(".")[0] == "torch" else ""
        return self.path(meaning, depth + 1) if meaning is not None and depth < 20 else ""

    def _visit(self, tree: ast.Module) -> None:
        waiting: list[tuple[ast.AST, Scope]] = [(tree, self.top)]  # no recursion: a sum of 1,000 terms is as deep
        while waiting:
            node, scope = waiting.pop()
            self._scopes[node] = scope
            self._bind(node, scope)
            inner = scope
            if isinstance(node, (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)):
                inner = Scope(scope, is_class=isinstance(node, ast.ClassDef))
            outside = _evaluated_outside(node)
            # The last one is the next: global and nonlocal, which say where the other statements bind.
            below = list(ast.iter_child_nodes(node))[::-1]
            below.sort(key=lambda one: isinstance(one, (ast.Global, ast.Nonlocal)))
            waiting += [(one, scope if one in outside else inner) for one in below]

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Import():
                for one in node.names:
                    scope.bind(one.asname or one.name.split(".")[0], one.name if one.asname else one.name.split(".")[0])
            case ast.ImportFrom():
                for one, path in imported(node):
                    scope.bind(one.asname or path.rpartition(".")[2], path)
            case ast.Assign() if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                scope.bind(node.targets[0].id, node.value)
            case ast.Name(ctx=ast.Store()) if node.id not in scope.bound:
                scope.bind(node.id, None)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                scope.bind(node.name, None)
            case ast.arg():
                scope.bind(node.arg, None)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                scope.bind(name, None)
            case ast.Global():
                scope.elsewhere |= dict.fromkeys(node.names, scope.module())
            case ast.Nonlocal():
                for name in node.names:
                    outer = scope.outer
                    while outer is not None and outer.outer is not None and name not in outer.bound:
                        outer = outer.outer
                    scope.elsewhere[name] = outer or scope


def imported(node: ast.ImportFrom) -> Iterator[tuple[ast.alias, str]]:
    """Yields each imported name and its path; for ``*`` the names of torch that matter. Nothing of relative imports."""
    if node.level or node.module is None:
        return
    for one in node.names:
        names = _STARS.get(node.module, ()) if one.name == "*" else (one.name,)
        yield from ((one, _home(f"{node.module}.{name}")) for name in names)


def _home(path: str) -> str:
    return _HOMES.get(path, path)


def _evaluated_outside(node: ast.AST) -> list[ast.AST]:
    """Parts of a function or class that belong to the scope around it."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            return [*node.decorator_list, *defaults, *filter(None, [node.returns])]
        case ast.ClassDef():
            return [*node.decorator_list, *node.bases, *node.keywords]
        case _:
            return []
