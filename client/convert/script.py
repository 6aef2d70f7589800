"""The change of a script: Bagua's DistributedDataParallel and ``init_process_group`` where it has torch's, or backend
"bagua" alone where it does with torch's DistributedDataParallel what Bagua's can't do."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bagua.convert.advice import Note, about, obstacles
from bagua.convert.edits import Source
from bagua.convert.names import DDP, INIT, Names, imported

LIBRARY = "bagua.torch_api"
OURS = "bagua.torch_api.data_parallel"
# Arguments of ``init_process_group`` beside which the ranks find each other by the environment.
_FROM_ENVIRONMENT = {"backend", "init_method", "timeout", "device_id", "pg_options", "group_name"}
_TOLD = ("init_process_group", "DistributedDataParallel")
_BACKENDS = {"nccl": "cpu:bagua,cuda:nccl", "gloo": "bagua", "mpi": "bagua", "ucc": "bagua", "": "bagua"}


@dataclass(frozen=True)
class Converted:
    """A script's new text, the number of its changes, and what its user should know."""

    name: str
    before: bytes
    after: bytes
    changes: int
    notes: tuple[Note, ...]


def convert(scripts: Mapping[str, bytes]) -> list[Converted]:
    """Changes the scripts of one program, by their names. Raises UsageError for a text that is no Python."""
    found = [_Script(Source(name, data)) for name, data in scripts.items()]
    # One of them may wrap the model that another one's process group is for, also since an earlier conversion.
    wraps = any(script.wraps for script in found)
    wraps |= any(script.has_our_ddp for script in found) and not any(script.has_our_group for script in found)
    begins = any(script.begins for script in found)
    blocked = any(script.obstacles for script in found)
    return [script.convert(wraps, begins, blocked) for script in found]


class _Script:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._names = Names(source.tree)
        self._parents = {below: node for node in ast.walk(source.tree) for below in ast.iter_child_nodes(node)}
        self._notes: list[Note] = []
        self._alias = self._choose_alias()
        self._inits = [one for one in self._calls(INIT) if isinstance(one, ast.Call)]
        self._wrapping = list(self._calls(DDP))
        self.obstacles = obstacles(source.tree, self._names, self._wrapping)
        self.wraps = bool(self._wrapping) or any(self._ddp_imports()) or any(self._ddp_references())

    @property
    def has_our_ddp(self) -> bool:
        """True if it names Bagua's DistributedDataParallel."""
        return OURS.encode() in self._source.data or f"{self._alias}.data_parallel.".encode() in self._source.data

    @property
    def has_our_group(self) -> bool:
        """True if it calls Bagua's ``init_process_group``."""
        nodes = (node.func for node in ast.walk(self._source.tree) if isinstance(node, ast.Call))
        return any(isinstance(one, ast.Attribute) and one.attr == _TOLD[0] and self._is_ours(one) for one in nodes)

    @property
    def begins(self) -> bool:
        """True if it has an ``init_process_group``, torch's or ours."""
        return bool(self._inits) or b".init_process_group(" in self._source.data

    def convert(self, wraps: bool, begins: bool, blocked: bool) -> Converted:
        """``wraps``, ``begins``: a script of the program has a DistributedDataParallel, an ``init_process_group``;
        ``blocked``: one has an obstacle."""
        if ddp := wraps and not blocked:
            self._take_our_ddp()
        elif wraps:
            for note in self.obstacles:
                words = f'DistributedDataParallel stays torch\'s, over backend "bagua": {note.text}'
                self._notes.append(Note(note.line, words))
        for call in self._inits:
            self._take_our_group(call, ddp)
        if ddp and self._source.changes:
            self._import_library()
        self._notes += about(self._source.tree, self._names, self._source.changes, begins, wraps)
        self._tell_other_files(wraps, begins)
        self._tell_leftovers()
        notes = tuple(sorted(set(self._notes), key=lambda note: note.line))  # several rules may say the same of a line
        source = self._source
        return Converted(source.name, source.data, source.result(), source.changes, notes)

    # The model

    def _ddp_imports(self) -> Iterator[tuple[ast.ImportFrom, ast.alias]]:
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.ImportFrom):
                yield from ((node, one) for one, path in imported(node) if path == DDP and one.name != "*")

    def _ddp_references(self) -> Iterator[ast.expr]:
        """Expressions that need another text: not names that an import of its own brings."""
        own = {one.asname or one.name for _, one in self._ddp_imports()}
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.Attribute) and self._names.path(node) == DDP:
                yield node
            if isinstance(node, ast.Name) and node.id == DDP.rpartition(".")[2] and node.id not in own:
                if isinstance(node.ctx, ast.Load) and self._names.path(node) == DDP:
                    yield node  # of an import of all names

    def _take_our_ddp(self) -> None:
        for statement in dict.fromkeys(statement for statement, _ in self._ddp_imports()):
            self._replace_import(statement)
        for reference in self._ddp_references():
            self._replace(reference, f"{self._alias}.data_parallel.DistributedDataParallel")
        for call in self._wrapping:
            if any(keyword.arg is None for keyword in call.keywords):
                text = "arguments come in **: Bagua's DistributedDataParallel takes those that its help names"
                self._notes.append(Note(call.lineno, text))
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.ClassDef) and any(self._names.path(base) == DDP for base in node.bases):
                text = f"{node.name} is a subclass of DistributedDataParallel: look whether what it overrides is there"
                self._notes.append(Note(node.lineno, text))

    def _replace_import(self, statement: ast.ImportFrom) -> None:
        mine = [one for one, path in imported(statement) if path == DDP]
        rest = [one for one in statement.names if one not in mine]
        new = [f"from {OURS} import {', '.join(map(ast.unparse, mine))}"]
        if rest:
            new.insert(0, f"from {statement.module} import {', '.join(map(ast.unparse, rest))}")
        indentation = self._source.indentation(statement)
        joint = "; " if indentation is None or not self._source.alone(statement) else f"\n{indentation}"
        self._replace(statement, joint.join(new))

    # The process group

    def _take_our_group(self, call: ast.Call, ddp: bool) -> None:
        if ddp and self._by_environment(call):
            self._replace(call, f"{self._alias}.init_process_group()")
            self._tell_dropped(call)
            return
        self._choose_backend(call)
        if not ddp:
            return
        statement = self._parents[call]
        if not isinstance(statement, ast.Expr):
            text = f"call {self._alias}.init_process_group() after this one: its value is used, so it was left"
            self._notes.append(Note(call.lineno, text))
            return
        begin = f"{self._alias}.init_process_group()"
        indentation = self._source.indentation(statement)
        if indentation is not None and self._source.alone(statement):
            at = self._source.line_end(statement)
            self._source.replace(at, at, f"\n{indentation}{begin}")
        else:
            at = self._source.end(statement)
            self._source.replace(at, at, f"; {begin}")
        text = (
            "init_process_group keeps its rank and address. Where a launcher sets them (bagua run, torchrun), "
            f"{begin} is enough alone, and an elastic job needs that"
        )
        self._notes.append(Note(call.lineno, text))

    def _by_environment(self, call: ast.Call) -> bool:
        """True if ranks meet by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
        given: dict[str | None, ast.expr] = dict(zip(("backend", "init_method"), call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords}
        if len(call.args) > 2 or any(isinstance(one, ast.Starred) for one in call.args):
            return False
        for name, value in given.items():
            known = _constant(value)
            if name == "init_method" and known not in (None, "env://"):
                return False
            if name not in _FROM_ENVIRONMENT and not (name in ("rank", "world_size") and known == -1):
                if not (name == "store" and known is None):
                    return False
        return True

    def _tell_dropped(self, call: ast.Call) -> None:
        for keyword in call.keywords:
            if keyword.arg == "timeout":
                text = "timeout= is not there: the variable BAGUA_WAIT_TIMEOUT_S has the seconds of all waits"
                self._notes.append(Note(call.lineno, text))

    def _choose_backend(self, call: ast.Call) -> None:
        """Writes "bagua" for the backend, unless it can't be seen which argument that is."""
        spread = any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)
        named = next((one.value for one in call.keywords if one.arg == "backend"), None)
        value = call.args[0] if call.args else named
        if value is not None and not isinstance(value, ast.Starred):
            self._change_backend(value)
        elif spread:
            text = 'the arguments of init_process_group can\'t be seen here: give it backend="bagua" yourself'
            self._notes.append(Note(call.lineno, text))
        else:
            at = self._source.end(call.func)
            at += self._source.text(at, self._source.end(call)).index("(") + 1
            self._source.replace(at, at, 'backend="bagua"' + (", " if call.keywords else ""))

    def _change_backend(self, value: ast.expr) -> None:
        if isinstance(value, ast.IfExp):
            self._change_backend(value.body)
            self._change_backend(value.orelse)
            return
        path = self._names.path(value)
        name = path.rpartition(".")[2].lower() if path.startswith("torch.distributed.Backend.") else _constant(value)
        if isinstance(name, str) and ":" in name:
            self._replace(value, repr(name.replace("gloo", "bagua")).replace("'", '"'))
        elif isinstance(name, str) and "bagua" not in name:
            self._replace(value, f'"{_BACKENDS.get(name, "bagua")}"')
        elif not isinstance(name, str):
            self._replace(value, '"bagua"')
            if not isinstance(value, ast.Constant):
                text = f'the backend was {ast.unparse(value)}. For CUDA tensors write "cpu:bagua,cuda:nccl"'
                self._notes.append(Note(value.lineno, text))

    # The rest

    def _calls(self, path: str) -> Iterator[ast.Call]:
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.Call) and self._names.path(node.func) == path:
                yield node

    def _replace(self, node: ast.stmt | ast.expr, text: str) -> None:
        if self._in_text(node):
            self._notes.append(Note(node.lineno, f"{ast.unparse(node)} is inside of an f-string: left as it is"))
            return
        self._source.replace(self._source.begin(node), self._source.end(node), text)

    def _in_text(self, node: ast.AST) -> bool:
        """True inside of f-strings: before Python 3.12 trees do not say where there."""
        while (node := self._parents.get(node, self._source.tree)) is not self._source.tree:
            if isinstance(node, ast.JoinedStr):
                return True
        return False

    def _choose_alias(self) -> str:
        """The name of the library: that of the script, else "bagua", unless that means something else there."""
        for node in self._source.tree.body:
            if isinstance(node, ast.Import):
                for one in node.names:
                    if one.name == LIBRARY and one.asname:
                        return one.asname
        return "bagua_api" if self._names.binds("bagua") else "bagua"

    def _import_library(self) -> None:
        """Adds the import before the statement that first imports something of torch."""
        source, body = self._source, self._source.tree.body
        if any(isinstance(one, ast.Import) and f"{LIBRARY} as {self._alias}" in ast.unparse(one) for one in body):
            return
        first = next((n for n, one in enumerate(body) if _begins(one)), 0)
        wanted = next((n for n, one in enumerate(body) if n >= first and _imports_torch(one)), first)
        line = f"import {LIBRARY} as {self._alias}"
        before = source.end(body[first - 1]) if first else -1  # a docstring, or an import from __future__
        decorators = getattr(body[wanted], "decorator_list", [])
        begin = source.line_begin(min(source.begin(one) for one in [body[wanted], *decorators]))
        if before > begin:  # on the same line
            source.replace(before, before, f"; {line}")
        else:
            source.replace(begin, begin, f"{line}\n")

    def _tell_other_files(self, wraps: bool, begins: bool) -> None:
        text = ""
        if self.wraps and not begins:
            text = "there is no init_process_group here: convert the file that has it with this one, in one command"
        elif self._inits and not wraps and self._source.changes:
            text = (
                'there is no DistributedDataParallel here, so only the backend became "bagua". If another file wraps '
                "the model, convert both in one command"
            )
        if text:
            self._notes.append(Note(0, text))

    def _tell_leftovers(self) -> None:
        called = {id(call.func) for call in self._inits}
        for node in ast.walk(self._source.tree):
            text = ""
            if isinstance(node, ast.Constant) and node.value in _TOLD and self._is_asked_for(node):
                text = f"getattr asks for {node.value}: left as it is"
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                path = self._names.path(node)
                if path == INIT and id(node) not in called and not self._is_alias(node):
                    text = "init_process_group is passed on here, not called: left as it is"
                elif isinstance(node, ast.Attribute) and not path and node.attr in _TOLD and not self._is_ours(node):
                    text = f"{node.attr} is not known to be torch's here: left as it is"
            if text and isinstance(node, ast.expr):
                self._notes.append(Note(node.lineno, text))

    def _is_asked_for(self, node: ast.AST) -> bool:
        call = self._parents[node]
        return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "getattr"

    def _is_alias(self, node: ast.AST) -> bool:
        statement = self._parents[node]
        return isinstance(statement, ast.Assign) and statement.value is node

    def _is_ours(self, node: ast.Attribute) -> bool:
        """True for what is Bagua's already."""
        return ast.unparse(node).startswith((f"{self._alias}.", "bagua."))


def _begins(statement: ast.stmt) -> bool:
    """True for the first statement that others may stand before."""
    docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return not docstring and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def _imports_torch(statement: ast.stmt) -> bool:
    """True for an import outside of functions."""
    nodes: list[ast.AST] = [statement]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import) and any(one.name.split(".")[0] == "torch" for one in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            nodes += ast.iter_child_nodes(node)
    return False


def _constant(node: ast.expr) -> object:
    """The value of a constant; the node itself for others."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, int) else node
    return node.value if isinstance(node, ast.Constant) else node
