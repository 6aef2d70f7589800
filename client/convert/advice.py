"""Advice to the user of a script: reasons why something was not changed, and other ways."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bagua.convert.names import Names

# Arguments of torch's DistributedDataParallel that Bagua's takes.
TAKEN = {
    *("module", "device_ids", "output_device", "dim", "broadcast_buffers", "process_group", "bucket_cap_mb"),
    *("find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph"),
}
_SAME_PLACES = 5  # number of leading positional arguments that mean the same in both
_METHODS = {"register_comm_hook", "_set_static_graph", "_get_ddp_logging_data", "_register_builtin_comm_hook"}
_SHARDING = (
    *("torch.distributed.fsdp", "torch.distributed._composable", "torch.distributed.tensor"),
    *("torch.distributed.device_mesh", "torch.distributed.init_device_mesh", "torch.distributed.pipelining"),
    *("torch.distributed.algorithms.ddp_comm_hooks", "torch.distributed.algorithms.model_averaging"),
)
_FRAMEWORKS = {
    "accelerate": "Accelerate needs no change: bagua run --nproc-per-node 2 -m bagua.accelerate {file}",
    "transformers": "transformers' Trainer needs no change: bagua run --nproc-per-node 2 -m bagua.accelerate {file}",
    "lightning": 'for a Trainer of Lightning write `import bagua.lightning` and Trainer(strategy="bagua")',
    "pytorch_lightning": 'for a Trainer of Lightning write `import bagua.lightning` and Trainer(strategy="bagua")',
    "deepspeed": "DeepSpeed exchanges gradients itself: nothing of it was changed",
    "horovod": "Horovod exchanges gradients itself: take its optimizer out, and call model.with_bagua([optimizer])",
    "apex": "a DistributedDataParallel of apex is left: write torch's, and convert again",
}
_STARTERS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")


@dataclass(frozen=True)
class Note:
    """Words about a line; about the file, if that is 0."""

    line: int
    text: str


def obstacles(tree: ast.Module, names: Names, wrapping: Sequence[ast.Call]) -> list[Note]:
    """Reasons why the model can't have Bagua's DistributedDataParallel."""
    return [*_of_calls(wrapping), *_of_uses(tree, names)]


def _of_calls(wrapping: Sequence[ast.Call]) -> Iterator[Note]:
    for call in wrapping:
        strange = [one.arg for one in call.keywords if one.arg is not None and one.arg not in TAKEN]
        if strange:
            yield Note(call.lineno, f"Bagua's takes no {', '.join(strange)}")
        if len(call.args) > _SAME_PLACES:
            yield Note(call.lineno, f"it has more than {_SAME_PLACES} arguments without a name")


def _of_uses(tree: ast.Module, names: Names) -> Iterator[Note]:
    seen = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _METHODS:
            yield Note(node.lineno, f"Bagua's has no {node.attr}")
        for path in _paths(node, names):
            found = next((one for one in _SHARDING if path == one or path.startswith(f"{one}.")), None)
            if found is not None and found not in seen:
                seen.add(found)
                yield Note(getattr(node, "lineno", 0), f"the script uses {found}")


def _paths(node: ast.AST, names: Names) -> list[str]:
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{one.name}" for one in node.names]
    return [names.path(node)] if isinstance(node, ast.Attribute) else []


def about(tree: ast.Module, names: Names, changes: int, begins: bool, wraps: bool) -> Iterator[Note]:
    """Advice on the whole script, ``changes`` of which were made. ``begins``: its program has an
    ``init_process_group``; ``wraps``: a DistributedDataParallel of torch."""
    roots: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for path in _paths(node, names):
                roots.setdefault(path.split(".")[0], node.lineno)
        yield from _of_starts(node, names)
    for name, words in _FRAMEWORKS.items():
        if name in roots and not (name in ("accelerate", "transformers") and wraps):
            yield Note(roots[name], words)
    if "bagua" in roots and not changes:
        yield Note(roots["bagua"], "it uses Bagua already")
    elif not begins and not wraps and not (set(_FRAMEWORKS) & set(roots)):
        yield Note(0, "it has neither init_process_group nor DistributedDataParallel of torch: see docs/quickstart.md")


def _of_starts(node: ast.AST, names: Names) -> Iterator[Note]:
    if isinstance(node, ast.Call) and names.path(node.func) in _STARTERS:
        yield Note(node.lineno, "it starts its ranks itself: run it with python, not with bagua run")
    if isinstance(node, ast.Call) and names.path(node.func) == "torch.nn.DataParallel":
        yield Note(node.lineno, "DataParallel is left: it is one process with several GPUs")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        if any(isinstance(one, ast.Constant) and one.value in ("--local_rank", "--local-rank") for one in node.args):
            text = "bagua run gives LOCAL_RANK in the environment, no --local_rank; bagua.distributed.launch gives both"
            yield Note(node.lineno, text)
