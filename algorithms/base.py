"""Interface of algorithms: ``Algorithm`` describes one, ``AlgorithmImpl`` is one at work on a wrapped model.

An ``Algorithm`` may be used for several models: each wrapping calls ``reify``. The wrapped model asks the
implementation, in this order: which tensors are exchanged (``init_tensors``, ``exchanged``), how they are grouped
(``tensors_to_buckets``), what happens to a bucket (``init_operations``: a plan), and what to do at four moments
of a training step (``init_*_hook``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bagua.algorithms.low_rank import LowRank
from bagua.algorithms.plan import GRADIENT, KEEP, Plan


class Communicator(Protocol):
    """Ranks that communicate among themselves, as algorithms see it. Positions count from 0, in the order of
    ``ranks``."""

    id: int
    """Its number, the same on all members."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the job that are members, ascending."""

    def rank(self) -> int: ...
    def nranks(self) -> int: ...


class ProcessGroup(Protocol):
    """The ranks among which a model is trained, as algorithms see it."""

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Global numbers of the group's ranks on every host that has one."""

    def get_global_communicator(self) -> Communicator:
        """Returns the communicator of all ranks of the group."""

    def get_intra_node_communicator(self) -> Communicator:
        """The group's ranks on this host."""

    def get_inter_node_communicator(self) -> Communicator | None:
        """The first rank of each host; on other ranks something that is false."""

    def communicator(self, ranks: Sequence[int]) -> Communicator:
        """A communicator for some of the group's ranks (global numbers), this one among them; the same object each
        time. Members alone call it, the first time all of them, in the same order."""

    def new_communicator(self, ranks: Sequence[int] | None = None, *, purpose: str = "") -> Communicator:
        """A communicator of its own, another one each time, for ``ranks`` (None: all of the group). All its members
        make theirs in the same order. It ends with the last reference to it. ``purpose``: they do so at moments of
        their own, in the same order among those of this purpose, and nobody uses it when the members of an elastic job
        have changed."""


class Bucket(Protocol):
    """Tensors that travel together, with the state slots of the algorithm, in memory that the daemon sees."""

    @property
    def name(self) -> str: ...
    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Parameters in the order in which they lie in the bucket."""

    @property
    def names(self) -> Sequence[str]:
        """Names of ``tensors``, in the same order."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def elements(self) -> int:
        """Number of elements of all parameters together."""

    def add_slot(
        self, name: str, elements: int | None = None, *, communicated: bool = True, on_change: str = KEEP
    ) -> torch.Tensor:
        """A new slot of zeros, as a flat tensor: ``elements`` long, or as long as the parameters together.
        ``communicated``: steps other than ``Local`` use it. ``on_change``: see ``bagua.algorithms.plan.ON_CHANGE``.
        Raises ValueError if there is one of that name."""

    def slot(self, name: str) -> torch.Tensor:
        """The flat tensor of a slot. Those of gradients and results change from step to step: ask each time."""

    def views(self, name: str) -> Sequence[torch.Tensor]:
        """The parameters' parts of a slot that is as long as they are together, in their shapes. Where a parameter is
        dense, so is its part, with the same strides."""

    @property
    def low_rank(self) -> LowRank:
        """The fastest arithmetic with thin matrices for what is like this bucket's tensors."""

    def set_plan(self, plan: Plan) -> None:
        """Sets the plan of the bucket. Buckets of gradients start by themselves when they are full, and are joined at
        the end of backward; those of weights when the algorithm says so. Raises ValueError for slots that don't
        exist."""

    def start(self) -> None:
        """Runs the plan's steps up to and including the first that communicates, and returns without waiting for it."""

    def done(self) -> bool:
        """True if ``join`` would not wait: the step that ``start`` began is over, or none was started."""

    def join(self) -> None:
        """Waits, and runs what is left of the plan. Nothing if it has not been started. Raises CommunicationError."""


class DataParallel(Protocol):
    """A wrapped model, as algorithms see it."""

    @property
    def bagua_optimizers(self) -> Sequence[torch.optim.Optimizer]: ...
    @property
    def bagua_buckets(self) -> Sequence[Bucket]: ...
    @property
    def bagua_train_step_counter(self) -> int:
        """Steps so far: forward passes in training, and exchanged passes that none began (a method was called)."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """False inside ``no_sync``, else True."""

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Trainable parameters in the order of their registration, each once."""

    def mark_ready(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Marks the gradient of this parameter as complete on this rank."""

    def finish_backward(self) -> None:
        """Submits what is left of buckets of gradients, waits for all of them and shows the results in ``.grad``."""

    def join(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Waits for buckets that have been started (None: all of the model), and runs what is left of their plans, in
        an order that is the same on all ranks. Faster than joining them one by one where plans have several steps."""

    def exchange(self) -> None:
        """Runs the plans of all buckets side by side, and waits for them. In an elastic job they count together."""

    def settle(self, meanwhile: Callable[[], None], finish: Callable[[], None]) -> None:
        """Ends exchanges of weights that ranks begin at moments of their own. It waits until all ranks of the model
        have called it, and calls ``meanwhile`` again and again until then. After that ``finish`` ends the run of this
        rank that is under way, and ranks that have begun fewer catch up. Last, all get the mean of their weights, with
        the same bits. Raises CommunicationError if a rank leaves instead.
        """

    def own_communicator(self) -> Communicator:
        """A new communicator of all ranks of the model, for what may come at different moments on different ranks.
        All ranks call it together. It lives as long as the wrapped model or the algorithm's next reset."""


@dataclass(frozen=True)
class BucketLayout:
    """Tensors that share a bucket, in the order in which they lie there. All have one dtype."""

    name: str
    tensors: tuple[torch.Tensor, ...]


REFUSES_WEIGHTS = (
    "its algorithm exchanges weights, and those of a rank without batches are old. Take one that exchanges gradients "
    "(gradient_allreduce, bytegrad, power_sgd, top_k)."
)
REFUSES_MOMENTS = (
    "its algorithm exchanges Adam's momentum, which a rank without batches does not have. Take one that exchanges "
    "gradients (gradient_allreduce, bytegrad, power_sgd, top_k)."
)


def no_hook(*_: Any) -> None:
    """The hook of an algorithm that has nothing to do at that moment."""


class AlgorithmImpl:
    """One algorithm at work on one wrapped model. The methods here exchange gradients; a subclass overrides what
    differs.

    Every rank runs the same methods at the same moments; what they return must agree between ranks.

    ``exchanged``: what buckets hold, GRADIENT or WEIGHT; asked after each reset. Buckets of weights hold the parameters
    themselves (slot WEIGHT); gradients then stay this rank's own, and backward waits for nothing of itself.

    ``follows_arrival``: buckets are made once more, in the order in which the gradients of the first synchronised pass
    came, as rank 0 saw it. An algorithm whose own order matters sets it to False. It has no meaning for weights.

    ``recuts``: buckets may be cut anew between two steps, whenever nothing is under way: ``init_operations`` is called
    for the new ones, and slots get the contents that their elements had. False where other things know buckets.

    ``waits``: ranks are in step where they exchange weights, so that in an elastic job they can agree which exchange
    counts. False: each joins exchanges at a moment of its own.

    ``takes_sparse``: gradients of ``Embedding(sparse=True)`` may go beside the buckets, as their mean. False where each
    gradient must be in a bucket, or is summed up. It has no meaning for weights.

    ``takes_shards``: models may be sharded: it asks nothing of a parameter but what ranks of one position in their
    islands have alike. False where its optimizer and its slots would hold different parts.

    ``newcomers_take``: names of attributes, plain data, that a rank takes over which joins an elastic job: counters of
    steps, and what follows from them.
    """

    exchanged: str = GRADIENT
    follows_arrival = True
    recuts = True
    waits = True
    takes_sparse = True
    takes_shards = True
    newcomers_take: tuple[str, ...] = ()

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group

    def need_reset(self) -> bool:
        """True to begin anew. It is asked where a step begins: before a forward pass in training, or after the step of
        the optimizer if the pass before it had none. True: tensors, buckets and plans are made again, and with them
        what error feedback has kept: it begins anew. Parameters become rank 0's once more, and so does the state of
        optimizers where weights were exchanged until now: it may differ between ranks.
        """
        return False

    def init_tensors(self, bagua_ddp: DataParallel) -> list[torch.nn.Parameter]:
        """Parameters that are exchanged, in the order in which buckets are filled and sent at first.

        Backward reaches the last layers first, so the order is that of registration reversed. See ``follows_arrival``.
        """
        return [parameter for _, parameter in reversed(bagua_ddp.bagua_build_params())]

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BucketLayout]:
        """Buckets for the suggested grouping. ``do_flatten`` is that of ``with_bagua``."""
        return [BucketLayout(str(index), tuple(group)) for index, group in enumerate(tensors)]

    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Gives the bucket its plan. Called for every bucket at wrap, after each reset, and when buckets are
        made again in the order of arrival."""
        raise NotImplementedError(
            f"{type(self).__name__} must override init_operations and give each bucket a plan. [BG306]"
        )

    def init_forward_pre_hook(self, bagua_ddp: DataParallel) -> Callable[[Any], None]:
        """Returns a function that gets the input of every forward pass in training, before it. Where training calls a
        method of the model, or the model in evaluation mode, it is called at the end of the backward pass, with ()."""
        return no_hook

    def init_backward_hook(self, bagua_ddp: DataParallel) -> Callable[[str, torch.nn.Parameter], None]:
        """Returns a function that gets the name and the parameter whenever a gradient has been accumulated."""
        return bagua_ddp.mark_ready

    def init_post_backward_hook(self, bagua_ddp: DataParallel) -> Callable[[], None]:
        """Returns a function that is called once at the end of every backward pass that synchronises."""
        return bagua_ddp.finish_backward

    def init_post_optimizer_step_hook(self, bagua_ddp: DataParallel) -> Callable[[torch.optim.Optimizer], None]:
        """Returns a function that gets the optimizer after each of its steps."""
        return no_hook

    def communicators(self) -> Iterable[Communicator]:
        """Yields communicators of some of the ranks that plans will use at moments of each rank's own (those of
        ``own_communicator`` are known). All ranks are asked together, when buckets have their plans: on a GPU the
        members of each meet then, one communicator after the other, and never have to wait for each other later. So the
        order must be one in which they don't wait in a circle.
        """
        return ()

    def follow_members(self, bagua_ddp: DataParallel) -> bool:
        """Adapts to the loss of members in an elastic job. Every rank that is left calls it before it repeats the
        exchange that was cut off. ``process_group`` has the new ranks. True: it is repeated with them, and the
        algorithm goes on. False: it is dropped where it was one of weights, and all begins anew at the next forward
        pass, as with ``need_reset``: weights become those of rank 0.
        """
        return True

    def tell_newcomers(self) -> dict[str, Any]:
        """State that newcomers to an elastic job take over beside parameters, optimizers and slots: ``newcomers_take``,
        by name. Plain data."""
        return {name: getattr(self, name) for name in self.newcomers_take}

    def hear_as_newcomer(self, told: dict[str, Any]) -> None:
        """Takes over what another rank has told, on a rank that joins, before tensors, buckets and plans are made
        again.
        """
        for name in self.newcomers_take:
            setattr(self, name, told[name])

    def tensors_for_newcomers(self) -> Sequence[torch.Tensor]:
        """Tensors beside slots that are the same on all ranks: ranks that join get them. The same ones, in the same
        order, on all ranks once buckets have their plans."""
        return ()

    @property
    def alike(self) -> bool:
        """True if parameters and optimizers are the same on all ranks between two steps. A checkpoint then holds them
        once, and otherwise those of each rank.
        """
        return self.exchanged == GRADIENT

    @property
    def refuses_join(self) -> str | None:
        """The reason why a rank that has used up its batches can't take part in the exchanges of the others with zeros
        (``join`` of a model), and what to take instead, in words; None: it can.
        """
        return None if self.exchanged == GRADIENT else REFUSES_WEIGHTS

    def tensors_of_rank(self) -> Sequence[torch.Tensor]:
        """Tensors beside slots that are this rank's own, and last from step to step: a checkpoint holds them. The same
        ones, in the same order, once buckets have their plans."""
        return ()

    def close(self) -> None:
        """Ends what runs in the background. It is the last call before the model is unwrapped, or wrapped anew. Waits
        for no other rank.
        """


class AlgorithmRegistry:
    """Names of algorithms, for programs that choose one by a setting."""

    def __init__(self) -> None:
        self._makers: dict[str, Callable[..., Any]] = {}
        self._descriptions: dict[str, str] = {}

    def register(self, name: str, algorithm: Callable[..., Any], description: str | None = None) -> None:
        """Adds a subclass of ``Algorithm`` (or a function that returns one). Raises ValueError if the name is taken."""
        if name in self._makers:  # a registration that replaces another one would change what a name means
            raise ValueError(f"An algorithm is already registered as {name!r}; choose another name. [BG301]")
        self._makers[name], self._descriptions[name] = algorithm, description or ""

    def get(self, name: str) -> Callable[..., Any]:
        """The maker that was registered as ``name``. Raises KeyError that lists the known names."""
        if name not in self._makers:
            raise KeyError(
                f"No algorithm is registered as {name!r}. Known: {', '.join(self.available_algorithms())}. [BG301]"
            )
        return self._makers[name]

    def available_algorithms(self) -> list[str]:
        """Registered names, in alphabetical order."""
        return sorted(self._makers)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {self._descriptions[name]}" for name in self.available_algorithms())


GlobalAlgorithmRegistry = AlgorithmRegistry()  # that of the process


class Algorithm:
    """Description of an algorithm, given to ``with_bagua``."""

    def reify(self, process_group: ProcessGroup) -> AlgorithmImpl:
        """A new implementation for one model on ``process_group``."""
        raise NotImplementedError(f"{type(self).__name__} must override reify and return its AlgorithmImpl. [BG306]")

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """The algorithm registered as ``name``, made with these arguments. Raises KeyError for an unknown name,
        TypeError for an unknown argument, and for something else than true or false where it must be one of them."""
        maker = GlobalAlgorithmRegistry.get(name)
        _check_arguments(name, maker, kwargs)
        made: Algorithm = maker(**kwargs)
        return made


def _check_arguments(name: str, maker: Callable[..., Any], given: dict[str, Any]) -> None:
    """Checks arguments, which may come from a command line as text."""
    known = inspect.signature(maker).parameters
    # A function such as ``combine`` passes options on.
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for key, value in given.items():
        if key not in known and not takes_more:
            raise TypeError(f"Algorithm {name} has no argument {key!r}. Known: {', '.join(known) or 'none'}. [BG301]")
        # "false" would count as true.
        if key in known and known[key].annotation in (bool, "bool") and value not in (True, False):
            raise TypeError(f"{key} is {value!r}: it must be true or false. [BG302]")
