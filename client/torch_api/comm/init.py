"""Beginning of a rank's session, to the moment at which the others can count on it."""

from __future__ import annotations

from torch.distributed.distributed_c10d import Store

from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.job import start
from bagua.torch_api.job.session import current


def init_process_group(
    store: Store | None = None, rank: int = -1, world_size: int = -1, local_world_size: int = -1
) -> None:
    """Joins this process to its job. Call it once, before anything else of this library, on every rank.

    A process started by ``bagua run`` or by a node daemon finds its daemon by itself. Any other (torchrun,
    ``torch.multiprocessing.spawn``, plain ``python``) gets a daemon for the life of the job: RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT say who takes part, as for ``torch.distributed``, or a ``store`` does, together with
    ``rank``, ``world_size`` and ``local_world_size``, which the environment then has, too, until
    ``destroy_process_group``. Several such hosts
    need a secret that all of them hold (BAGUA_JOB_SECRET; client/README.md names the other ways).

    Where ``torch.distributed`` is not up yet, it is afterwards, on Gloo (and NCCL for CUDA tensors), for the program's
    own calls; nothing of this library goes through it. BAGUA_TORCH_DISTRIBUTED=0 leaves it alone. If it can't be
    brought up, a warning says so. In an elastic job it comes up again whenever members have changed.

    An elastic job goes on without ranks that are lost meanwhile.

    Raises RuntimeError if called twice, ConfigError for settings that can't be, ServiceError if the daemon refuses or
    can't be reached, CommunicationError if the job is over, or loses a rank meanwhile and is not elastic.
    """
    start.begin(store, rank, world_size, local_world_size)
    session = current()
    if session.elastic:
        units(session).begin()
