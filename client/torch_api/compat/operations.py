"""Operations that programs written for the original append to buckets, as steps of a plan.

They act one after the other, in place, on the bucket's effective tensors: gradients in buckets of gradients, and
otherwise the tensors that getters of registered ones return.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch

from bagua.algorithms import AllReduce, Broadcast, Codec, Local, Plan
from bagua.algorithms.checks import check_mode
from bagua.algorithms.decentralized import ring_steps
from bagua.algorithms.pairs import Pairs
from bagua.algorithms.plan import EVERYONE, GRADIENT, HOST, LEADERS, RESULT, WEIGHT, Over, Step
from bagua.base.errors import BaguaError, MembershipChanged
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.groups import BaguaProcessGroup, _get_default_group
from bagua.torch_api.compat.registration import registered
from bagua.torch_api.compat.utils import check_contiguous
from bagua.torch_api.step.bucket import PlanBucket, views_like
from bagua.torch_api.step.execution import NotReady

PythonFunction = Callable[[str], object]

CODECS = {None: None, "MinMaxUInt8": Codec("minmax8")}
NOTHING = Plan((Local(lambda bucket: None, "nothing"),))


class BucketOperations(PlanBucket):
    """A bucket to which operations can be appended: they become the steps of its plan.

    ``process_group``: the ranks that EVERYONE, HOST and LEADERS mean; None: those of the job.
    """

    process_group: BaguaProcessGroup | None = None
    padding_tensor: torch.Tensor | None = None
    may_change = False  # operations may be appended after the bucket was first in use
    _steps: tuple[Step, ...] = ()
    _taken = 0  # slots in use by operations
    _made: tuple[int, ...] = ()  # lengths of all slots that were made for operations
    _peers = False  # an operation has peers, or replicas of theirs

    # Properties of the original's buckets

    @property
    def backend_bucket(self) -> Self:
        """The bucket as the backend takes it: itself."""
        return self

    @property
    def bagua_module_name(self) -> str | None:
        """The model whose tensors these are."""
        return registered(self.tensors[0]).module_name

    @property
    def backend_tensor(self) -> torch.Tensor | None:
        """The flat tensor in which all effective tensors lie; None if they don't lie in one."""
        now = [tensor for tensor in self.effective_tensors() if tensor is not None]
        if len(now) < len(self.tensors) or not check_contiguous(now):
            return None
        return torch.as_strided(now[0].detach(), (sum(tensor.numel() for tensor in now),), (1,))

    def effective_tensors(self) -> list[torch.Tensor | None]:
        """The tensors that travel, in the order of ``tensors``; None for a gradient that has not been computed."""
        if GRADIENT in self.reserved:
            return [tensor.grad for tensor in self.tensors]
        return [tensor.detach() for tensor in self.tensors]

    def flattened_tensor(self) -> torch.Tensor:
        """A copy of the effective tensors (and of the padding), one after the other; zeros where there is none."""
        flat = torch.zeros(self.elements, dtype=self.dtype, device=self.device)
        for part, tensor in zip(views_like(flat, self.templates()), self.effective_tensors(), strict=True):
            if tensor is not None:
                part.copy_(tensor.detach())
        return flat

    def templates(self) -> Sequence[torch.Tensor]:
        """Tensors with the shapes and strides of the effective ones."""
        return self.tensors

    def write_effective(self, flat: torch.Tensor) -> None:
        """Copies ``flat``, which is as long as ``flattened_tensor()``, to the effective tensors."""
        parts = views_like(flat, self.templates())
        pairs = [(to, part) for to, part in zip(self.effective_tensors(), parts, strict=True) if to is not None]
        with torch.no_grad():
            torch._foreach_copy_([to.detach() for to, _ in pairs], [part for _, part in pairs])

    def check_flatten(self) -> bool:
        """Returns True if the effective tensors (and the padding) lie in memory one after the other."""
        now = [tensor for tensor in self.effective_tensors() if tensor is not None]
        padding = [] if self.padding_tensor is None else [self.padding_tensor]
        return len(now) == len(self.tensors) and check_contiguous(now + padding)

    def bytes(self) -> int:
        """Bytes of the bucket's tensors, without padding."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def follow_members(self, before: int, now: int) -> None:
        """See ``PlanBucket``. Raises MembershipChanged for operations that have peers."""
        if self._peers:
            raise MembershipChanged(
                f"A rank was lost, and operations of bucket {self.name} (append_decentralized_..., "
                "append_low_precision_..., append_asynchronous_...) have peers that they can't choose anew: wrap "
                "the model again, or use the algorithms of bagua.algorithms. [BG508]"
            )
        super().follow_members(before, now)

    # Operations

    def clear_ops(self) -> Self:
        """Takes all operations away; returns the bucket. A bucket without any exchanges nothing."""
        self._steps = ()
        self._taken = 0
        self._peers = False
        self.set_plan(NOTHING)
        return self

    def append_python_op(self, python_function: PythonFunction, group: BaguaProcessGroup | None = None) -> Self:
        """Appends a call of ``python_function(bucket name)``; returns the bucket.

        It runs in the user's thread, without gradients being recorded, and may change the effective tensors in place:
        in a bucket of gradients each parameter has a ``.grad`` then, of zeros where this rank has none. What it raises
        ends the training step with that exception. ``group``: accepted for programs that pass it.
        """
        if not callable(python_function):
            raise TypeError(
                f"append_python_op got a {type(python_function).__name__}: pass a function of one argument. [BG411]"
            )
        slot = self._in_place()

        def run(bucket: BucketOperations) -> None:
            with bucket._shown(slot):
                python_function(bucket.name)
            bucket.refresh()

        # The function may do anything: it may have changed what a second run would begin with. Tensors that are not
        # gradients are seen by it where they are: no slot is opened for it.
        changed = (slot, GRADIENT) if slot == RESULT else ()
        name = getattr(python_function, "__name__", "python")
        return self._append(Local(run, name, reads=changed[:1], writes=changed))

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> Self:
        """Appends the mean (or sum) over the ranks of ``group`` (None: those of the model); returns the bucket.

        ``compression="MinMaxUInt8"``: one byte per float32 between hosts, with ``hierarchical=True``; with False ranks
        of one host exchange bytes, too. ``scattergather`` is accepted: how the exchange is cut is the engine's choice.
        Raises ValueError for another compression.
        """
        codec = _codec(compression)
        everywhere = codec is not None and not hierarchical
        op = "AVG" if average else "SUM"
        source, target = (GRADIENT, RESULT) if self._untouched() else (self._current(), self._current())
        return self._append(AllReduce(op, source, target, codec, everywhere, self._over(group, EVERYONE)))

    def append_decentralized_synchronous_op(
        self,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: BaguaProcessGroup | None = None,
    ) -> DecentralizedOperation:
        """Appends: ``peer_weight`` = mean of the effective tensors over peers. The effective tensors stay as they are
        until ``copy_back_peer_weight`` of the returned object.

        Args:
            peer_weight: A tensor as long as ``flattened_tensor()``, for example that. It gets memory that the daemon
                sees.
            hierarchical: With "shift_one", hosts are paired, and the mean is that of all ranks of both (of its own
                ranks, where there is one host).
            peer_selection_mode: "all": everyone; "shift_one": another peer each time.

        Raises ValueError for another mode, and for "shift_one" with an odd number of ranks (or hosts).
        """
        self._peers = peer_selection_mode != "all"
        slot = self._adopt(peer_weight, "peer_weight")
        current = self._in_place()
        operation = DecentralizedOperation(self, slot, self._group(group), hierarchical, peer_selection_mode)
        over = operation.next_pair or self._over(group, EVERYONE)
        take = Local(_copier(current, slot), "take weights", reads=(current,), writes=(slot,))
        self._append(take, AllReduce("AVG", slot, slot, over=over))
        return operation

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: torch.Tensor,
        left_peer_weight: torch.Tensor,
        right_peer_weight: torch.Tensor,
        hierarchical: bool = True,
        compression: str = "MinMaxUInt8",
        group: BaguaProcessGroup | None = None,
    ) -> Self:
        """Appends one step of low-precision decentralised averaging in a ring; returns the bucket.

        Args:
            weight, left_peer_weight, right_peer_weight: Replicas of the effective tensors of this rank and its
                neighbours, each as long as ``flattened_tensor()``, equal to it at the start. They get memory that the
                daemon sees.
            hierarchical: The ring is one of hosts: ranks of a host begin with their mean and end with one result.
            compression: "MinMaxUInt8", or None: differences travel as they are.

        Formula: d = x + L/3 + R/3 - 5/3 W; q = encode(d) goes to both neighbours; L += left's, R += right's,
        x = W = W + decode(q). Raises ValueError for another compression.
        """
        self._peers = True
        codec = _codec(compression)
        given = {"weight": weight, "left_peer_weight": left_peer_weight, "right_peer_weight": right_peer_weight}
        replicas = [self._adopt(tensor, name) for name, tensor in given.items()]
        messages = [self._new_slot(name) for name in ("difference", "own", "left", "right")]
        current = self._in_place()
        hosts, everyone = self._group(group).hosts, self._group(group).get_global_communicator()
        over = self._over(group, LEADERS if hierarchical else EVERYONE)
        alone = len(hosts if hierarchical else everyone.ranks) == 1
        steps = ring_steps(current, replicas, messages, codec, over, alone=alone)
        if hierarchical:
            if everyone.ranks[everyone.rank()] not in [host[0] for host in hosts]:
                steps = ()  # replicas are those of each host's first rank
            host = self._over(group, HOST)
            steps = (AllReduce("AVG", current, current, over=host), *steps, Broadcast(current, 0, host))
        return self._append(*steps)

    def append_asynchronous_model_average_op(
        self, peer_selection_mode: str, group: BaguaProcessGroup | None = None
    ) -> AsynchronousOperation:
        """Appends: x += mean over ranks of x as it was at the start - x as it was at the start. Returns the object that
        locks, aborts and resets it.

        It runs in the thread that marks the bucket's tensors ready and waits, on a communicator of its own. Raises
        ValueError for another mode than "all", BaguaError for a bucket of gradients.
        """
        if peer_selection_mode != "all":
            raise ValueError(
                f"peer_selection_mode is {peer_selection_mode!r}: asynchronous averaging knows 'all'. [BG302]"
            )
        if self._current() != WEIGHT:
            raise BaguaError(
                f"Bucket {self.name} holds gradients, and asynchronous averaging is of weights: return "
                "parameter.ensure_bagua_tensor(name, module_name) from init_tensors. [BG411]"
            )
        self._peers = True
        shared = self._new_slot("average", self.elements + 1)
        operation = AsynchronousOperation(shared, self._group(group))
        self._append(
            Local(operation.take_snapshot, "snapshot", writes=(shared,)),
            AllReduce("AVG", shared, shared, over=operation.communicator),
            Local(operation.apply, "apply", reads=(shared,)),
        )
        return operation

    # How they become steps

    def _append(self, *steps: Step) -> Self:
        if not isinstance(self.execution, NotReady) and not self.may_change:
            raise BaguaError(
                f"Bucket {self.name} is in use: append operations to it in init_operations, where it is new. [BG411]"
            )
        self._steps = (*self._steps, *steps)
        self.set_plan(Plan(self._steps))
        return self

    def _current(self) -> str:
        """The slot that the next operation acts on."""
        return RESULT if GRADIENT in self.reserved else WEIGHT

    def _untouched(self) -> bool:
        """True if the next operation begins with gradients as they came: a step can put its result elsewhere."""
        return GRADIENT in self.reserved and not self._steps

    def _in_place(self) -> str:
        """The slot that the next operation may write: contributions themselves stay as they are."""
        if self._untouched():
            copy = Local(_copier(GRADIENT, RESULT), "take gradients", reads=(GRADIENT,), writes=(RESULT,))
            self._steps = (copy,)
        return self._current()

    def _group(self, group: BaguaProcessGroup | None) -> BaguaProcessGroup:
        return group or self.process_group or _get_default_group()

    def _over(self, group: BaguaProcessGroup | None, place: str) -> Over:
        mine = self._group(None)
        if group is None or group.ranks == mine.ranks:
            return place
        ask = {
            EVERYONE: group.get_global_communicator,
            HOST: group.get_intra_node_communicator,
            LEADERS: group.get_inter_node_communicator,
        }[place]
        return lambda: ask() or None

    def _new_slot(self, name: str, elements: int | None = None) -> str:
        """Name of a slot for an operation. After ``clear_ops`` those that are there are used again."""
        length = self.elements if elements is None else elements
        while self._taken < len(self._made) and self._made[self._taken] != length:
            self._taken += 1
        label = f"operation {self._taken}"
        if self._taken == len(self._made):
            self.add_slot(label, length)
            self._made = (*self._made, length)
        self._taken += 1
        return label

    def _adopt(self, tensor: torch.Tensor, name: str) -> str:
        """A slot that holds the elements of ``tensor``, which lies in it from now on."""
        if tensor.numel() != self.elements or tensor.dtype != self.dtype:
            raise ValueError(
                f"{name} has {tensor.numel()} elements of {tensor.dtype}; bucket {self.name} has {self.elements} of "
                f"{self.dtype}. Pass bucket.flattened_tensor(). [BG411]"
            )
        label = self._new_slot(name)
        flat = self.slot(label)
        flat.copy_(tensor.detach().reshape(-1))
        tensor.data = flat.view(tensor.shape)  # ``data``: the program's tensor object stays the same
        return label

    @contextmanager
    def _shown(self, slot: str) -> Iterator[None]:
        """Within it, ``.grad`` of the parameters of a bucket of gradients is their part of ``slot``."""
        if slot != RESULT:
            yield
            return
        views = self.views(slot)
        before = [tensor.grad for tensor in self.tensors]
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.grad = view
        try:
            yield
            for tensor, view in zip(self.tensors, views, strict=True):
                if tensor.grad is None:
                    view.zero_()
                elif tensor.grad is not view:  # the function may have put another tensor there
                    view.copy_(tensor.grad)
        finally:
            for tensor, gradient in zip(self.tensors, before, strict=True):
                tensor.grad = gradient  # contributions are the program's own: they come back as they were


class DecentralizedOperation:
    """Averages with peers into a tensor of its own, which ``copy_back_peer_weight`` makes the weights."""

    def __init__(
        self, bucket: BucketOperations, peer_slot: str, group: BaguaProcessGroup, hierarchical: bool, mode: str
    ):
        """Raises ValueError for an unknown mode, and for "shift_one" among an odd number."""
        check_mode(mode)
        self._bucket = weakref.ref(bucket)
        self._peer_slot = peer_slot
        pairs = Pairs(group, hierarchical, private="operations") if mode == "shift_one" else None
        # A host that is alone has no peer, and averages over its own ranks: over everyone.
        self.next_pair = pairs.everybody if pairs is not None and pairs.n > 1 else None
        """Called once per exchange: the ranks that average now. None: all of the group, each time."""

    def copy_back_peer_weight(self, backend_bucket: object = None) -> None:
        """The effective tensors become the mean. Call it when the exchange is over (``wait_pending_comm_ops``).

        ``backend_bucket`` is accepted for programs that pass ``bucket.backend_bucket``: the operation knows its own.
        """
        bucket = self._bucket()
        if bucket is None:
            raise BaguaError("The bucket of this operation is gone: the model was wrapped anew. [BG411]")
        bucket.write_effective(bucket.slot(self._peer_slot))


class AsynchronousOperation:
    """Averages weights while they are trained.

    ``lock_weight`` and ``unlock_weight`` keep it from writing weights in between; both may be called again and again.
    ``abort`` says that this rank wants no more; when all ranks have said so, an exchange changes nothing and
    ``get_status`` is False. A rank that has aborted goes on taking part until then: otherwise the others would wait.
    ``reset`` takes it back. None of them waits for another rank.
    """

    def __init__(self, shared_slot: str, group: BaguaProcessGroup) -> None:
        self._shared_slot = shared_slot
        self._own = group.new_communicator()
        self._lock = threading.RLock()
        self._aborted = False
        self._running = True
        self._snapshot = torch.empty(0)

    def communicator(self) -> Communicator:
        """Returns a communicator of its own: exchanges come at other moments than those of gradients."""
        return self._own

    def lock_weight(self) -> None:
        """Keeps the operation from changing the weights until ``unlock_weight``."""
        self._lock.acquire()

    def unlock_weight(self) -> None:
        """Lets the operation change the weights again. Does nothing if this thread has not locked them."""
        with suppress(RuntimeError):
            self._lock.release()

    def abort(self) -> None:
        """Says that this rank wants no more averaging."""
        self._aborted = True

    def reset(self) -> None:
        """Says that this rank wants averaging again."""
        self._aborted = False
        self._running = True

    def get_status(self) -> bool:
        """Returns False when the last exchange found that all ranks had aborted."""
        return self._running

    # Both steps read and write the weights themselves, and not a copy of them in a slot: the copy would be taken and
    # written back without the lock, over what the optimizer has done meanwhile.

    def take_snapshot(self, bucket: BucketOperations) -> None:
        """First step: takes the weights to be averaged, and this rank's wish to go on."""
        shared = bucket.slot(self._shared_slot)
        with self._lock:
            self._snapshot = bucket.flattened_tensor()
        shared[: bucket.elements] = self._snapshot
        shared[bucket.elements] = 1 if self._aborted else 0  # the mean of these is 1 when all ranks have aborted

    def apply(self, bucket: BucketOperations) -> None:
        """Last step: adds the mean's difference to the snapshot."""
        shared = bucket.slot(self._shared_slot)
        self._running = bool(shared[bucket.elements] != 1)
        if self._running:
            difference = shared[: bucket.elements] - self._snapshot
            with self._lock:
                bucket.write_effective(bucket.flattened_tensor().add_(difference))


def _copier(source: str, target: str) -> Callable[[Any], None]:
    def copy(bucket: Any) -> None:
        bucket.slot(target).copy_(bucket.slot(source))

    return copy


def _codec(compression: str | None) -> Codec | None:
    if compression not in CODECS:
        known = ", ".join(repr(name) for name in CODECS)
        raise ValueError(
            f"compression is {compression!r}: choose one of {known}. Plans (bagua.algorithms) know more. [BG302]"
        )
    return CODECS[compression]
