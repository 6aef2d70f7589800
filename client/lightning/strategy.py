"""``BaguaStrategy``: Lightning's DDPStrategy, whose gradients (or weights) a bagua algorithm exchanges."""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm, AsyncModelAverageAlgorithm
from bagua.base.algorithm_choice import parse
from bagua.base.errors import ConfigError
from bagua.lightning import sharded
from bagua.lightning.environment import is_rank
from bagua.lightning.newcomers import EpochLoader, FitState
from bagua.lightning.wrapped import StepModule
from bagua.torch_api.compat.distributed_data_parallel import to_bagua_process_group
from bagua.torch_api.data.elastic_loader import ElasticLoader
from bagua.torch_api.data.torch_samplers import share_out
from bagua.torch_api.job.session import current

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment
    from lightning.pytorch.strategies import DDPStrategy

MEANS = ("mean", "avg")


def bagua_strategy(base: type[DDPStrategy], environment: type[ClusterEnvironment]) -> type[DDPStrategy]:
    """``BaguaStrategy`` over the DDPStrategy of one package of Lightning."""

    class BaguaStrategy(base):  # type: ignore[misc]
        """Trains on several ranks, which a bagua algorithm keeps alike.

        Under ``bagua run`` or torchrun each process is a rank. Otherwise ``Trainer(devices=N)`` starts N processes, and
        the first of them a daemon.

        Args:
            algorithm: A name, such as "bytegrad"; a name with arguments, "local_sgd:interval=4"; or an ``Algorithm``.
                None: that of environment variable BAGUA_ALGORITHM (``bagua run --algorithm``), else gradient
                all-reduce. "qadam", "one_bit_adam" and "zero_one_adam" need their own optimizer from
                ``configure_optimizers``.
            flatten: Accepted, and without effect.
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As for DDPStrategy.
            start_method: How ``Trainer`` starts processes where no launcher did: "popen", "spawn", "fork" or
                "forkserver".
            broadcast_buffers: Buffers (statistics of BatchNorm) become rank 0's before each training step. None: as
                DDPStrategy does it, but not with "async", whose ranks don't wait for each other.
            tensor_parallel_size: In jobs with islands (``bagua run --island-size``): ranks of an island that divide
                matrices among them. ``self.device_mesh`` in ``configure_model`` is that of the island, "data_parallel"
                and "tensor_parallel", as ModelParallelStrategy makes it.
            bagua_kwargs: Arguments of the algorithm.

        Raises ConfigError, KeyError or TypeError for an algorithm that can't be made of these.
        """

        strategy_name = "bagua"

        def __init__(
            self,
            algorithm: str | Algorithm | None = None,
            flatten: bool = True,
            accelerator: Any = None,
            parallel_devices: list[torch.device] | None = None,
            cluster_environment: Any = None,
            checkpoint_io: Any = None,
            precision_plugin: Any = None,
            *,
            start_method: str = "popen",
            broadcast_buffers: bool | None = None,
            tensor_parallel_size: int = 1,
            **bagua_kwargs: Any,
        ) -> None:
            super().__init__(
                accelerator=accelerator,
                parallel_devices=parallel_devices,
                # A launcher has started this process: Lightning starts none.
                cluster_environment=cluster_environment or (environment() if is_rank() else None),
                checkpoint_io=checkpoint_io,
                precision_plugin=precision_plugin,
                start_method=start_method,
            )
            self._algorithm = make_algorithm(algorithm, bagua_kwargs)
            self._flatten = flatten
            waits = not isinstance(self._algorithm, AsyncModelAverageAlgorithm)
            self._broadcast_buffers = waits if broadcast_buffers is None else broadcast_buffers
            self._tensor_parallel = tensor_parallel_size
            self._device: torch.device | None = None
            self._failed = False
            self._fit: FitState | None = None
            self._samplers: weakref.WeakSet[DistributedSampler[Any]] = weakref.WeakSet()

        @property
        def root_device(self) -> torch.device:
            """Stays what it was at the start: in an elastic job local ranks change."""
            if self._device is None:
                assert self.parallel_devices is not None
                on_cpu = self.parallel_devices[0].type == "cpu"
                found: torch.device = self.parallel_devices[0 if on_cpu else self.local_rank]
                if not bagua.is_initialized():
                    return found
                self._device = found
            return self._device

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]:
            size = self._tensor_parallel  # ranks that compute with the same batches
            return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}

        @property
        def in_island(self) -> bool:
            """True if the job has islands of several ranks."""
            return bagua.is_initialized() and current().membership.island_size > 1

        def setup_environment(self) -> None:
            """Joins the job. ``configure_model`` finds the mesh of this island."""
            super().setup_environment()
            size = current().membership.island_size
            if size > 1 or self._tensor_parallel > 1:
                self.lightning_module._device_mesh = sharded.make_mesh(self.root_device, size, self._tensor_parallel)
                sharded.gather_metrics_over_all()

        def setup_distributed(self) -> None:
            """Joins the job, once in a process, and brings up ``torch.distributed`` for Lightning's own calls."""
            self.set_world_ranks()
            if not bagua.is_initialized():
                self._export_ranks()
                bagua.init_process_group()
            if self.in_island and is_elastic():
                raise ConfigError(
                    "A Trainer can't follow islands that come and go: leave --elastic out, or --island-size, or write "
                    "the loop with with_bagua after fully_shard. [BG618]"
                )
            if is_elastic():
                follow_members(self)
            self._check_world()
            super().setup_distributed()

        def _export_ranks(self) -> None:
            """Lightning started this process and knows its rank: ``init_process_group`` reads it in the environment."""
            found = self.cluster_environment
            assert found is not None
            if isinstance(found, environment):  # a launcher has set these variables
                return
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = found.main_address, str(found.main_port)
            os.environ["RANK"], os.environ["WORLD_SIZE"] = str(self.global_rank), str(self.world_size)
            os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(self.local_rank), str(self.num_processes)
            os.environ["NODE_RANK"] = str(self.node_rank)

        def _check_world(self) -> None:
            joined, asked = world_size(), self.num_nodes * self.num_processes
            if asked != joined and not is_elastic():  # members of an elastic job come and go
                raise ConfigError(
                    f"Trainer(devices={self.num_processes}, num_nodes={self.num_nodes}) means {asked} ranks, but the "
                    f"job has {joined}: give Trainer the numbers of your launcher. [BG612]"
                )

        def setup(self, trainer: Any) -> None:
            """Prepares the model. Evaluation of a divided one takes weights as they are: Lightning would broadcast
            them, which has no meaning for parts. Raises ConfigError for a divided one with parameters without memory,
            and with ``Trainer(sync_batchnorm=True)``."""
            if self.in_island and self._layer_sync is not None:
                raise ConfigError("Trainer(sync_batchnorm=True) does not go over islands: leave it out. [BG618]")
            if self.in_island and any(one.is_meta for one in self.lightning_module.parameters()):
                raise ConfigError(
                    'configure_model left parameters on the device "meta": call to_empty(device=…) there, and give '
                    "them values. [BG618]"
                )
            if trainer.state.fn == "fit" or not self.in_island:
                super().setup(trainer)
                return
            self.accelerator.setup(trainer)
            self.precision_plugin.convert_module(self.lightning_module)
            self.model_to_device()
            self.setup_precision_plugin()

        def configure_ddp(self) -> None:
            """Does nothing yet: the exchange begins when the optimizers are known, in ``setup_optimizers``."""

        def setup_optimizers(self, trainer: Any) -> None:
            """Makes the optimizers and begins the exchange."""
            super().setup_optimizers(trainer)
            self.model = StepModule(
                self.lightning_module, self.optimizers, self._algorithm, self._flatten, self._broadcast_buffers
            )

        def training_step(self, *inputs: Any, **named: Any) -> Any:
            """Runs the LightningModule's step, with the parameters that are trained now."""
            if isinstance(self.model, StepModule):
                self.model.begin_step()
            return super().training_step(*inputs, **named)

        def process_dataloader(self, dataloader: Any) -> Any:
            """Batches of an ``ElasticSampler`` in epochs of a Trainer."""
            found = super().process_dataloader(dataloader)
            if isinstance(found, ElasticLoader):
                if self._tensor_parallel > 1 and not found.per_island:
                    raise ConfigError(
                        "Ranks of tensor parallelism need the same samples: ElasticSampler(…, per_island=True). [BG618]"
                    )
                found = EpochLoader(found, is_elastic())
                if is_elastic():
                    self._fit = FitState(self.lightning_module.trainer, len(found))
            elif isinstance(sampler := getattr(found, "sampler", None), DistributedSampler):
                self._samplers.add(sampler)
            return found

        def on_train_start(self) -> None:
            """Newcomers and the others set up their validation at the same point."""
            super().on_train_start()
            if self._fit is not None:
                self._fit.prepare()

        def renumber(self) -> None:
            """Members of the job have come or gone: ranks have other numbers, and samplers other shares, from their
            next epoch on."""
            self.set_world_ranks()
            for sampler in self._samplers:
                share_out(sampler, self.world_size, self.global_rank)

        def on_validation_start(self) -> None:
            """Validation sees rank 0's buffers on all ranks, as with DDP."""
            super().on_validation_start()
            if isinstance(self.model, StepModule) and self._broadcast_buffers:
                self.model.broadcast_buffers()

        def block_backward_sync(self) -> AbstractContextManager[None]:
            """Backward passes in this block only accumulate on this rank (``accumulate_grad_batches``)."""
            return self.model.no_sync() if isinstance(self.model, StepModule) else nullcontext()

        def barrier(self, *_: Any, **__: Any) -> None:
            """Returns when every rank has called it."""
            if bagua.is_initialized():
                bagua.barrier()

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            """``obj`` of rank ``src``; see ``bagua.communication.broadcast_object``."""
            return bagua.communication.broadcast_object(obj, src) if bagua.is_initialized() else obj

        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            """``tensor`` holds the reduction over all ranks afterwards, and is returned. Other objects come back as
            they are. ``group``: one of ``torch.distributed``. ``reduce_op``: "mean", "sum", "max" and so on, or
            torch's ReduceOp."""
            if not isinstance(tensor, torch.Tensor) or not bagua.is_initialized():
                return tensor
            name = (reduce_op if isinstance(reduce_op, str) else str(reduce_op or "sum").rpartition(".")[2]).lower()
            op = bagua.ReduceOp.SUM if name in MEANS else bagua.ReduceOp[name.upper()]
            comm = to_bagua_process_group(group).get_global_communicator()
            bagua.allreduce_inplace(tensor, op, comm)
            if name not in MEANS:
                return tensor
            mean = tensor / comm.nranks()
            return tensor.copy_(mean)

        def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
            """Tensors of all ranks, [ranks, ...]. Raises ConfigError for gradients through it over islands."""
            if sharded.is_subgroup(group) or not self.in_island:
                return super().all_gather(tensor, group, sync_grads)  # type: ignore[no-any-return]
            if sync_grads:
                raise ConfigError("all_gather(sync_grads=True) does not go over islands: leave sync_grads out. [BG618]")
            return torch.stack(sharded.gather_over_all(tensor.detach()))

        # Checkpoints. Every rank calls each of these.

        def lightning_module_state_dict(self) -> dict[str, Any]:
            if self.in_island:
                return sharded.whole_model_state(self.lightning_module)
            return super().lightning_module_state_dict()  # type: ignore[no-any-return]

        def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
            if self.in_island:
                return sharded.whole_optimizer_state(getattr(optimizer, "_optimizer", optimizer))
            return super().optimizer_state(optimizer)  # type: ignore[no-any-return]

        def save_checkpoint(self, checkpoint: dict[str, Any], *where: Any, **options: Any) -> None:
            if self.in_island:
                sharded.refuse_parts(checkpoint)
            super().save_checkpoint(checkpoint, *where, **options)

        def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
            if self.in_island:
                state = sharded.divide_model_state(self.lightning_module, checkpoint["state_dict"])
                checkpoint = {**checkpoint, "state_dict": state}
            super().load_model_state_dict(checkpoint, strict)

        def load_optimizer_state_dict(self, checkpoint: Any) -> None:
            if self.in_island:
                pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
                parts = [sharded.divide_optimizer_state(*pair) for pair in pairs]
                checkpoint = {**checkpoint, "optimizer_states": parts}
            super().load_optimizer_state_dict(checkpoint)

        def on_exception(self, exception: BaseException) -> None:
            self._failed = True
            super().on_exception(exception)

        def teardown(self) -> None:
            """Ends the exchange. This process stays a rank: another Trainer may follow."""
            self._fit = None
            if isinstance(self.model, StepModule):
                self.model.end(alone=self._failed)  # by an exception, which the other ranks need not have
                self.model = self.lightning_module
            self._failed = False
            super().teardown()
            if bagua.is_initialized():
                # LightningEnvironment has taken it away, and the next Trainer's ranks follow from it.
                os.environ["WORLD_SIZE"] = str(world_size())

        @classmethod
        def register_strategies(cls, strategy_registry: Any) -> None:
            """The names "bagua", "bagua_spawn", "bagua_fork" and "bagua_notebook", which say how ``Trainer`` starts
            processes."""
            methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
            for ending, method in methods.items():
                words = f"Bagua, processes by {method}"
                strategy_registry.register(f"bagua{ending}", cls, description=words, start_method=method)

    return BaguaStrategy


def follow_members(strategy: Any) -> None:
    """Sets the strategy's ranks to those of the job as it is."""
    known = weakref.ref(strategy)  # the job outlives a Trainer, and must not keep its model in memory

    def follow(_: object) -> None:
        if (found := known()) is not None:
            found.renumber()

    bagua.communication.on_membership_change(follow)


def world_size() -> int:
    """Number of ranks of the job that this process has joined."""
    return current().membership.world_size


def is_elastic() -> bool:
    """True if this process belongs to an elastic job."""
    return bagua.is_initialized() and current().elastic


def make_algorithm(given: str | Algorithm | None, arguments: dict[str, Any]) -> Algorithm | None:
    """The algorithm of a strategy's arguments; None: the environment chooses. Raises ConfigError, KeyError or TypeError
    where they name none."""
    if isinstance(given, str):
        name, said = parse(given)
        return Algorithm.init(name, **{**said, **arguments})
    if arguments:
        raise TypeError(
            f"BaguaStrategy has no argument {', '.join(arguments)}. Those of an algorithm need its name: "
            'BaguaStrategy("local_sgd", interval=4). [BG612]'
        )
    return given
