"""Names under which programs written for the original find things."""

from __future__ import annotations

import inspect

import pytest
import torch

import bagua.torch_api as bagua

EXPORTS = [
    *("init_process_group", "is_initialized", "destroy_process_group", "empty", "report", "send", "recv", "barrier"),
    *("broadcast", "allgather", "allgather_inplace", "allreduce", "allreduce_inplace", "alltoall", "alltoall_inplace"),
    *("gather", "gather_inplace", "reduce", "reduce_inplace", "reduce_scatter", "reduce_scatter_inplace", "scatter"),
    *("scatter_inplace", "ReduceOp", "BaguaModule", "get_local_rank", "get_local_size", "get_rank", "get_world_size"),
    *("communication", "algorithms", "data_parallel", "env", "alltoall_v", "alltoall_v_inplace", "get_backend"),
    "BaguaTensor",
]
OF_COMMUNICATION = [  # not exported, but reached through bagua.communication
    *("new_group", "from_torch_group", "broadcast_object", "broadcast_coalesced", "allreduce_coalesced_inplace"),
    *("BaguaProcessGroup", "get_communicator", "_get_default_group", "_rank_not_in_group", "_rank_not_in_comm"),
    *("_bagua_backend_comm", "_pg_group_ranks", "_pg_map", "_torch_to_bagua_pg_map", "CommMember", "comm"),
    *("start_autotune_server", "get_hyperparameters_service_client", "is_initialized", "get_backend"),
]
OF_CORE = [
    *("install_deps", "show_version", "BaguaTensorPy", "BaguaBucketPy", "BaguaCommBackendPy"),
    *("BaguaSingleCommunicatorPy", "DecentralizedFullPrecisionSynchronousPy"),
    "DecentralizedFullPrecisionAsynchronousPy",
]
SIGNATURES = {
    "init_process_group": "store rank world_size local_world_size",
    "send": "tensor dst comm",
    "recv": "tensor src comm",
    "broadcast": "tensor src comm",
    "reduce": "send_tensor recv_tensor dst op comm",
    "reduce_inplace": "tensor dst op comm",
    "allreduce": "send_tensor recv_tensor op comm",
    "allreduce_inplace": "tensor op comm",
    "allgather": "send_tensor recv_tensor comm",
    "allgather_inplace": "tensor comm",
    "gather": "send_tensor recv_tensor dst comm",
    "gather_inplace": "tensor count dst comm",
    "scatter": "send_tensor recv_tensor src comm",
    "scatter_inplace": "tensor count src comm",
    "reduce_scatter": "send_tensor recv_tensor op comm",
    "reduce_scatter_inplace": "tensor op comm",
    "alltoall": "send_tensor recv_tensor comm",
    "alltoall_inplace": "tensor comm",
    "barrier": "comm",
    "alltoall_v": "send_tensor send_counts send_displs recv_tensor recv_counts recv_displs comm",
    "alltoall_v_inplace": "tensor counts displs comm",
}


@pytest.mark.parametrize("name", EXPORTS)
def test_exported(name: str) -> None:
    assert hasattr(bagua, name) and name in bagua.__all__


@pytest.mark.parametrize("name", OF_COMMUNICATION)
def test_reached_through_communication(name: str) -> None:
    assert hasattr(bagua.communication, name) and name in bagua.communication.__all__


def test_bagua_core() -> None:
    import bagua_core

    assert sorted(bagua_core.__all__) == sorted(OF_CORE) and all(hasattr(bagua_core, name) for name in OF_CORE)
    assert bagua_core.BaguaSingleCommunicatorPy is bagua.communication.Communicator
    assert bagua_core.__version__ == __import__("bagua").__version__


def test_communicators_have_every_primitive() -> None:
    for name in SIGNATURES.keys() - {"init_process_group"}:
        parameters = inspect.signature(getattr(bagua.communication.Communicator, name)).parameters.values()
        theirs = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.name != "self"]
        assert theirs == SIGNATURES[name].split()[:-1], name
    assert bagua.communication.comm.WORLD is bagua.communication.CommMember.WORLD
    assert not bagua.communication.CommMember.NON_COMM_MEMBER


def test_there_is_no_tuning_service_of_a_job() -> None:
    with pytest.raises(NotImplementedError, match="bagua run --autotune"):
        bagua.communication.start_autotune_server(1234)
    with pytest.raises(NotImplementedError, match="bagua run --autotune"):
        bagua.communication.get_hyperparameters_service_client()


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(bagua, name)).parameters.values()
    ours = [p for p in parameters if p.kind is p.KEYWORD_ONLY]  # additions of ours, never in the way of old calls
    assert [p.name for p in parameters if p not in ours] == SIGNATURES[name].split()
    assert all(p.default is not p.empty for p in ours)
    assert getattr(bagua.communication, name) is getattr(bagua, name)


def test_reduce_ops_have_the_numbers_of_the_original() -> None:
    found = {op.name: op.value for op in bagua.ReduceOp}
    assert found == {"SUM": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "BOR": 7, "BAND": 8, "BXOR": 9, "AVG": 10}


def test_dotted_paths() -> None:
    from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, base
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
    from bagua.torch_api.data_parallel import BaguaDistributedDataParallel

    assert bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm is GradientAllReduceAlgorithm
    assert issubclass(GradientAllReduceAlgorithm, Algorithm) and base.AlgorithmImpl is AlgorithmImpl
    assert GlobalAlgorithmRegistry.available_algorithms() and BaguaDistributedDataParallel
    assert bagua.communication.is_initialized() is False


def test_modules_gain_with_bagua_and_its_properties() -> None:
    model = torch.nn.Linear(1, 1)
    parameters = inspect.signature(type(model).with_bagua).parameters
    own = ["step_in_backward", "autotune", "tune"]
    assert list(parameters) == ["self", "optimizers", "algorithm", "process_group", "do_flatten", *own]
    assert model.bagua_algorithm is None and model.bagua_buckets is None and model.bagua_optimizers is None
    assert model.bagua_module_name is None
    for name in dir(torch.nn.Module()):  # torch.compile reads them all
        getattr(torch.nn.Module(), name)
    model.bagua_module_name = "mine"
    assert model.bagua_module_name == "mine"


def test_calls_before_the_start_say_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        bagua.allreduce_inplace(torch.zeros(1))
    with pytest.raises(RuntimeError, match="init_process_group"):
        torch.nn.Linear(1, 1).with_bagua([], bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm())
    bagua.report(step=1)  # never fails the training
    bagua.destroy_process_group()
