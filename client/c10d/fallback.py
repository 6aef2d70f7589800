"""The process group of backend "bagua" in Python, for machines on which the one in C++ can't be built.

Collectives of a group run in their order on one lane, messages on a lane for each route (``messages.py``). An operation
that its caller waits for runs in the caller's thread where nothing is before it. On CUDA tensors operations are
submitted in the order of the current stream.

torch calls it by different names in different versions, and C++ calls some of its methods, by way of torch's
trampoline: ``ALIASES``.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import DistBackendError
from torch.distributed.distributed_c10d import Store

from bagua.base.errors import CommunicationError
from bagua.c10d.lanes import THREADS, Lane
from bagua.c10d.messages import Messages
from bagua.c10d.sparse import add_up, check_sparse
from bagua.c10d.tensors import blocks, carried, check, check_written, flat, ratio, reduction, same_numel
from bagua.c10d.work import Operation, Together, run_within
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.job.session import current

# Names until torch 2.12, and since.
ALIASES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}

# Methods that torch calls in a forward pass.
TRACED = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
)

Tensors = Sequence[torch.Tensor]
ProcessGroup: Any = distributed.ProcessGroup


def create(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    communicator: Communicator,
    name: str,
    shut_down: Callable[[], None],
) -> BaguaProcessGroup:
    """The group of the ranks of ``communicator``, whose ranks it numbers alike. ``store``: of this group, and of no
    group before it. ``shut_down``: called at its end."""
    made = BaguaProcessGroup(store, rank, size, timeout, communicator, name)
    made.shut_down = shut_down
    return made


class BaguaProcessGroup(ProcessGroup):  # type: ignore[misc]
    """A group of ranks of the job."""

    shut_down: Callable[[], None]
    # torch 2.4 asks the group for CUDA tensors in ``new_group``: it takes ``_get_backend`` for a Backend.
    supports_splitting = False

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, communicator: Communicator, name: str
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self._name = name
        self._desc = "undefined"
        self._timeout = timeout.total_seconds()
        self._everyone = communicator
        self._connection = current().connection
        self._lane = Lane(THREADS)
        self._messages = Messages(store, communicator, lambda: self._timeout)
        self._coalesced: list[Operation] | None = None
        self._sequence = 0
        self._broken: CommunicationError | None = None
        self._operations: weakref.WeakSet[Operation] = weakref.WeakSet()

    # Names, devices and timeouts: torch asks for them

    def getBackendName(self) -> str:
        return "bagua"

    def _get_backend_name(self) -> str:
        return "bagua"

    def _get_backend(self, device: torch.device) -> BaguaProcessGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _set_group_desc = setGroupDesc

    @property
    def group_desc(self) -> str:
        return self._desc

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the limit of operations that name none of their own."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def abort(self) -> None:
        """Operations raise DistBackendError on this rank: those from now on, and those that wait."""
        self._everyone.abort()
        self._end_all("aborted")

    def _end_all(self, what: str) -> None:
        """Ends all operations; ``what`` says what became of the group."""
        for operation in list(self._operations):
            operation.end(DistBackendError(f"{operation.name}: the group was {what} on this rank. [BG512]"))

    def shutdown(self) -> None:
        """Gives communicators back. Operations that are not over raise DistBackendError."""
        self._end_all("destroyed")
        self._messages.close()
        self.shut_down()

    # Beginning an operation

    def _start(
        self,
        name: str,
        outputs: Tensors,
        run: Callable[[Communicator], None],
        opts: Any = None,
        inputs: Tensors = (),
        together: bool = True,
        shows: Tensors = (),
    ) -> Operation:
        """``run(communicator)`` on the group's lane. ``opts``: torch's options of the call. ``together``: ``outputs``
        and ``inputs`` have one dtype. ``shows``: results that are not checked. Raises TypeError for tensors that can't
        be taken."""
        tensors = (*outputs, *inputs)
        for some in [tensors] if together else [(tensor,) for tensor in tensors]:
            check(some)
        check_written(outputs)
        everyone, seconds = self._everyone, self._limit(opts)
        self._sequence += 1

        def within() -> None:
            if self._broken is not None:
                raise self._broken
            try:
                run_within(self._connection, name, seconds, time.monotonic() + seconds, lambda: run(everyone))
            except CommunicationError as error:
                self._broken = error  # what comes after it would meet other ranks' operations
                raise

        operation = Operation(name, [*outputs, *shows], within, seconds)
        device = any(tensor.is_cuda for tensor in tensors)
        self._noted(operation)
        operation.start(self._lane, here=device or not getattr(opts, "asyncOp", True))
        return operation

    def _limit(self, opts: Any) -> float:
        given = getattr(opts, "timeout", None)
        seconds = given.total_seconds() if isinstance(given, timedelta) else 0.0
        return seconds if seconds > 0 else self._timeout

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Operation:
        parts, self._coalesced = self._coalesced or [], None
        return Together("coalesced", parts, self._timeout)

    # Collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Operation:
        (tensor,) = _listed(tensors)
        if tensor.layout is torch.strided:
            return self.allreduce_coalesced([tensor], opts, name="all_reduce")
        check_sparse(tensor, _op(opts))
        return self._start("all_reduce", [], lambda everyone: add_up(everyone, tensor), opts, shows=[tensor])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None, name: str = "all_reduce_coalesced") -> Operation:
        how = [reduction(tensor, _op(opts)) for tensor in tensors]

        def run(everyone: Communicator) -> None:
            for tensor, reduced in zip(tensors, how, strict=True):
                with flat(tensor, changes=True) as one:
                    everyone.allreduce_inplace(one, reduced)

        return self._start(name, tensors, run, opts, together=False)

    def broadcast(self, tensors: Any, opts: Any = None) -> Operation:
        (tensor,) = _listed(tensors)
        root = opts.rootRank

        def run(everyone: Communicator) -> None:
            with flat(tensor, changes=True) as one:
                everyone.broadcast(carried(one), root)

        return self._start("broadcast", [tensor], run, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Operation:
        """Reduces all tensors into the root's."""
        (tensor,) = _listed(tensors)
        root, how = opts.rootRank, reduction(tensor, _op(opts))

        def run(everyone: Communicator) -> None:
            with flat(tensor, changes=True) as one:
                everyone.reduce_inplace(one, root, how)

        return self._start("reduce", [tensor], run, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Operation:
        """``outputs[0][i]`` becomes rank i's tensor."""
        (taken,), (tensor,) = outputs, _listed(inputs)
        same_numel(taken, tensor.numel(), self.size(), "all_gather")

        def run(everyone: Communicator) -> None:
            with blocks(taken, tensor, changes=True) as whole, flat(tensor) as one:
                everyone.allgather(carried(one), carried(whole))

        return self._start("all_gather", taken, run, opts)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Operation:
        """``output_lists[i][j]`` becomes rank i's ``inputs[j]``."""
        works = [
            self.allgather([[row[number] for row in output_lists]], [tensor], opts)
            for number, tensor in enumerate(inputs)
        ]
        return Together("all_gather_coalesced", works, self._limit(opts))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Operation:
        """Gathers all ranks' ``input`` in ``output``, one after the other."""
        ratio(output, input, self.size(), "all_gather_into_tensor")

        def run(everyone: Communicator) -> None:
            with blocks([output], output, changes=True) as whole, flat(input) as one:
                everyone.allgather(carried(one), carried(whole))

        return self._start("all_gather_single", [output], run, opts, [input])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Operation:
        """Runs ``all_gather_single`` for several tensors."""
        works = [self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else Together("all_gather_single_coalesced", works, self._limit(opts))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Operation:
        """``outputs[0][i]`` of the root becomes rank i's tensor."""
        (tensor,) = _listed(inputs)
        root = opts.rootRank
        taken = list(outputs[0]) if outputs else []
        at_root = self.rank() == root
        if at_root:
            same_numel(taken, tensor.numel(), self.size(), "gather")

        def run(everyone: Communicator) -> None:
            where = taken if at_root else [tensor.new_empty(tensor.numel() * self.size())]
            with blocks(where, tensor, changes=at_root) as whole, flat(tensor) as one:
                everyone.gather(carried(one), carried(whole), root)

        return self._start("gather", taken, run, opts, [tensor])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Operation:
        """Fills the tensor with ``inputs[0][rank]`` of the root."""
        (tensor,) = _listed(outputs)
        root = opts.rootRank
        given = list(inputs[0]) if inputs else []
        at_root = self.rank() == root
        if at_root:
            same_numel(given, tensor.numel(), self.size(), "scatter")

        def run(everyone: Communicator) -> None:
            source = given if at_root else [tensor.new_empty(tensor.numel() * self.size())]
            with blocks(source, tensor) as whole, flat(tensor, changes=True) as one:
                everyone.scatter(carried(whole), carried(one), root)

        return self._start("scatter", [tensor], run, opts, given)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Operation:
        """Fills the tensor with the reduction of all ranks' ``inputs[0][rank]``."""
        (tensor,), (given,) = _listed(outputs), inputs
        how = reduction(tensor, _op(opts))
        same_numel(given, tensor.numel(), self.size(), "reduce_scatter")

        def run(everyone: Communicator) -> None:
            with blocks(given, tensor) as whole, flat(tensor, changes=True) as one:
                everyone.reduce_scatter(whole, one, how)

        return self._start("reduce_scatter", [tensor], run, opts, given)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Operation:
        """Fills ``output`` with this rank's block of the reduction of all ranks' ``input``."""
        ratio(input, output, self.size(), "reduce_scatter_tensor")
        how = reduction(output, _op(opts))

        def run(everyone: Communicator) -> None:
            with blocks([input], input) as whole, flat(output, changes=True) as one:
                everyone.reduce_scatter(whole, one, how)

        return self._start("reduce_scatter_single", [output], run, opts, [input])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Operation:
        """Runs ``reduce_scatter_single`` for several tensors."""
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else Together("reduce_scatter_single_coalesced", works, self._limit(opts))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Operation:
        """``outputs[i]`` becomes rank i's ``inputs[rank]``. Sizes may differ."""
        taken = [tensor.numel() for tensor in outputs]
        given = [tensor.numel() for tensor in inputs]

        def run(everyone: Communicator) -> None:
            with blocks(inputs, inputs[0]) as source, blocks(outputs, outputs[0], changes=True) as target:
                self._exchange(everyone, inputs[0].dtype, source, given, target, taken)

        return self._start("all_to_all", outputs, run, opts, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Operation:
        """Rows of ``input`` go to the ranks, and rows of ``output`` come from them; as many as the splits say."""
        given, taken = self._counts(input, input_splits), self._counts(output, output_splits)

        def run(everyone: Communicator) -> None:
            with flat(input) as source, flat(output, changes=True) as target:
                self._exchange(everyone, input.dtype, source.view(-1), given, target.view(-1), taken)

        return self._start("all_to_all_single", [output], run, opts, [input])

    def _counts(self, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        n = self.size()
        rows = tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if rows % n:
                raise ValueError(
                    f"all_to_all_single: {rows} rows can't be shared equally by {n} ranks: pass splits. [BG403]"
                )
            splits = [rows // n] * n
        if len(splits) != n or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"all_to_all_single: splits {list(splits)} don't share {rows} rows among {n} ranks. [BG403]"
            )
        each = tensor.numel() // rows if rows else 0
        return [count * each for count in splits]

    def _exchange(
        self,
        everyone: Communicator,
        dtype: torch.dtype,
        source: torch.Tensor,
        given: Sequence[int],
        target: torch.Tensor,
        taken: Sequence[int],
    ) -> None:
        """``given`` and ``taken`` count elements of ``dtype``, which may travel as several."""
        source, target = carried(source), carried(target)
        parts = dtype.itemsize // source.element_size()
        given, taken = [parts * count for count in given], [parts * count for count in taken]
        everyone.alltoall_v(source, given, _starts(given), target, taken, _starts(taken))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Operation:
        return self._start("barrier", [], lambda everyone: everyone.barrier(), opts)

    # Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Operation:
        (tensor,) = _listed(tensors)
        check([tensor])
        return self._noted(self._messages.send(tensor, dst, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Operation:
        (tensor,) = _listed(tensors)
        check([tensor])
        check_written([tensor])
        return self._noted(self._messages.recv(tensor, src, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Operation:
        (tensor,) = _listed(tensors)
        check([tensor])
        check_written([tensor])
        return self._noted(self._messages.recv_any(tensor, tag))

    def _noted(self, operation: Operation) -> Operation:
        self._operations.add(operation)
        if self._coalesced is not None:
            self._coalesced.append(operation)
        return operation


def _give_old_names() -> None:
    for old, new in ALIASES.items():
        setattr(BaguaProcessGroup, old, getattr(BaguaProcessGroup, new))


@functools.cache
def untrace() -> None:
    """torch.compile traces Python that it meets in a model's forward pass, and can't trace these. Called when DDP has
    loaded the compiler: marking them loads it, which takes seconds."""
    for name in TRACED:
        setattr(BaguaProcessGroup, name, torch.compiler.disable(getattr(BaguaProcessGroup, name)))  # type: ignore[no-untyped-call]
    _give_old_names()


_give_old_names()


def _listed(tensors: Any) -> list[torch.Tensor]:
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(found) != 1:
        raise ValueError(f"{len(found)} tensors were passed: backend bagua takes one for each call. [BG410]")
    return found


def _op(opts: Any) -> Any:
    return getattr(opts, "reduceOp", distributed.ReduceOp.SUM)


def _starts(counts: Sequence[int]) -> list[int]:
    found, place = [], 0
    for count in counts:
        found.append(place)
        place += count
    return found
