"""On which device the ranks of a test train: "cpu"; "fake", CPU tensors through the GPU leg over the fake CUDA runtime;
"cuda", a real GPU, or several, which ranks share.

A test passes ``environment(device)`` to its ranks. Scenarios say ``placed(model)`` for the models that they make, and
``on_host(tensor)`` for what they compare, and are the same for all three.
"""

import os
import warnings

import torch

import bagua.csrc

VARIABLE = "BAGUA_TEST_DEVICE"
DEVICES = ("cpu", "fake", "cuda")
ROUTES = ("staged", "flat", "hierarchical")


def environment(device, route=""):
    """Variables for ranks that train there. ``route``: how operations travel; empty: as the leg chooses."""
    if device == "cpu":
        return {}
    bagua.csrc.load_device()  # built now, if it must be, and not in the time that a rank has
    found = {VARIABLE: device}
    if route:
        found["BAGUA_DEVICE_ROUTE"] = route
    if device == "fake":
        from native.leg import fakes

        found |= fakes.environment(fakes.build(fakes.cache_folder()))
    elif route != "staged":  # several ranks on one GPU: NCCL must take them for ranks of several hosts
        found["NCCL_SOCKET_IFNAME"] = "lo"
    return found


def prepare():
    """In a rank, before anything else."""
    device = os.environ.get(VARIABLE, "cpu")
    if device == "fake":
        from rig.ranks import fake_device

        # As if each host were a machine of its own, with a GPU for each rank.
        os.environ["NCCL_HOSTID"] = os.environ["NODE_RANK"]
        os.environ["FAKE_CUDA_BUS_ID"] = f"0000:{int(os.environ['LOCAL_RANK']) + 1:02x}:00.0"
        fake_device.install()
    elif device == "cuda":
        warnings.simplefilter("default")  # what torch warns of on some card is told, and is no failure
        # All hosts of a test are this machine: where ranks share a GPU, NCCL must take them for ranks of several.
        if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
            os.environ["NCCL_HOSTID"] = f"test-{os.environ['RANK']}"
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())


def device():
    """Where this process trains."""
    return torch.device("cuda" if os.environ.get(VARIABLE) == "cuda" else "cpu")


def placed(model):
    """``model``, moved to where this process trains; tensors that it is called with follow it there."""
    if os.environ.get(VARIABLE) != "cuda":
        return model
    model.register_forward_pre_hook(_move_inputs)
    return model.cuda()


def _move_inputs(_, inputs):
    return tuple(one.cuda() if isinstance(one, torch.Tensor) else one for one in inputs)


def on_host(tensor):
    """A copy on the CPU of what lies on a GPU."""
    return tensor.cpu()
