"""Makes the process groups that ``torch.distributed`` asks for: joins the job, finds the communicator, and chooses who
carries the operations, the C++ backend or the Python one."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from bagua.base.errors import BuildError, ConfigError
from bagua.c10d import agreement, bucket_memory, ddp, joining, native, timeouts
from bagua.torch_api.comm.communicators import communicators

LOG = logging.getLogger("bagua")
SWITCH = "BAGUA_C10D"


def create(options: Any, backend_options: Any = None) -> Any:
    """The creator that ``torch.distributed`` calls, on each member of a group.

    ``options``: a ``_DistributedBackendOptions``; its list of global ranks is empty for the default group. Returns a
    C++ ``Backend``, or a Python ``ProcessGroup``. Raises ConfigError, ServiceError, CommunicationError.
    """
    timeout = _timedelta(options.timeout)
    member = joining.join(
        options.store,
        options.group_rank,
        options.group_size,
        list(options.global_ranks_in_group),
        str(options.group_id),
    )
    if member.default:
        agreement.compare_new_groups(communicators(member.session).world)
        ddp.install()
        timeouts.install()
        if member.session.elastic and options.group_rank == 0:
            LOG.warning(
                "This job is elastic, but torch.distributed is not: when a rank is lost, operations raise an error "
                "that names it. with_bagua() is the way to go on without it."
            )
    if chosen() == "cpp":
        bucket_memory.install()
        return native.create(options.group_rank, options.group_size, timeout, member)
    from bagua.c10d import fallback

    # A store may outlive its ranks, and torch may give a group the name of one before it.
    store = PrefixStore(f"{agreement.default_name()} {member.communicator.id}", options.store)
    return fallback.create(
        store,
        options.group_rank,
        options.group_size,
        timeout,
        communicator=member.communicator,
        name=member.name,
        shut_down=member.shut_down,
    )


class _Chosen:
    """Backend of this process. The first group decides."""

    implementation = ""


def chosen() -> str:
    """ "cpp", or "python" where the C++ backend can't be built. BAGUA_C10D names one of them. Raises ConfigError,
    BuildError if what it names can't be had."""
    if not _Chosen.implementation:
        _Chosen.implementation = _choose(os.environ.get(SWITCH, ""))
    return _Chosen.implementation


def _choose(wanted: str) -> str:
    if wanted not in ("", "cpp", "python"):
        raise ConfigError(f"{SWITCH} is {wanted!r}: it must be cpp or python, or absent. [BG106]")
    if wanted == "python":
        return wanted
    try:
        native.load()
    except BuildError as error:
        if wanted == "cpp":
            raise
        LOG.warning(
            "The C++ backend of torch.distributed can't be built, a slower one in Python takes its place: %s",
            str(error).splitlines()[0],
        )
        return "python"
    return "cpp"


def _timedelta(timeout: Any) -> timedelta:
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))
