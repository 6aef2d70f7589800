"""Decentralised operations on buckets, as algorithms of the original append them; equal to our algorithms."""

import pytest
import torch
from training_scenarios.support import check_close_parameters

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from compat_scenarios.support import OfWeights, Reified, scenario, start, train


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


def check_equal_to(name, implementation, arguments, options, tolerance, steps=5, **settings):
    """Trains under an algorithm of the original's kind, and under ours of this name. Returns the former's buckets."""
    model, optimizer = start(Reified(implementation, *arguments), **options)
    ours, other = start(Algorithm.init(name, **settings))
    for step in range(steps):
        train(model, optimizer, step)
        train(ours, other, step)
        check_close_parameters(model, ours, tolerance, tolerance)
    return model.bagua_buckets


@scenario
def decentralised_with_copy_back():
    hosts = len(bagua.communication._get_default_group().hosts)
    for mode, flat, hierarchical in (
        ("all", False, False),
        ("all", True, True),
        ("shift_one", True, False),
        ("shift_one", True, True),
    ):
        units = hosts if hierarchical else bagua.get_world_size()
        if mode == "shift_one" and units % 2 and units > 1:
            with pytest.raises(ValueError, match=r"odd|even"):
                start(Reified(DecentralizedImpl, mode, hierarchical))
            continue
        settings = {"peer_selection_mode": mode, "hierarchical": hierarchical}
        options = {"do_flatten": flat}
        (bucket,) = check_equal_to("decentralized", DecentralizedImpl, (mode, hierarchical), options, 1e-5, **settings)
        assert bucket._peer_weight.numel() == bucket.flattened_tensor().numel()


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


@scenario
def ring_of_replicas():
    """Each rank by itself and hosts as one, as they are and in eight bits. Replicas are what their owners hold, bit for
    bit, on the first rank of each host."""
    hosts = bagua.communication._get_default_group().hosts
    for hierarchical, compression, tolerance in (
        (False, None, 1e-4),
        (True, None, 1e-4),
        (False, "MinMaxUInt8", 0.02),
        (True, "MinMaxUInt8", 0.02),
    ):
        settings = {"hierarchical": hierarchical, "codec": "minmax8" if compression else None}
        buckets = check_equal_to(
            "low_precision_decentralized", RingImpl, (hierarchical, compression), {}, tolerance, 4, **settings
        )
        units = [list(host) for host in hosts] if hierarchical else [[rank] for rank in range(bagua.get_world_size())]
        me = next(index for index, ranks in enumerate(units) if bagua.get_rank() in ranks)
        for bucket in buckets:
            own = bucket.flattened_tensor()
            everyone = torch.zeros(bagua.get_world_size(), own.numel())
            bagua.allgather(own, everyone)
            for replica, unit in ((bucket._weight, me), (bucket._left_peer_weight, me - 1)):
                if bagua.get_rank() == units[me][0]:
                    assert all(torch.equal(replica, everyone[rank]) for rank in units[unit])
