"""Decentralised operations on buckets, as algorithms of the original append them; equal to one process."""

import pytest
import torch

import bagua.torch_api as bagua
from compat_scenarios.support import (
    OfWeights,
    Reified,
    check_equal,
    gradients,
    mean,
    put,
    replicas,
    scenario,
    start,
    stepped,
    train,
    weights,
)


class DecentralizedImpl(OfWeights):
    def __init__(self, process_group, mode, hierarchical):
        super().__init__(process_group)
        self.mode = mode
        self.hierarchical = hierarchical

    def init_operations(self, bagua_ddp, bucket):
        bucket._peer_weight = bucket.flattened_tensor().ensure_bagua_tensor("peer_weight")
        bucket.clear_ops()
        bucket._operation = bucket.append_decentralized_synchronous_op(
            peer_weight=bucket._peer_weight,
            hierarchical=self.hierarchical,
            peer_selection_mode=self.mode,
            group=self.process_group,
        )

    def init_forward_pre_hook(self, bagua_ddp):
        def hook(input):
            for tensor in self.tensors:
                tensor.bagua_mark_communication_ready()

        return hook

    def init_post_backward_hook(self, bagua_ddp):
        def hook():
            bagua_ddp._bagua_backend.wait_pending_comm_ops()
            for bucket in bagua_ddp.bagua_buckets:
                bucket._operation.copy_back_peer_weight(bucket.backend_bucket)

        return hook


def partner(position, count, step):
    half = count // 2
    return (step + position) % half + half if position < half else (position - half - step) % half


def units(hierarchical):
    """Ranks that act as one: those of a host, or each by itself."""
    if hierarchical:
        return [list(host) for host in bagua.communication._get_default_group().hosts]
    return [[rank] for rank in range(bagua.get_world_size())]


def unit_of(rank, among):
    return next(index for index, ranks in enumerate(among) if rank in ranks)


def averaged(values, mode, step, among):
    n = len(among)
    if mode == "all":
        return [mean(values)] * len(values)
    found = []
    for rank in range(len(values)):
        own = unit_of(rank, among)
        together = {own, partner(own, n, step)} if n > 1 else {own}
        found.append(mean([values[other] for unit in sorted(together) for other in among[unit]]))
    return found


@scenario
def decentralised_with_copy_back():
    for mode, flat, hierarchical in (
        ("all", False, False),
        ("all", True, True),
        ("shift_one", True, False),
        ("shift_one", True, True),
    ):
        among = units(hierarchical)
        if mode == "shift_one" and len(among) % 2 and len(among) > 1:
            with pytest.raises(ValueError, match=r"odd|even"):
                start(Reified(DecentralizedImpl, mode, hierarchical))
            continue
        model, optimizer = start(Reified(DecentralizedImpl, mode, hierarchical), do_flatten=flat)
        simulated = replicas()
        for step in range(5):
            before, slopes = weights(simulated), gradients(simulated, step)
            put(simulated, stepped(averaged(before, mode, step, among), slopes))
            train(model, optimizer, step)
            check_equal(model, simulated[bagua.get_rank()])
        (bucket,) = model.bagua_buckets
        assert bucket._peer_weight.numel() == sum(parameter.numel() for parameter in model.parameters())


class RingImpl(OfWeights):
    """Low precision in a ring, with the default bucketing."""

    one_bucket = False

    def __init__(self, process_group, hierarchical, compression):
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.compression = compression

    def init_operations(self, bagua_ddp, bucket):
        for name in ("weight", "left_peer_weight", "right_peer_weight"):
            setattr(bucket, f"_{name}", bucket.flattened_tensor().to_bagua_tensor(name))
        bucket.clear_ops()
        bucket.append_low_precision_decentralized_synchronous_op(
            weight=bucket._weight,
            left_peer_weight=bucket._left_peer_weight,
            right_peer_weight=bucket._right_peer_weight,
            hierarchical=self.hierarchical,
            compression=self.compression,
            group=self.process_group,
        )

    def init_post_backward_hook(self, bagua_ddp):
        return lambda: None

    def init_post_optimizer_step_hook(self, bagua_ddp):
        def hook(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.is_bagua_tensor():
                        parameter.bagua_mark_communication_ready()
            bagua_ddp._bagua_backend.wait_pending_comm_ops()

        return hook


def ring_step(weights, moved, among):
    """x + L/3 + R/3 - 2/3 W for each rank, with x the mean of what its unit's ranks hold after their steps."""
    n = len(among)
    found = []
    for rank in range(len(weights)):
        own = unit_of(rank, among)
        left, right = weights[among[(own - 1) % n][0]], weights[among[(own + 1) % n][0]]
        x = mean([moved[other] for other in among[own]])
        found.append([v + a / 3 + b / 3 - 2 / 3 * w for v, a, b, w in zip(x, left, right, weights[rank], strict=True)])
    return found


def check_replicas(bucket, among):
    """The first rank of each unit has exact copies of itself and of its neighbours, bit for bit."""
    own = bucket.flattened_tensor()
    everyone = torch.zeros(bagua.get_world_size(), own.numel())
    bagua.allgather(own, everyone)
    me = unit_of(bagua.get_rank(), among)
    if bagua.get_rank() != among[me][0]:
        return
    assert torch.equal(bucket._weight, own)
    for replica, unit in ((bucket._left_peer_weight, me - 1), (bucket._right_peer_weight, me + 1)):
        for rank in among[unit % len(among)]:
            assert torch.equal(replica, everyone[rank]), f"the copy of rank {rank} is not what it holds"


@scenario
def ring_of_replicas():
    """Each rank by itself and hosts as one, as they are and in eight bits: those are a little off, and agree."""
    for hierarchical, compression, tolerance in (
        (False, None, 1e-4),
        (True, None, 1e-4),
        (False, "MinMaxUInt8", 0.02),
        (True, "MinMaxUInt8", 0.02),
    ):
        among = units(hierarchical)
        model, optimizer = start(Reified(RingImpl, hierarchical, compression))
        simulated = replicas()
        for step in range(4):
            before = weights(simulated)
            put(simulated, ring_step(before, stepped(before, gradients(simulated, step)), among))
            train(model, optimizer, step)
            check_equal(model, simulated[bagua.get_rank()], tolerance)
        for bucket in model.bagua_buckets:
            check_replicas(bucket, among)
