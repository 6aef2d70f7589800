"""Plans of algorithms as a communication hook of torch's ``DistributedDataParallel``.

DDP calls the hook with one bucket after the other, in the same order on all ranks, as backward fills them. Each bucket
starts its plan then. The call with the last bucket joins all of them, in the user's thread, and completes the futures
of all. So there is no thread, as in a wrapped model.

DDP makes its buckets anew after the first step, in the order in which gradients came. Plans are made anew with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.futures import Future

from bagua.algorithms import Algorithm, AlgorithmImpl, Plan
from bagua.algorithms.plan import FRESH, GRADIENT, RESULT, AllReduce, Local
from bagua.base.errors import BaguaError, CommunicationError, ConfigError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.groups import BaguaProcessGroup, from_torch_group
from bagua.torch_api.job.session import Session, current, is_initialized
from bagua.torch_api.step.bucket import Allocate, PlanBucket, Region, region_of, views_like
from bagua.torch_api.step.execution import join_all
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.step.training_step import out_of_step
from bagua.torch_api.train.agreement import gather_texts, raise_together
from bagua.torch_api.train.algorithm_choice import describe_algorithm, named, reify
from bagua.torch_api.train.compare_ranks import members_group

OF_WRAPPED_MODELS = (
    "init_tensors",
    "tensors_to_buckets",
    "init_forward_pre_hook",
    "init_backward_hook",
    "init_post_optimizer_step_hook",
)
"""Methods of algorithms that DDP has no place for."""

Hook = Callable[[Any, Any], Any]


def ddp_hook(algorithm: Algorithm | str = "gradient_allreduce", **arguments: Any) -> Hook:
    """A communication hook for torch's DDP: ``ddp.register_comm_hook(None, bagua.ddp_hook("power_sgd", rank=8))``.

    Gradients are exchanged by the same plans as with ``with_bagua``: "gradient_allreduce", "bytegrad", "power_sgd",
    "top_k", "combine" (synchronous, centralised), and registered algorithms that exchange gradients in backward alone.
    ``algorithm``: a name, with the arguments of its class, or an object. The first argument of ``register_comm_hook``
    is the process group of the DDP model, None for all ranks. One hook serves one DDP model.

    What an algorithm keeps by parameter name (PowerSGD's errors and factors) outlives the buckets that DDP makes anew
    after the first step. What a codec lost in the first step, and keeps for the next one, begins anew then.

    Raises KeyError, TypeError or ValueError for a name or arguments that can't be, ConfigError for an algorithm that
    does not work inside DDP. The hook raises BaguaError, on every rank, if ranks chose different algorithms, or if the
    parameters of the model are not those that the algorithm keeps state for.
    """
    if isinstance(algorithm, str):
        algorithm = Algorithm.init(algorithm, **arguments)
    elif arguments:
        raise TypeError(f"Arguments {sorted(arguments)} go with the name of an algorithm, not with an object. [BG606]")
    elif not isinstance(algorithm, Algorithm):
        raise TypeError(f"algorithm is a {type(algorithm).__name__}: pass a name or an Algorithm. [BG606]")
    if is_initialized():
        work_of(algorithm, members_group(None))  # raises now rather than in the first step
    chosen, model = algorithm, None

    def hook(state: Any, bucket: Any) -> Any:
        nonlocal model
        session = current()
        if model is None or model.session is not session:
            group = from_torch_group(state) if isinstance(state, distributed.ProcessGroup) else state
            model = _DdpModel(session, chosen, group)
        with torch.no_grad():
            return model.take(bucket)

    hook.__annotations__.clear()  # torch compares them with its own classes
    hook.__name__ = hook.__qualname__ = f"bagua_{type(algorithm).__name__}"
    return hook


def hook_named(text: str) -> Hook:
    """``ddp_hook`` for the words of BAGUA_ALGORITHM. Raises ConfigError."""
    return ddp_hook(named(text))


class HookBucket(PlanBucket):
    """A bucket of DDP. FRESH is where it lies in DDP's memory; GRADIENT and RESULT are made when a plan names them, at
    one place if all that the plan does is an all-reduce."""

    reserved = (FRESH, GRADIENT, RESULT)
    starts_alone = True

    def __init__(self, name: str, parameters: Sequence[tuple[str, torch.Tensor]], allocate: Allocate) -> None:
        super().__init__(name, parameters, allocate)
        self.future: Future[torch.Tensor] | None = None
        self._flat: torch.Tensor | None = None
        self._fresh: Sequence[torch.Tensor] = ()
        self._regions: dict[str, Region] = {}
        self._in_place = False

    def set_plan(self, plan: Plan) -> None:
        self._in_place = len(plan.steps) == 1 and isinstance(plan.steps[0], AllReduce)
        # As long as in a wrapped model, so that a codec has the same blocks, and the same result bit by bit. Nothing is
        # in the room: DDP itself looks after parameters without a gradient.
        self.room = len(self.tensors) + 1 if self._in_place else 0
        super().set_plan(plan)

    def region(self, name: str) -> Region:
        if name not in (GRADIENT, RESULT):
            return super().region(name)
        key = GRADIENT if self._in_place else name
        if key not in self._regions:
            self._regions[key] = region_of(*self._allocate(self.elements + self.room, self.dtype), self.elements)
        return self._regions[key]

    def views(self, name: str) -> Sequence[torch.Tensor]:
        """See ``PlanBucket.views``; FRESH is valid in ``Local`` steps, before the plan communicates."""
        return self._fresh if name == FRESH else super().views(name)

    def take(self, flat: torch.Tensor) -> Future[torch.Tensor]:
        """Starts the plan on the gradients in ``flat``, which DDP leaves alone until the future is complete."""
        self._flat, self._fresh = flat, views_like(flat, self.tensors)
        assert self.plan is not None
        if any(GRADIENT in step.reads for step in self.plan.steps):
            self.slot(GRADIENT).copy_(flat)
        # A future with devices makes streams wait, and not the host.
        self.future = Future(devices=[flat.device] if self.on_device else None)
        self.execution.start()
        return self.future

    def tell(self) -> None:
        """The plan is over: its result is that of the future."""
        future, self.future = self.future, None
        assert self.plan is not None and future is not None
        result = any(RESULT in step.writes for step in self.plan.steps)
        flat, self._flat, self._fresh = self._flat, None, ()
        assert flat is not None
        # DDP copies it into the gradients before the next step begins. Without a result they stay as they are.
        future.set_result(self.slot(RESULT) if result else flat)

    def release(self) -> None:
        super().release()
        self._regions.clear()
        self._flat, self._fresh = None, ()


class _DdpModel:
    """A model of DDP, as its algorithm sees it (``bagua.algorithms.base.DataParallel``). It has no optimizers, and the
    names of its parameters are numbers, in the order in which DDP shows them."""

    bagua_optimizers: Sequence[torch.optim.Optimizer] = ()
    require_backward_grad_sync = True

    def __init__(self, session: Session, algorithm: Algorithm, group: BaguaProcessGroup | None) -> None:
        if session.elastic:
            raise ConfigError(
                "A hook of bagua in DistributedDataParallel can't go on when an elastic job loses a rank. Wrap the "
                "model with model.with_bagua([optimizer], algorithm) instead, or start the job without --elastic. "
                "[BG606]"
            )
        self.session = session
        self.bagua_train_step_counter = 0
        self._chosen = algorithm
        members = members_group(group)
        self._runner = Runner(session, members)
        self._algorithm = work_of(algorithm, members)
        self._after_backward = self._algorithm.init_post_backward_hook(self)
        self._buckets: list[HookBucket] = []
        self._names: dict[torch.Tensor, str] = {}
        self._first_step = True
        self._under_way = False  # a pass

    @property
    def bagua_buckets(self) -> list[HookBucket]:
        return self._buckets

    @property
    def _everyone(self) -> Communicator:
        return self._runner.everyone

    # Called by DDP

    def take(self, given: Any) -> Future[torch.Tensor]:
        """One bucket, ``torch.distributed.GradBucket``, of the pass that is under way."""
        number, flat = given.index(), given.buffer()
        if flat.layout is not torch.strided:
            raise NotImplementedError(
                f"Bucket {number} of DistributedDataParallel has a sparse gradient ({flat.layout}), which algorithms "
                "of bagua can't exchange: make it with sparse=False, or leave the hook out. [BG601]"
            )
        if number == 0:
            self._begin_pass()
        bucket = self._bucket(number, list(given.parameters()), flat)
        self._under_way = True
        future = bucket.take(flat)
        if given.is_last():
            self._end_pass(number + 1)
        return future

    def _begin_pass(self) -> None:
        for bucket in self._buckets:
            bucket.execution.abandon()
        if self._under_way and self._everyone.nranks() > 1:  # the last pass did not come to its end
            raise out_of_step()
        if self._algorithm.need_reset():
            self._release(0)

    def _end_pass(self, count: int) -> None:
        """Waits for all, and runs the rest of their plans."""
        self._release(count)  # buckets that DDP has no more
        join_all(self._buckets)
        for bucket in self._buckets:
            bucket.tell()
        self._first_step = self._under_way = False
        self.bagua_train_step_counter += 1
        self._after_backward()

    def _release(self, begin: int) -> None:
        for bucket in self._buckets[begin:]:
            bucket.release()
        del self._buckets[begin:]

    def _bucket(self, number: int, parameters: list[torch.Tensor], flat: torch.Tensor) -> HookBucket:
        if number < len(self._buckets) and same(self._buckets[number].tensors, parameters):
            return self._buckets[number]
        self._release(number)
        mistake: Exception | None = None
        made = None
        try:
            made = self._make(number, parameters, flat)
        except Exception as error:  # the others must learn of it
            mistake = error
        self._agree(parameters, mistake)
        assert made is not None
        self._runner.adopt(made)
        self._buckets.append(made)
        return made

    def _make(self, number: int, parameters: list[torch.Tensor], flat: torch.Tensor) -> HookBucket:
        new = [one for one in parameters if one not in self._names]
        if new and not self._first_step and keeps_state(self._buckets, self._algorithm):
            raise BaguaError(
                f"{type(self._chosen).__name__} keeps state for each parameter, and {len(new)} parameters of this "
                "DistributedDataParallel model were not there in the first step. Make a new DistributedDataParallel "
                "when the model has changed, and give it a new hook: bagua.ddp_hook(...). [BG606]"
            )
        for one in new:
            self._names[one] = str(len(self._names))
        if flat.is_cuda and not self._runner.on_device:
            self._runner.use_device_of(flat)
        bucket = HookBucket(str(number), [(self._names[one], one) for one in parameters], self._runner.allocate)
        self._algorithm.init_operations(self, bucket)
        return bucket

    def _agree(self, parameters: list[torch.Tensor], mistake: Exception | None) -> None:
        """Raises on every rank if one has a mistake, or if they are about to exchange different things."""
        raise_together(mistake, self._everyone)
        mine = [describe_algorithm(self._chosen), [[list(one.shape), str(one.dtype)] for one in parameters]]
        told: list[Any] = [json.loads(text) for text in gather_texts(json.dumps(mine).encode(), self._everyone)]
        for place, other in enumerate(told):
            if other[0] != told[0][0]:
                raise BaguaError(
                    f"Ranks gave DistributedDataParallel different algorithms: rank {self._everyone.ranks[0]} "
                    f"{told[0][0]}, rank {self._everyone.ranks[place]} {other[0]}. They must be the same. [BG603]"
                )
            if other[1] != told[0][1]:
                raise BaguaError(
                    f"Ranks {self._everyone.ranks[0]} and {self._everyone.ranks[place]} have buckets with different "
                    "parameters: the model must be the same on all ranks. [BG603]"
                )

    # Called by the algorithm

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Returns the parameters that DDP has shown so far."""
        return [(name, one) for one, name in self._names.items()]  # type: ignore[misc]

    def mark_ready(self, name: str, parameter: torch.nn.Parameter) -> None:
        """DDP does that."""

    def finish_backward(self) -> None:
        """Done: ``_end_pass``."""

    def join(self, buckets: Any = None) -> None:
        """Waits for buckets that have been started."""
        join_all(self._buckets if buckets is None else buckets)

    def exchange(self) -> None:
        """Raises CommunicationError: nothing is exchanged outside of backward."""
        raise CommunicationError("In DistributedDataParallel gradients are exchanged in backward alone. [BG606]")

    def settle(self, *_: Any) -> None:
        """Raises CommunicationError."""
        self.exchange()

    def own_communicator(self) -> Communicator:
        """Another communicator of all ranks of the model."""
        return self._runner.own_communicator()


def same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Returns True if these are the same objects in the same order."""
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def keeps_state(buckets: Sequence[HookBucket], algorithm: AlgorithmImpl) -> bool:
    """Returns True if the algorithm has state that lasts from step to step."""
    steps = [step for bucket in buckets if bucket.plan is not None for step in bucket.plan.steps]
    feedback = any(isinstance(step, AllReduce) and step.codec and step.codec.error_feedback for step in steps)
    return feedback or any(isinstance(one, Local) for one in steps) or bool(algorithm.tensors_of_rank())


def work_of(algorithm: Algorithm, group: BaguaProcessGroup) -> AlgorithmImpl:
    """The algorithm at work among these ranks. Raises ConfigError for one that has work outside of backward."""
    found = reify(algorithm, group)
    beyond = [name for name in OF_WRAPPED_MODELS if getattr(type(found), name) is not getattr(AlgorithmImpl, name)]
    if found.exchanged == GRADIENT and not beyond:
        return found
    what = "it has work to do in other moments of a step" if found.exchanged == GRADIENT else "it exchanges weights"
    raise ConfigError(
        f"{type(algorithm).__name__} can't be used in DistributedDataParallel, which exchanges gradients in backward "
        f"and nothing else: {what}. Wrap the model with model.with_bagua([optimizer], algorithm) instead of "
        "DistributedDataParallel, or choose gradient_allreduce, bytegrad, power_sgd or top_k. [BG606]"
    )
