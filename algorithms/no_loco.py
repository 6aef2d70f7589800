"""NoLoCo: outer steps on the mean of a random pair, no collective at all."""

from __future__ import annotations

import torch

from bagua.algorithms.base import Algorithm, Bucket, Communicator, DataParallel, ProcessGroup
from bagua.algorithms.checks import check_count, check_positive, check_share
from bagua.algorithms.codec import Codec
from bagua.algorithms.diloco import VELOCITY
from bagua.algorithms.periodic import ANCHOR, PeriodicImpl
from bagua.algorithms.plan import COPY, SCRATCH, WEIGHT, AllReduce, Local, Plan
from bagua.algorithms.warm_up import WarmUp
from bagua.algorithms.weights import copy_weights, set_weights

MIXED = "mixed"  # Slot: what a rank sends, and the pair's mean of it


class NoLoCoAlgorithmImpl(PeriodicImpl):
    """``NoLoCoAlgorithm`` at work on one model. ``round``: exchanges so far, the same on all ranks."""

    newcomers_take = ("steps", "exchanged", "round")

    def __init__(self, process_group: ProcessGroup, settings: NoLoCoAlgorithm) -> None:
        super().__init__(process_group, settings.interval, settings.warm_up)
        self.settings = settings
        self.round = 0

    def plan_weights(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Steps: prepare the message, average it over the pair, apply the outer step."""
        bucket.add_slot(ANCHOR, communicated=False, on_change=COPY)  # of one rank, as the weights
        copy_weights(bucket, ANCHOR)
        bucket.add_slot(VELOCITY, communicated=False, on_change=COPY)
        bucket.add_slot(MIXED, on_change=SCRATCH)
        mix = Local(self.mix, "mix", reads=(ANCHOR, WEIGHT), writes=(MIXED,))
        average = AllReduce("AVG", src=MIXED, dst=MIXED, codec=self.settings.codec, over=self.draw)
        step = Local(self.outer_step, "outer step", reads=(MIXED,), writes=(ANCHOR, VELOCITY, WEIGHT))
        bucket.set_plan(Plan((mix, average, step)))

    def after_step(self, bagua_ddp: DataParallel, step: int) -> None:
        """Draws the pairs of this round and exchanges."""
        if self.due(step):
            bagua_ddp.exchange()
            self.round += 1

    def draw(self) -> Communicator | None:
        """This rank's pair (or the ranks of its pair of hosts) in the present round; None if it is the odd one."""
        group = self.process_group
        ranks = group.get_global_communicator().ranks
        me = ranks[group.get_global_communicator().rank()]
        units = group.hosts if self.settings.hierarchical else tuple((rank,) for rank in ranks)
        # Seeds lie far apart: rounds of one are not those of the next.
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.round)
        # The CPU's generator, whatever torch's default device is.
        order = torch.randperm(len(units), generator=generator, device="cpu").tolist()
        for at in range(0, len(order), 2):
            members = sorted(rank for unit in order[at : at + 2] for rank in units[unit])
            if me in members:
                return group.communicator(members) if len(members) > 1 else None
        raise AssertionError(f"Rank {me} is on none of the group's hosts {group.hosts}.")

    def mix(self, bucket: Bucket) -> None:
        """MIXED = β Δ + γ φ, with Δ = x - φ: the mean of both over the pair, for the price of one."""
        anchor, beta, gamma = bucket.slot(ANCHOR), self.settings.outer_lr, self.settings.consensus
        mixed = bucket.slot(MIXED)
        for weight, part in zip(bucket.views(WEIGHT), bucket.views(MIXED), strict=True):
            torch.mul(weight, beta, out=part)
        mixed.add_(anchor, alpha=gamma - beta)

    def outer_step(self, bucket: Bucket) -> None:
        """The modified Nesterov step; weights become the anchor."""
        anchor, velocity = bucket.slot(ANCHOR), bucket.slot(VELOCITY)
        # MIXED has γ φ in it: what remains is γ (mean(φ) - φ).
        velocity.mul_(self.settings.outer_momentum).add_(bucket.slot(MIXED))
        velocity.add_(anchor, alpha=-self.settings.consensus)
        anchor.add_(velocity)
        set_weights(bucket, ANCHOR)


class NoLoCoAlgorithm(Algorithm):
    """H local steps, then an outer step in which each rank talks to one other, drawn anew each time.

    Kolehmainen et al., "NoLoCo: no-all-reduce low communication training method for large models", 2025. With φ_i rank
    i's anchor (its weights after its last outer step), x_i its weights H steps later, and means over the pair alone:

        Δ_i = x_i - φ_i;   δ_i = α δ_i + β mean(Δ) - γ (φ_i - mean(φ));   φ_i = φ_i + δ_i;   x_i = φ_i

    The last term, which DiLoCo has no need of, draws the pair's anchors together. Ranks share a seed, draw the same
    pairs and need no talk about them. A pair has one message per outer step: b bytes of weights out of and into each
    rank, b/H per step, whatever the number of ranks; nobody waits for a third. Replicas agree only about: take any of
    them, or their mean, at the end. With an odd number of ranks one sits out each round.

    Choose it for many hosts on links of different or doubtful speed, where an all-reduce waits for the slowest. On two
    ranks it is DiLoCo without Nesterov's look-ahead.

    Args:
        interval: H.
        outer_lr: β.
        outer_momentum: α.
        consensus: γ, between α and √(2 + α²), or anchors drift apart.
        hierarchical: Pairs of hosts instead of ranks: all ranks of both take the mean, and one message crosses.
        seed: Of the pairs; the same on all ranks.
        warmup_steps: Optimizer steps with gradient all-reduce before the first local one.
        codec: "fp16", "bf16" or None. Coarser ones are refused: weights themselves travel, and pairs have no common
            reference to send differences to.
        warmup_codec: How gradients are encoded between hosts in the warm-up; None: as they are.
    """

    def __init__(
        self,
        interval: int = 16,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        consensus: float = 1.0,
        hierarchical: bool = False,
        seed: int = 0,
        warmup_steps: int = 0,
        codec: Codec | str | None = None,
        warmup_codec: Codec | str | None = None,
    ) -> None:
        self.interval = check_count("interval", interval, 1)
        self.outer_lr = check_positive("outer_lr", outer_lr)
        self.outer_momentum = check_share("outer_momentum", outer_momentum)
        self.consensus = check_positive("consensus", consensus)
        if not outer_momentum < consensus < (2 + outer_momentum**2) ** 0.5:
            raise ValueError(
                f"consensus is {consensus}: with outer_momentum {outer_momentum} it must lie between that and "
                f"{(2 + outer_momentum**2) ** 0.5:.3f}, or the ranks' weights drift apart. [BG302]"
            )
        self.hierarchical = hierarchical
        self.seed = check_count("seed", seed, 0)
        self.warm_up = WarmUp.of(warmup_steps, warmup_codec)
        self.codec = Codec.of(codec)
        if self.codec is not None and self.codec.name not in ("fp16", "bf16"):
            raise ValueError(
                f"NoLoCo sends weights, and codec {self.codec.name!r} would round them coarsely: choose 'fp16', 'bf16' "
                "or None. [BG303]"
            )

    def reify(self, process_group: ProcessGroup) -> NoLoCoAlgorithmImpl:
        return NoLoCoAlgorithmImpl(process_group, self)
