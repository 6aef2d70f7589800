"""Types of the native module ``bagua_device_native`` that ``bagua.csrc.load_device()`` returns (see csrc/gpu/leg).

It is the core's leg on a GPU, in the rank's process. It finds the CUDA runtime, the driver, NCCL and the library of
kernels when a ``Leg`` is made; ``BAGUA_DEVICE_CUDART``, ``BAGUA_DEVICE_DRIVER``, ``BAGUA_DEVICE_NCCL`` and
``BAGUA_DEVICE_KERNELS`` name other files (an empty value: without it; only the CUDA runtime must be there).
"""

from collections.abc import Sequence
from typing import Any, final

from bagua.csrc import core

class DeviceError(RuntimeError):
    """The GPU leg can't go on, or can't do what was asked: what was wrong, where, and what to do."""

@final
class Leg:
    """Operations on memory of one GPU. Thread-safe. All members of a communicator call its operations in one order.

    Streams are ``cudaStream_t`` as integers (``torch.cuda.current_stream().cuda_stream``; 0 is the default stream).
    Addresses are addresses on the device. No call but ``create_comm``, ``destroy_comm``, ``close`` and
    the first use of a larger size waits for anything on the host.
    """

    def __init__(
        self,
        *,
        rank: core.Rank,  # stays open until the leg is closed
        device: int,
        hosts: Sequence[Sequence[int]],  # ranks of every host, as the daemon says
        me: int,
        route: str = "",  # "staged", "flat", "hierarchical"; "": BAGUA_DEVICE_ROUTE, else by measurement
        kernels: str = "",  # path of libbagua_kernels.so (``bagua.csrc.kernels_library()``); "": without kernels
        world: bool = True,
        blocking: bool = True,  # NCCL's communicators; BAGUA_NCCL_BLOCKING says otherwise. All members alike
    ) -> None:
        """Opens the libraries. With ``world``, makes communicator 0, too: all ranks do it at the same time, and wait
        for each other; without, nobody waits, and there are only the communicators that ``create_comm`` makes. Raises
        DeviceError: what is missing; at all ranks, a ``route`` that can't be had."""
    def create_comm(self, comm: int, ranks: Sequence[int]) -> None:
        """The same as ``Rank.create_comm``, which it calls; all members call it at the same time. Waits for them.

        A route that was chosen by hand and can't be had is a DeviceError at all members. Only where a communicator of
        some of the ranks has no such route by its shape (hierarchical inside one host) it chooses for itself; see
        ``report``."""
    def destroy_comm(self, comm: int) -> None:
        """The same as ``Rank.destroy_comm``, which it calls. Waits until this rank's operations of it are done."""
    def report(self, comm: int) -> dict[str, Any]:
        """The same at all members: "route" ("staged": through the daemon, "flat": NCCL between all members,
        "hierarchical": NCCL inside a host, the daemon between hosts), and why the others were not taken, as route ->
        reason: "impossible", by what the members are and have; "failed", when it was set up (which rank, and what NCCL
        said). Routes that are in neither were measured and slower, or are behind the chosen one inside a host.
        "undivided": why NCCL's communicators don't block, where they were to; else empty."""
    def submit(
        self,
        *,
        comm: int,
        kind: int,
        dtype: int,
        op: int = 0,
        count: int,
        root: int = -1,
        src: int = 0,  # address on the device; 0: none
        dst: int = 0,
        shape: Sequence[int] = (),
        label: str = "",
        codec: int = 0,
        density: int = 0,
        residual: int = 0,
        exact: int = 0,
        stream: int,
    ) -> int:
        """Hands over one operation and returns its ticket at once. It begins after what ``stream`` holds now. Meaning
        of ``kind``, ``count``, ``src`` and ``dst``: csrc/core/channel/layout.h; of the rest: ``Rank.submit``. Memory
        must stay, and ``src`` must not be written, until a ``wait`` (work after it on that stream may).

        Raises DeviceError at once for what can't be carried out, and with the first error once the leg has failed."""
    def done(self, ticket: int) -> bool:
        """True if the result is there, so that ``wait`` would not wait; also after a failure."""
    def wait(self, ticket: int, stream: int) -> None:
        """Makes ``stream`` wait for the operation; the host does not. A ticket may be waited for by several streams,
        until it is released. Raises DeviceError with the first error once the leg has failed; the stream waits all the
        same until the operation writes no more."""
    def release(self, ticket: int) -> None:
        """Releases a ticket that is no longer needed. Tickets that are never released are kept until ``close``: a
        runner calls it after ``wait``. Harmless for an unknown ticket.
        """
    def times(self, ticket: int) -> tuple[int, int, int]:
        """Returns (submitted, started, done) in ns of CLOCK_MONOTONIC of an operation; what is not known, yet or since
        the ticket was released, is 0. Measured on the host: ``started`` when its input was ready (staged) or at the
        enqueuing, ``done`` when it was first seen, which may be 100 ms after the truth.
        """
    def waiting(self) -> tuple[float, str]:
        """Returns for how many seconds this rank has been waiting for others, at the longest, and what NCCL knows of it
        (the daemon says more: ``DescribeWaits``); 0 if for nobody. What counts: operations that have begun on the
        device and that somebody waits for, calls that wait, and CUDA that does not answer. Calls no CUDA itself.
        """
    def transcode(
        self,
        codec: int,
        count: int,
        *,
        raw: Sequence[int] = (),
        encoded: Sequence[int] = (),
        scale: float = 1.0,
        residual: int = 0,
        message: int = 0,
        decoded: Sequence[int] = (),
        density: int = 0,
        stream: int,
    ) -> None:
        """The codec's kernel on ``stream``: as ``core.transcode``, with addresses on the device. Raises DeviceError
        where there is no library of kernels."""
    def abort(self, reason: str) -> None:
        """Fails every pending and later operation with this reason, aborts NCCL, frees waiting streams. First call
        wins; also done by itself when the engine fails."""
    def error(self) -> str:
        """The first error of the leg or its engine; empty while there is none."""
    def capabilities(self) -> dict[str, Any]:
        """Libraries and features that were found: cudart, driver, nccl, kernels (paths or ""), nccl_version (int, 0:
        none), stream_wait_value, comm_split (bool), why_not (dict of name to
        reason, for what is missing)."""
    def counters(self) -> dict[str, int]:
        """ops, ops_staged, ops_flat, ops_hierarchical, bytes (inputs), pinned_bytes, scratch_bytes, residual_bytes,
        in_flight, aborts, host_waits (waits of the caller inside submit or wait: larger memory had to be made),
        blocking_groups (of NCCL, on communicators that block)."""
    def close(self) -> None:
        """Waits for nothing but threads: pending operations fail. Gives back memory, communicators, streams.
        Idempotent. Call it before ``Rank.close``."""

def libraries() -> dict[str, Any]:
    """Libraries and features that a Leg would find, for ``bagua doctor``: as ``Leg.capabilities``. Raises nothing;
    makes no CUDA context."""
