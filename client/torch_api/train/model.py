"""A wrapped model. The file reads top to bottom, from wrapping to the end of a training step."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, cast

import torch

from bagua.algorithms import Algorithm, AlgorithmImpl, Bucket
from bagua.algorithms.plan import GRADIENT
from bagua.base.errors import CommunicationError, ConfigError
from bagua.base.replica_check import CheckReplicas
from bagua.torch_api.comm.checkpoint_state import keepers
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.groups import BaguaProcessGroup
from bagua.torch_api.comm.shards import (
    IslandMeans,
    Shard,
    divide_gradient,
    is_shard,
    is_sharded,
    local_part,
    show_parts,
    whole_of,
)
from bagua.torch_api.comm.transfer import ReduceOp
from bagua.torch_api.job.connection import Record, Times
from bagua.torch_api.job.malloc import HeapTrimmer
from bagua.torch_api.job.session import CURRENT, Session, current
from bagua.torch_api.step.bucket import PlanBucket
from bagua.torch_api.step.dataflow import adds_up
from bagua.torch_api.step.earlier_results import EarlierResults
from bagua.torch_api.step.gradients import GradientHook
from bagua.torch_api.step.module_hook import Mark, ModuleHook, beside_graphs
from bagua.torch_api.step.parameters import ignored_names, trainable_parameters, with_sparse_gradients
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.step.training_step import TrainingStep
from bagua.torch_api.train.agreement import broadcast_tensors
from bagua.torch_api.train.autograd_hooks import BackwardPasses
from bagua.torch_api.train.backward_steps import BackwardSteps, SteppingInBackward
from bagua.torch_api.train.bucket_layout import ModelBuckets
from bagua.torch_api.train.buffers import BufferBroadcast
from bagua.torch_api.train.compare_ranks import (
    compare_ranks,
    compare_ranks_again,
    find_device,
    model_group,
    take_state_of_rank_0,
)
from bagua.torch_api.train.compat_hooks import Guest
from bagua.torch_api.train.model_renewal import ModelRenewal
from bagua.torch_api.train.model_state import ModelState
from bagua.torch_api.train.optimizer_code import average_losses, make_hookable
from bagua.torch_api.train.optimizer_state import broadcast_optimizers
from bagua.torch_api.train.rebucket import Cuts, recut
from bagua.torch_api.train.recorder import recorder_of
from bagua.torch_api.train.replica_check import ReplicaCheck
from bagua.torch_api.train.sparse_gradients import SparseGradients, refuse_sparse
from bagua.torch_api.train.tracer import Tracer
from bagua.torch_api.train.tuner import Tuner
from bagua.torch_api.train.uneven import Uneven, UnevenModel, buffers_of
from bagua.torch_api.train.untracked import UntrackedParameters

LOG = logging.getLogger("bagua")
NewTuner = Callable[["DistributedModel", ModelBuckets, Runner, Session], Tuner]
ALONE_S = 2.0
"""Operations of ranks that fail in the same step are over much sooner."""


class DistributedModel(Mark):
    """Keeps the replicas of ``module`` alike: rank 0's state at the start, the algorithm's exchange in every step.

    Args:
        module: Its parameters and buffers are overwritten with rank 0's, except those named in its ignore lists.
            Buffers (running statistics of BatchNorm) go their own way on each rank after that, but see
            ``broadcast_buffers``.
        optimizers: State and hyper-parameters are overwritten with rank 0's.
        algorithm: Decides the exchange. None: that of environment variable BAGUA_ALGORITHM, else gradient all-reduce.
        process_group: The ranks that train this model, which alone wrap it. None: all ranks.
        bagua_module_name: For messages.
        gradient_as_bucket_view: Accepted for programs that pass it, and handed to ``tensors_to_buckets``: ``.grad`` and
            parameters are always memory of the program's own.
        find_unused_parameters: Accepted for programs that pass it: parameters without a gradient are always handled.
        broadcast_buffers: Buffers become rank 0's before each forward pass in training, but inside ``no_sync``. All
            ranks then run the same number of them.
        bucket_bytes: Bytes per bucket. None: BAGUA_DEFAULT_BUCKET_SIZE, else a size that suits the model.
        step_in_backward: Optimizers step the parameters of a bucket inside backward, as soon as its result is there
            (``backward_steps.py``). ``optimizer.step()`` then finishes and checks. In elastic jobs it has no effect.
        tuner: Makes what changes settings of this model between two steps.

    Raises BaguaError, on every rank, if the ranks' models or optimizers differ.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer,
        algorithm: Algorithm | None = None,
        process_group: BaguaProcessGroup | None = None,
        bagua_module_name: str | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = False,
        bucket_bytes: int | None = None,
        step_in_backward: bool = False,
        tuner: NewTuner | None = None,
    ) -> None:
        super().__init__()
        self.process_group = model_group(module, process_group)
        self.module = module
        self.is_sharded = is_sharded(module)
        self._shards: dict[torch.Tensor, Shard] = {}
        self.bagua_module_name = bagua_module_name or f"{type(module).__name__}_{id(module)}"
        self.bagua_optimizers: list[torch.optim.Optimizer] = (
            list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        )
        for optimizer in self.bagua_optimizers:
            make_hookable(optimizer)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.broadcast_buffers = broadcast_buffers
        self.bucket_bytes = bucket_bytes
        self.parameters_to_ignore = ignored_names(module)
        self.bagua_train_step_counter = 0
        self._earlier_results = EarlierResults(lambda: self._group.rank() == 0)
        self._session = current()
        self._runner = Runner(self._session, self.process_group)
        self._join_buckets = self._runner.vote.join
        self._between_steps = units(self._session).between_steps if self._session.elastic else None
        self._renewal = ModelRenewal(self, self._runner)
        self._state = ModelState(self, self._runner)
        self.description: dict[str, object] = {}
        self.check_replicas = CheckReplicas.warn
        self._buffers = BufferBroadcast(self._session, lambda: buffers_of(self))
        self._guest = self._new_guest()
        self._layout = ModelBuckets(self, self._guest, self._session, self._runner)
        self._handles: list[Any] = []
        self._optimizer_handles: list[Any] = []
        self._closed = False
        self._tracer = self._session.keep(Tracer)
        self._tracer.add(self)
        self.passes = BackwardPasses(
            self, self._session, self._runner, self._tracer, self._guest, begin_late=self._begin_late
        )
        self.require_backward_grad_sync = True
        self.shadow = UnevenModel(
            self, self._session, self._runner, self._guest, self.passes, begin_step=self._begin_step
        )
        _MODELS.add(self)
        self._session.has_wrapped_a_model = True
        self.bagua_algorithm: AlgorithmImpl = AlgorithmImpl(self.process_group)
        self._recorder = recorder_of(self, self._session, len(self.process_group.hosts))
        self._steps = self._new_steps() if step_in_backward else None
        self._new_tuner = tuner
        self._tuner: Tuner | None = None
        try:
            self._runner.vote.together(
                lambda: self._wrap(algorithm),
                again=self._layout.release,
                show=lambda _: self._renewal.settle_wrap(),
            )
        except BaseException:
            with suppress(CommunicationError):  # the first error is told, whatever closing meets
                self.close()
            raise
        keepers(self._session).add("model", self._state)
        if self._session.elastic:
            units(self._session).admission.carry("model", self._state)

    def _new_steps(self) -> BackwardSteps | None:
        if not self._session.elastic:
            return BackwardSteps(self.bagua_optimizers)
        LOG.warning(
            "step_in_backward=True has no effect in an elastic job, where a step counts on all ranks or on none: "
            "parameters move in optimizer.step()."
        )
        return None

    def _new_guest(self) -> Guest:
        """See ``Guest``; for a subclass that has one."""
        return Guest()

    # At wrap time

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """(name, parameter) of all that buckets exchange, in the order of registration; shared parameters once.
        Parameters with sparse gradients are no part of it where gradients are exchanged."""
        aside = {parameter for _, parameter in self.trained_beside_buckets()}
        return [(name, parameter) for name, parameter in self.trained() if parameter not in aside]

    def trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """(name, parameter) of all that is trained, with those beside buckets."""
        return [(name, self._part(one)) for name, one in trainable_parameters(self.module, self.parameters_to_ignore)]

    def _part(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """The parameter, or its part on this rank: the same object each time."""
        if not is_shard(parameter):
            return parameter
        if parameter not in self._shards:
            self._shards[parameter] = Shard(parameter)
        return self._shards[parameter]

    def trained_beside_buckets(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters whose gradients are sparse, where gradients are exchanged."""
        aside = with_sparse_gradients(self.module) if self.bagua_algorithm.exchanged == GRADIENT else ()
        return [(name, one) for name, one in self.trained() if whole_of(one) in aside] if aside else []

    @property
    def params_in_use(self) -> set[str]:
        """Names of all that is trained."""
        return {name for name, _ in self.trained()}

    @property
    def autograd_graph_params(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters that have a gradient, by name: backward has reached them, on this rank or on another."""
        return {name: parameter for name, parameter in self.trained() if parameter.grad is not None}

    @property
    def bagua_buckets(self) -> list[PlanBucket]:
        """The buckets in which gradients, or weights, travel. Those of gradients follow, after the first synchronised
        pass, the order in which gradients came."""
        return self._layout.buckets

    def _wrap(self, algorithm: Algorithm | None) -> None:
        compare_ranks(self, algorithm, self._runner.voters)
        find_device(self, self._runner)
        take_state_of_rank_0(self, self._runner)
        if self.is_sharded and self._new_tuner is not None:  # each place of an island would decide for itself
            LOG.warning("This job does not tune itself: tuning is not for sharded models.")
            self._new_tuner = None
        if self._new_tuner is not None and self._tuner is None:  # a repeat keeps the tuner that there is
            self._tuner = self._new_tuner(self, self._layout, self._runner, self._session)
        self._reset_algorithm()

    def _reset_algorithm(self, alone: bool = False) -> None:
        """Tensors, buckets, plans and hooks, all made anew by the algorithm. ``alone``: on a newcomer, while the others
        wait for it."""
        self._remove_hooks()
        if self.is_sharded:
            show_parts(self.module)
        self._layout.make()
        self.exchanged = self.bagua_algorithm.exchanged
        self._renewal.begin()
        buckets = self._layout.gradient_buckets
        adding = any(bucket.plan is not None and adds_up(bucket.plan) for bucket in buckets)
        if self.is_sharded and (beside := self.trained_beside_buckets()):
            raise ConfigError(
                f"Parameter {beside[0][0]} gets sparse gradients, which do not go between islands: make Embedding with "
                "sparse=False. [BG618]"
            )
        if adding and self.is_sharded:  # FSDP adds to ``.grad`` past the hooks that tell results from what was added
            raise ConfigError(
                f"{type(self.bagua_algorithm).__name__} sums gradients of a sharded model up: leave average=False out, "
                "and multiply the loss by bagua.get_replica_count(). [BG618]"
            )
        learns = self._layout.wants_arrival()
        recorded = learns or not all(bucket.may_run_twice for bucket in buckets)
        self.passes.step = None
        self._replica_check = ReplicaCheck(self, self._runner)
        if self._steps is not None and not (buckets and all(bucket.shows for bucket in buckets)):
            raise ConfigError(
                f"step_in_backward=True can't be used with {type(self.bagua_algorithm).__name__}, which does not fill "
                "the optimizers' gradients in backward. Choose an algorithm that exchanges gradients, or leave it out. "
                "[BG605]"
            )
        if buckets:
            make: Callable[..., TrainingStep] = TrainingStep
            if self._steps is not None:
                make = functools.partial(SteppingInBackward, self._steps)
            self.passes.step = make(
                buckets,
                vote=self._runner.vote,
                earlier=self._earlier_results if adding else None,
                on_finished=self._record,
                clock=self._runner.clock,
                rearrange=(self._layout.follow if learns else _stay) if recorded else None,
            )
        self.shadow.adding = adding
        sparse = self.trained_beside_buckets()
        refuse_sparse([name for name, _ in sparse], self.bagua_algorithm, False, adding)
        self.passes.sparse = SparseGradients(sparse, self._runner, self.passes.step) if sparse else None
        self.shadow.use_uneven(self.shadow.uneven)
        # Smaller models leave no holes that are worth a look.
        largest = max((one.nbytes for _, one in self.trained() if one.device.type == "cpu"), default=0)
        self.passes.trimmer = HeapTrimmer() if largest >= HeapTrimmer.SMALLEST else None
        self._install_hooks()
        if not alone:
            self._runner.make_twins(self.bagua_algorithm.communicators(), self.bagua_buckets)

    @property
    def _record(self) -> Record:
        """Gets the times of each pass. Those without the batches of some ranks are no measure for settings, and their
        replicas differ until the end of the block."""
        alone = self._runner.record
        found = alone if self._recorder is None else self._recorder.also(alone)
        tuned = found if self._tuner is None else self._tuner.also(found)

        def record(times: Sequence[Times], begin: Any, end: Any) -> None:
            complete = self.shadow.complete
            (tuned if complete else found)(times, begin, end)
            self._replica_check.after_exchange(comparable=complete and self.bagua_algorithm.alike)

        return record

    def begin_anew(self, with_optimizers: bool = True) -> None:
        """Begins as at wrap time, but buffers stay as they are, and so do optimizers where their state is the same on
        all ranks. See ``ModelRenewal``."""
        self._renewal.follow()  # members may have changed once more, since it was begun
        self._give_back()
        if self.is_sharded:
            show_parts(self.module)
        broadcast_tensors([local_part(whole_of(one)) for _, one in self.trained()], self._session, self._group)
        if with_optimizers:
            broadcast_optimizers(self.bagua_optimizers, self._session, self._group)
        self._reset_algorithm()

    def _give_back(self) -> None:
        """Memory goes back, and is there for all ranks of this host before they make buckets again."""
        if self._runner.vote.repeats:
            self._layout.release()  # communicators stay: other ranks may be in an operation on them
            self._runner.give_own_again()
        else:
            self._release()
        self._group.barrier()

    def _install_hooks(self) -> None:
        algorithm = self.bagua_algorithm
        self._on_input = algorithm.init_forward_pre_hook(self)
        passes = self.passes
        passes.at_end = algorithm.init_post_backward_hook(self)
        on_gradient = algorithm.init_backward_hook(self)
        if self._guest.idle and passes.step is not None:  # the shortest way: nobody asks a guest that has nothing
            if on_gradient == self.mark_ready:
                on_gradient = passes.step.mark_ready
            if passes.at_end == self.finish_backward:
                passes.at_end = passes.step.finish
        if passes.sparse is not None:
            passes.at_end = functools.partial(passes.sparse.finish_after, passes.at_end)
        if self._recorder is not None:
            on_gradient = self._recorder.noting(on_gradient)
            self._handles += self._recorder.watch(self.module)
        self._on_step = algorithm.init_post_optimizer_step_hook(self)
        self._watch_optimizers()
        add = self._handles.append
        # Before FSDP's own, which puts whole parameters in the place of parts: a step may begin with new buckets.
        first = ModuleHook(self.module, self._before_forward)
        add(self.module.register_forward_pre_hook(first, prepend=self.is_sharded))
        add(self.module.register_forward_hook(ModuleHook(self.module, passes.after_forward)))
        trained, parameters = self.trained(), self.bagua_build_params()
        passes.parameters = [cast("torch.nn.Parameter", whole_of(one)) for _, one in trained]
        if self._session.weights.batch != 1.0:
            passes.install_weights()
        passes.untracked = UntrackedParameters(self.module, self.parameters_to_ignore, passes.parameters)
        self._handles += passes.untracked.watch()
        if passes.sparse is not None:
            for name, parameter in self.trained_beside_buckets():
                hook = GradientHook(passes.after_gradient, passes.sparse.note, name)
                add(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        late = frozenset[str]()
        if self.is_sharded:
            means = IslandMeans(parameters)
            late = means.names
            mark, finish = on_gradient, passes.at_end

            def average() -> None:
                weight = 1.0 if passes.step is None else passes.step.weight
                means.finish(passes.accumulated > 0, weight, mark, finish)

            passes.at_end = average
        for name, parameter in parameters:
            if self.shadow.adding:
                self._handles += self._earlier_results.watch(parameter)
            if isinstance(parameter, Shard):
                add(parameter.whole.register_post_accumulate_grad_hook(divide_gradient))
            hook = GradientHook(passes.after_gradient, _ignore if name in late else on_gradient, name)
            add(whole_of(parameter).register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _watch_optimizers(self) -> None:
        """Installs the hooks of optimizers, once: they stay when the model begins anew, which may happen in one of
        them."""
        if self._optimizer_handles:
            return
        add = self._optimizer_handles.append
        for optimizer in self.bagua_optimizers:
            add(optimizer.register_step_pre_hook(self._before_step))
            add(optimizer.register_step_post_hook(self._after_step))
            if isinstance(optimizer, torch.optim.LBFGS):
                add(optimizer.register_step_pre_hook(functools.partial(average_losses, self._reduce_loss)))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.passes.remove_weights()

    def close(self, alone: bool = False) -> None:
        """Ends the exchange: the model is an ordinary one again. All ranks must do it in the same order relative to
        other wraps.

        ``alone``: after an error that other ranks need not have. Then this rank does not wait for them; operations that
        are under way get ``ALONE_S`` seconds together to end, and what they bring is lost."""
        self._session.forget_end(self)
        if self._closed:
            return
        self._closed = True
        keepers(self._session).forget(self._state)
        if self._session.elastic:
            units(self._session).admission.forget(self._state)
        self._let_go()
        if self._tuner is not None:
            self._tuner.close()
        if alone:
            self._leave()
        else:
            self.bagua_algorithm.close()
            self._release()
        self._renewal.end()
        self._remove_hooks()  # it may have begun anew meanwhile

    def _let_go(self) -> None:
        """Module and optimizers are ordinary ones."""
        self._remove_hooks()
        for handle in self._optimizer_handles:
            handle.remove()
        if self._steps is not None:
            self._steps.close()

    def become_ordinary(self) -> None:
        """Lets a forked child do with its copy of the module what it likes."""
        self._closed = True
        self._let_go()

    def _release(self) -> None:
        """Memory and communicators go back, once operations are over. Where ranks are not in step (on communicators of
        the algorithm's own) those that are behind catch up, or the others would wait for ever."""
        # A session that has ended has ended all operations.
        if self._runner.has_own and self._session is CURRENT.session:
            with suppress(CommunicationError):  # a rank that has left ends operations that wait for it
                self._runner.vote.together(self._layout.compare_starts, show=lambda _: self._renewal.end())
                self._layout.level_out()
        self._layout.release()
        self._runner.release()

    def _leave(self) -> None:
        """Ends as ``close``, without the others."""
        until = time.monotonic() + ALONE_S
        for bucket in self.bagua_buckets:
            bucket.execution.leave(until)
        with self._session.connection.patience(ALONE_S), suppress(CommunicationError):
            self.bagua_algorithm.close()  # finds nothing under way
        self._layout.release()
        self._runner.release()

    def own_communicator(self) -> Communicator:
        """See ``bagua.algorithms.base.DataParallel``. From then on the model lives until it is closed, or this rank
        leaves the job: others may wait for its part in closing."""
        self._session.end_first(self, self.close)
        return self._runner.own_communicator()

    # In a training step

    def _before_forward(self, _: torch.nn.Module, inputs: Any) -> None:
        self.passes.check()
        if not self.module.training:  # evaluation exchanges nothing
            return
        self.shadow.tell_forward()
        if torch.is_inference_mode_enabled():  # memory that is made here is written in training, too
            with torch.inference_mode(False), torch.no_grad():
                self._begin_step(inputs)
        else:
            self._begin_step(inputs)
        if torch.is_grad_enabled():
            self.passes.synced_by_forward = self.require_backward_grad_sync  # as DDP decides, too
            self.passes.begun = self.passes.begun or self.require_backward_grad_sync
        if self._tracer.recording is not None:
            self._tracer.recording.enclose(self, "forward", begin=True)

    def _begin_step(self, inputs: Any) -> None:
        # A pass that accumulates is inside of a step.
        if self._between_steps is not None and self.require_backward_grad_sync:
            self._renewal.thread = threading.get_ident()
            self._between_steps(marked=False)
        if self._tuner is not None and self.require_backward_grad_sync and self.shadow.complete:
            self._tuner.between_steps()
        self._tracer.look(self)
        self._session.statistics.begin_step(time.monotonic_ns())
        self.bagua_train_step_counter += 1
        self._renewal.follow()
        if self.bagua_algorithm.need_reset() or self._renewal.due:
            self._renewal.reset_together()
        if self.broadcast_buffers and self.require_backward_grad_sync:
            block = self.shadow.uneven
            self._buffers.run(self._runner.voters, 0 if block is None else block.root)  # islands have no such block
        self._on_input(inputs)

    @beside_graphs
    def _before_step(self, *_: Any) -> None:
        self.passes.untracked.refuse_registered()

    @beside_graphs
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # torch's ``get_state_dict`` makes such a step of an optimizer without state, where one rank alone may call it.
        if not self.passes.accumulated and all(group["lr"] == 0 for group in optimizer.param_groups):
            return
        self._on_step(optimizer)
        if optimizer is self.bagua_optimizers[-1]:  # its step ends the training step
            self.passes.accumulated = 0
            if self.passes.begins_after_step:
                self._begin_late()

    def _begin_late(self) -> None:
        """Begins the step late, but not while ranks have different numbers of batches: those without any would have to
        be told."""
        if self.shadow.uneven is None:
            self.passes.begins_after_step = False
            with torch.enable_grad():
                self._begin_step(())

    @property
    def _group(self) -> Communicator:
        return self._runner.everyone

    @property
    def steps_in_backward(self) -> bool:
        """True if optimizers step inside backward."""
        return self._steps is not None

    @property
    def in_backward(self) -> bool:
        """True if a backward pass of this model runs now."""
        return self.passes.under_way

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if a backward pass now would exchange anything. Programs set it as they set that of torch's DDP."""
        return self.passes.exchanges

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self.passes.exchanges = wanted

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block only accumulate on this rank; the next one outside exchanges the whole."""
        return self.passes.no_sync()

    def follow_parameters(self) -> None:
        """Parameters that are trained now, and were not when the model was wrapped, are exchanged from now on; the
        algorithm goes on. All ranks call it between the same two steps. Raises BaguaError, on every rank, if they train
        different ones."""
        if self.passes.untracked.found():
            self._runner.vote.together(lambda: compare_ranks_again(self, self._runner.voters))
            self._renewal.reset_together()

    def recut(self, cuts: Cuts) -> bool:
        """Cuts buckets anew; each element keeps its state. All ranks call it between the same two steps. False, on all
        of them, where that can't be now: see ``ModelBuckets.may_be_cut``."""
        if not self._layout.may_be_cut or self._runner.on_device:
            return False
        recut(self._runner, self._layout, cuts, self._renewal.follow, self._use_buckets)
        return True

    def _use_buckets(self) -> None:
        if self.passes.step is not None:
            self.passes.step.use(self._layout.gradient_buckets)

    # Newcomers: see ``ModelState``

    def tell_newcomers(self) -> dict[str, Any]:
        return {
            "steps": self.bagua_train_step_counter,
            "passes": self._session.connection.passes,
            "exchanges": self._replica_check.exchanges,
            "arrival": self._layout.arrival,
            "cuts": self._layout.wanted_cuts,
            "tuner": None if self._tuner is None else self._tuner.tell_newcomers(),
            **self._renewal.tell_newcomers(),
        }

    def follow_as_newcomer(self, told: dict[str, Any]) -> None:
        if self._tuner is not None and told["tuner"] is not None:
            self._tuner.follow_as_newcomer(told["tuner"])
        with self._session.memory.reusing():  # the others wait
            self._layout.release()
            self._layout.follow_alone(told["arrival"], told["cuts"])
            self._reset_algorithm(alone=True)
        self._replica_check.exchanges = told["exchanges"]
        # A count of its own would say nothing of steps once those who have begun with the job are lost.
        self._session.connection.passes = told["passes"]
        self._renewal.follow_as_newcomer(told)
        self.bagua_train_step_counter = told["steps"]

    # Checkpoints: see ``ModelState``

    def go_back(self, told: dict[str, Any]) -> None:
        self._give_back()
        # Before the buckets are made: they get the order of the checkpoint.
        self._layout.arrival = list(told["arrival"])
        self._reset_algorithm()
        self._renewal.follow_as_newcomer(told)
        self.bagua_train_step_counter = told["steps"]

    def gone_back(self, ranks: int, anew: bool) -> None:
        self._renewal.go_back(ranks, anew)

    @beside_graphs
    def _reduce_loss(self, loss: float) -> float:
        if self.exchanged != GRADIENT:  # replicas differ where weights are exchanged: each has its own loss
            return loss
        total = torch.tensor([loss], dtype=torch.float64, device="cpu")
        self._runner.voters.allreduce_inplace(total, ReduceOp.SUM if self.shadow.adding else ReduceOp.AVG)
        return total.item()

    def mark_ready(self, name: str, parameter: torch.nn.Parameter) -> None:
        """The gradient of this parameter is complete on this rank; full buckets of gradients are submitted."""
        if not self._guest.mark(parameter):
            self.mark_gradient(name, parameter)

    def mark_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if self.passes.step is not None:
            self.passes.step.mark_ready(name, parameter)

    def finish_backward(self) -> None:
        """Submits the rest of the buckets of gradients, waits for all and shows the results in ``.grad``. Then the same
        for buckets of other tensors that the algorithm registered."""
        self.finish_gradients()
        self._guest.finish()

    def finish_gradients(self) -> None:
        """``finish_backward`` in buckets of gradients alone."""
        if self.passes.step is not None:
            self.passes.step.finish()

    def join(
        self,
        buckets: Sequence[Bucket] | bool | None = None,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        divide_by_initial_world_size: bool = True,
    ) -> Any:
        """``with model.bagua_ddp.join():`` around a loop over batches, of which ranks have different numbers: see
        ``bagua.join``. The first argument may be ``divide_by_initial_world_size``, as in torch's DDP.

        For algorithms: waits for ``buckets`` that have been started (None: all of the model), and runs the rest of
        their plans, in an order that is the same on all ranks. Faster than joining them one by one where plans have
        several steps."""
        if isinstance(buckets, bool):  # torch's DDP has its first argument there
            divide_by_initial_world_size, buckets = buckets, None
        begin = self._runner.clock()
        times = self._join_buckets(self.bagua_buckets if buckets is None else cast("Sequence[PlanBucket]", buckets))
        if times:
            self._runner.record(times, begin, self._runner.clock())
        if buckets is not None:
            return None
        return join_models([self], divide_by_initial_world_size, enable, throw_on_early_termination)

    def exchange(self) -> None:
        buckets = self.bagua_buckets
        with torch.no_grad():
            for bucket in buckets:
                bucket.start()
            self._join_buckets(buckets)

    def settle(self, meanwhile: Callable[[], None], finish: Callable[[], None]) -> None:
        """See ``bagua.algorithms.base.DataParallel``."""
        with torch.no_grad():
            if not self._runner.vote.repeats:  # in an elastic job a loss may end any operation that is not in a unit
                self._session.connection.barrier(self._group.id, meanwhile=meanwhile)
            self._runner.vote.together(self._layout.compare_starts)
            finish()
            self._layout.run_as_often()
            weights = [tensor for bucket in self.bagua_buckets for tensor in bucket.tensors]
            torch._foreach_copy_(weights, self._runner.vote.together(lambda: self._means(weights)))

    def _means(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Clones: an attempt may be repeated.
        means = [one.detach().clone(memory_format=torch.contiguous_format) for one in tensors]
        for mean in means:
            self._group.allreduce_inplace(mean, ReduceOp.AVG)
        return means


_MODELS: weakref.WeakSet[DistributedModel] = weakref.WeakSet()  # weak: a model that is dropped goes


def _stay(_: list[str], __: bool) -> None:
    """Buckets stay as they are: the order of gradients is known."""


def _ignore(_: str, __: torch.Tensor) -> None:
    """A gradient came that is exchanged at the end of the pass."""


def _in_child() -> None:
    for model in list(_MODELS):
        model.become_ordinary()


os.register_at_fork(after_in_child=_in_child)


def join_models(
    models: Sequence[DistributedModel], divide_by_initial_world_size: bool, enable: bool, throws: bool
) -> AbstractContextManager[object]:
    """The block in which ranks have different numbers of batches. Its beginning raises ConfigError for models that
    can't be in one."""
    return Uneven([model.shadow for model in models], divide_by_initial_world_size, throws) if enable else nullcontext()
