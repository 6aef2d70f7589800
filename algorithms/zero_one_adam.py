"""0/1 Adam: variance from full gradients that come ever more rarely, otherwise one bit per element, and local steps."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from bagua.algorithms.base import Algorithm, Bucket, Communicator, DataParallel, ProcessGroup
from bagua.algorithms.checks import check_count
from bagua.algorithms.codec import Codec
from bagua.algorithms.frozen_adam import FrozenAdam
from bagua.algorithms.periodic import ANCHOR, DELTA, PeriodicImpl, plan_differences
from bagua.algorithms.plan import GRADIENT, RESULT, SCRATCH, WEIGHT, AllReduce, Local, Plan
from bagua.algorithms.weights import codec_of_differences, find_optimizer, set_weights, wholes

MEETING, MET = "meeting", "met"  # Slots of one element, for a step that all ranks have a part in

SCALE, SCALED = "scale", "scaled"  # Slots: 1 / D of each element, and the gradient times that


class ZeroOneAdamOptimizer(FrozenAdam):
    """The optimizer of ``ZeroOneAdamAlgorithm``.

    For ``var_freeze_step`` steps it is Adam whose variance takes part in some steps only: spacings are 1 for the first
    ``var_update_scaler`` updates, then 2 for as many, 4, and so on. Then variance is frozen, and steps are local.

    Args:
        var_freeze_step: At least 1. A quarter of the training, and no earlier than the learning rate's rise ends.
        var_update_scaler: Updates of the variance before their spacing doubles. In a training of some hundreds of steps
            choose var_freeze_step, so that all steps before the freeze are full: there one bit of a gradient, which is
            noisier than momentum, costs accuracy.
        local_step_scaler: Steps after which the number of local steps between exchanges doubles; it begins with 1.
        local_step_clipper: The largest number of local steps, a power of two.
        lr, betas, eps, weight_decay: As in torch's AdamW (weight decay is decoupled).
        floor: Frozen denominators are at least this share of their parameter's root mean square.
    """

    progress = (*FrozenAdam.progress, "moved", "decayed")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        var_freeze_step: int = 100,
        var_update_scaler: int = 16,
        local_step_scaler: int = 100,
        local_step_clipper: int = 4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        floor: float = 0.1,
    ) -> None:
        self.var_freeze_step = check_count("var_freeze_step", var_freeze_step, 1)
        self.var_update_scaler = check_count("var_update_scaler", var_update_scaler, 1)
        self.local_step_scaler = check_count("local_step_scaler", local_step_scaler, 1)
        self.local_step_clipper = check_count("local_step_clipper", local_step_clipper, 1)
        if local_step_clipper & (local_step_clipper - 1):
            raise ValueError(f"local_step_clipper is {local_step_clipper}: choose a power of two. [BG302]")
        super().__init__(params, lr, betas, eps, weight_decay, floor)

    def updates_variance(self, step: int) -> bool:
        """True if the gradient of this step (from 1) changes the variance, and so travels in full precision."""
        spacing = 1 << ((step - 1) // self.var_update_scaler + 1).bit_length() - 1
        # Spacings before this one took scaler · (1 + 2 + ... + spacing / 2) steps.
        first = 1 + self.var_update_scaler * (spacing - 1)
        return (step - first) % spacing == 0

    def exchanges(self, local_step: int) -> bool:
        """True if ranks exchange weights after this step since the freeze (from 1)."""
        doublings = min((local_step - 1) // self.local_step_scaler, self.local_step_clipper.bit_length() - 1)
        return local_step % (1 << doublings) == 0

    def freezes_after(self) -> int:
        return self.var_freeze_step

    def warm_step(self, group: dict[str, Any]) -> None:
        """A step of Adam from the ranks' mean gradient. Denominators have their floor already: one bit per element has
        the size of the others' gradients, also where there was none."""
        self.observe(group, with_variance=self.updates_variance(group["steps"] + 1))
        parameters, _, momenta, _ = self.lists(group)
        stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
        self.move(group, parameters, momenta, [self.denominator(group, parameter) for parameter in stepped])

    def frozen_step(self, group: dict[str, Any]) -> None:
        """u = β1 u + (1-β1) g / D; x = x - η u. What the step moves is noted; weight decay waits for the exchange."""
        parameters, gradients, momenta, scales = self.lists(group)
        beta = group["betas"][0]
        group["steps"] += 1
        rate = group["lr"] / (1 - beta ** group["steps"])
        group["moved"] += rate
        group["decayed"] += group["lr"] * group["weight_decay"]
        if parameters:
            torch._foreach_mul_(momenta, beta)
            torch._foreach_addcmul_(momenta, gradients, scales, 1 - beta)
            torch._foreach_add_(parameters, momenta, alpha=-rate)

    def meet(self, group: dict[str, Any], parameter: torch.Tensor, anchor: torch.Tensor, moved: torch.Tensor) -> None:
        """``moved``: the ranks' mean of what the parameter has lost since the last exchange; ``anchor``: its value
        then. Momentum becomes what would have moved it so; the anchor becomes where it is now, decayed."""
        momentum, _ = self.moments(parameter)
        if group["moved"]:  # with a learning rate of 0 nothing has moved
            torch.div(moved, group["moved"], out=momentum)
        anchor.sub_(moved).mul_(1 - group["decayed"])

    def met(self) -> None:
        """Notes that the exchange is over."""
        for group in self.param_groups:
            group["moved"] = group["decayed"] = 0.0


class ZeroOneAdamAlgorithmImpl(PeriodicImpl):
    optimizer: ZeroOneAdamOptimizer
    takes_sparse = False

    def __init__(
        self, process_group: ProcessGroup, optimizer: ZeroOneAdamOptimizer | None, codec: Codec | None
    ) -> None:
        super().__init__(process_group, interval=1)
        self._given = optimizer
        self.codec = codec

    def init_tensors(self, bagua_ddp: DataParallel) -> list[torch.nn.Parameter]:
        """Finds the optimizer, too. Raises ValueError without it, or if it lacks parameters."""
        self.optimizer = find_optimizer(bagua_ddp, ZeroOneAdamOptimizer, self._given, alone=True)
        self.exchanged = self._phase()
        return super().init_tensors(bagua_ddp)

    def _phase(self) -> str:
        return WEIGHT if self.optimizer.frozen else GRADIENT

    def need_reset(self) -> bool:
        """True once the optimizer's variance has frozen, and when a state from before that has been loaded."""
        return self.exchanged != self._phase()

    def plan_gradients(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Gives the bucket one of two all-reduces, depending on whether the step has full precision. Before them all
        ranks exchange one element, which carries the list of who has a gradient.
        """
        everyone = self.process_group.get_global_communicator()

        def full() -> Communicator | None:
            return everyone if self._is_full() else None

        def encoded() -> Communicator | None:
            return None if self._is_full() else everyone

        bucket.add_slot(MEETING, 1, on_change=SCRATCH)
        bucket.add_slot(MET, 1, on_change=SCRATCH)
        bucket.add_slot(SCALED, on_change=SCRATCH)
        bucket.add_slot(SCALE, communicated=False, on_change=SCRATCH)
        scale = functools.partial(self._scale, wholes(bucket))
        steps = (
            # The mean carries the tail, which says who has a gradient: one of the next two is left out.
            AllReduce("AVG", src=MEETING, dst=MET),
            AllReduce("AVG", over=full),
            Local(scale, "g / D", reads=(GRADIENT, SCALE), writes=(SCALED, SCALE)),
            AllReduce("AVG", src=SCALED, dst=RESULT, codec=self.codec, over=encoded),
            Local(self._unscale, "D times the mean", reads=(RESULT, SCALE), writes=(RESULT,)),
        )
        bucket.set_plan(Plan(steps))

    def _is_full(self) -> bool:
        return self.codec is None or self.optimizer.updates_variance(self.optimizer.steps + 1)

    def _scale(self, parameters: list[torch.Tensor], bucket: Bucket) -> None:
        if not self._is_full():
            groups = self.optimizer.groups_by_parameter()
            for parameter, scale in zip(parameters, bucket.views(SCALE), strict=True):
                torch.reciprocal(self.optimizer.denominator(groups[parameter], parameter), out=scale)
            torch.mul(bucket.slot(GRADIENT), bucket.slot(SCALE), out=bucket.slot(SCALED))

    def _unscale(self, bucket: Bucket) -> None:
        if not self._is_full():
            bucket.slot(RESULT).div_(bucket.slot(SCALE))

    def plan_weights(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Steps: take how far the local steps moved, average it, and make momentum of it."""
        plan_differences(bucket, self.codec, functools.partial(self._meet, wholes(bucket)))

    def _meet(self, parameters: list[torch.Tensor], bucket: Bucket) -> None:
        groups = self.optimizer.groups_by_parameter()
        for parameter, anchor, moved in zip(parameters, bucket.views(ANCHOR), bucket.views(DELTA), strict=True):
            self.optimizer.meet(groups[parameter], parameter, anchor, moved)
        set_weights(bucket, ANCHOR)

    def after_step(self, bagua_ddp: DataParallel, step: int) -> None:
        """Exchanges where the optimizer's plan of local steps has it."""
        if self.optimizer.exchanges(self.optimizer.steps - self.optimizer.var_freeze_step):
            super().after_step(bagua_ddp, step)
            self.optimizer.met()


class ZeroOneAdamAlgorithm(Algorithm):
    """Adam with few full-precision steps, one bit per element in the others, and local steps once variance is frozen.

    Lu et al., "Maximizing communication efficiency for large-scale training via 0/1 Adam", 2022. ``bar`` is a mean over
    ranks, D = √v̂ + ε the denominator, η the rate with Adam's correction of momentum:

        until the freeze:  g = bar(g_i) in steps that change v, else D · bar(onebit(g_i / D + e_i));
                           m = β1 m + (1-β1) g;   x = x - η m / D
        after it:          u_i = β1 u_i + (1-β1) g_i / D;   x_i = x_i - η u_i
        when ranks meet:   Δ = bar(onebit(y - x_i + e_i));   y = x_i = y - Δ;   u_i = Δ / Σ η

    y are the weights after the last meeting, Σ η goes over the steps since. As in ``OneBitAdamAlgorithm`` what is
    encoded has been divided by D, where the paper divides after decoding: elements with small gradients would get the
    others' noise, divided by their own small D. What encoding lost is in the next message.

    With b bytes of gradients, 2(h-1)/h · b go in and out of each of h hosts in a full step, a 32nd of that in the
    others until the freeze, and a 32nd divided by the number of local steps after it. Each rank keeps, after the
    freeze, anchor and difference: twice the weights, and Adam's state. Between meetings replicas differ.

    Choose it like 1-bit Adam, where the network is slower still. ``.grad`` is the mean gradient until the freeze, this
    rank's own after it; use no GradScaler (bfloat16 needs none).

    Args:
        optimizer: The ``ZeroOneAdamOptimizer`` that steps the model; None: that among with_bagua's optimizers.
        codec: "onebit", or a finer one such as "int4"; None: float32, always.
    """

    def __init__(self, optimizer: ZeroOneAdamOptimizer | None = None, codec: Codec | str | None = "onebit") -> None:
        self.optimizer = optimizer
        self.codec = codec_of_differences(codec)

    def reify(self, process_group: ProcessGroup) -> ZeroOneAdamAlgorithmImpl:
        return ZeroOneAdamAlgorithmImpl(process_group, self.optimizer, self.codec)
