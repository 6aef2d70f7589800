"""Carries out one primitive: checks tensors, stages those that lie in ordinary memory, submits, waits.

Large tensors go in pieces, so that copying into shared memory, reducing and copying back overlap and stay in the
caches. Pieces depend on kind, size and dtype alone: all ranks cut alike, wherever their tensors lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch

from bagua.torch_api.connection import NOWHERE, Place
from bagua.torch_api.session import Communicator, Session

PIECE_BYTES = 4 << 20
PIECES_IN_FLIGHT = 3
UNSTAGED_PIECES_IN_FLIGHT = 64

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.int8: "int8",
    torch.int16: "int16",
}


class ReduceOp(IntEnum):
    """Reductions. AVG divides by the number of ranks; integers truncate toward zero."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


BITWISE = (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR)


def check_tensor(tensor: object, name: str) -> torch.Tensor:
    """``tensor``, if it can be communicated. Raises TypeError that says what it is and what to do."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: pass a torch.Tensor.")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is sparse ({tensor.layout}): pass {name}.to_dense().")
    if tensor.dtype.is_complex:
        raise TypeError(f"{name} has dtype {tensor.dtype}: pass torch.view_as_real({name}).")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {tensor.dtype}. Supported: {', '.join(DTYPES.values())}.")
    if tensor.device.type == "cuda":
        raise TypeError(
            f"{name} is on {tensor.device}. CUDA tensors need the GPU leg of the core, which this version does not "
            f"have: pass {name}.cpu()."
        )
    if tensor.device.type != "cpu":
        raise TypeError(f"{name} is on device {tensor.device}: pass a tensor on the CPU.")
    return tensor


def check_reduction(dtype: torch.dtype, op: ReduceOp | int) -> ReduceOp:
    """``op`` as a ReduceOp. Raises ValueError for an unknown number, TypeError where the dtype can't be reduced so."""
    try:
        op = ReduceOp(op)
    except ValueError:
        known = ", ".join(f"{one.name} ({one.value})" for one in ReduceOp)
        raise ValueError(f"{op!r} is not a reduction. Known: {known}.") from None
    if dtype.is_floating_point and op in BITWISE:
        raise TypeError(f"{dtype} tensors can't be reduced with {op.name}: it needs integers.")
    if dtype is torch.bool and op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG):
        raise TypeError(f"bool tensors can't be reduced with {op.name}: use MAX (or), MIN (and), BOR, BAND or BXOR.")
    return op


@dataclass
class Request:
    """One primitive. ``send`` and ``recv`` hold ``send_rows`` and ``recv_rows`` times ``count`` elements; None where
    this rank gives or gets nothing. ``together``: both may lie at the same place, and do where one of them is None."""

    kind: str
    send: torch.Tensor | None
    recv: torch.Tensor | None
    count: int
    dtype: torch.dtype
    comm: Communicator
    send_rows: int = 1
    recv_rows: int = 1
    op: int = 0
    root: int = -1
    together: bool = False


class _Side:
    """One tensor of a request: its elements in a row, and where they lie if the daemon sees them."""

    def __init__(self, tensor: torch.Tensor | None, session: Session, writable: bool) -> None:
        self.tensor = tensor
        self.place: Place | None = NOWHERE if tensor is None or not tensor.numel() else session.memory.locate(tensor)
        self.flat: torch.Tensor | None = None
        if tensor is not None and self.place is None:
            if tensor.is_contiguous():
                self.flat = tensor.view(-1)
            else:
                self.flat = torch.empty(tensor.numel(), dtype=tensor.dtype) if writable else tensor.reshape(-1)

    @property
    def staged(self) -> bool:
        return self.place is None

    def at(self, begin: int, itemsize: int) -> Place:
        """Where element ``begin`` lies; only if not staged."""
        assert self.place is not None
        return (self.place[0], self.place[1] + begin * itemsize) if self.tensor is not None else NOWHERE

    def copy_back(self) -> None:
        """Result into a tensor that is not contiguous."""
        if self.tensor is not None and self.flat is not None and not self.tensor.is_contiguous():
            self.tensor.copy_(self.flat.view(self.tensor.shape))


class Transfer:
    """One request at work. Holds the session's staging lock from begin to end: see ``run``."""

    def __init__(self, session: Session, request: Request) -> None:
        self.session = session
        self.request = request
        self.send = _Side(request.send, session, writable=False)
        self.recv = _Side(request.recv, session, writable=True)
        self.itemsize = request.dtype.itemsize
        self.shared_stage = request.together and self.send.staged and self.recv.staged
        self._plan_stage()

    def _plan_stage(self) -> None:
        request = self.request
        cut = request.send_rows <= 1 and request.recv_rows <= 1 and request.count * self.itemsize > PIECE_BYTES
        self.piece = PIECE_BYTES // self.itemsize if cut else request.count
        send_bytes = self.piece * request.send_rows * self.itemsize if self.send.staged else 0
        recv_bytes = self.piece * request.recv_rows * self.itemsize if self.recv.staged else 0
        # The result begins at a multiple of 64 bytes, so that every dtype may lie there.
        self.recv_offset = 0 if self.shared_stage else -(-send_bytes // 64) * 64
        slot_bytes = max(send_bytes, self.recv_offset + recv_bytes)
        self.slot_bytes = -(-slot_bytes // 64) * 64
        pieces = -(-request.count // self.piece) if request.count else 1
        self.slots = min(PIECES_IN_FLIGHT if self.slot_bytes else UNSTAGED_PIECES_IN_FLIGHT, pieces)
        self.stage: torch.Tensor | None = None
        self.segment = 0

    def run(self) -> None:
        """Does it. Raises CommunicationError."""
        if self.slot_bytes:
            self.stage, self.segment = self.session.staging.take(self.slot_bytes * self.slots)
        try:
            flying: deque[tuple[int, int, int, int]] = deque()
            for number, (begin, end) in enumerate(self._pieces()):
                if len(flying) == self.slots:
                    self._finish(*flying.popleft())
                flying.append((self._submit(number % self.slots, begin, end), number % self.slots, begin, end))
            while flying:
                self._finish(*flying.popleft())
        except BaseException:
            self.session.staging.discard()
            raise
        self.recv.copy_back()

    def _pieces(self) -> Iterator[tuple[int, int]]:
        count = self.request.count
        yield 0, min(self.piece, count)
        for begin in range(self.piece, count, max(1, self.piece)):
            yield begin, min(begin + self.piece, count)

    def _staged(self, slot: int, offset: int, elements: int) -> torch.Tensor:
        assert self.stage is not None
        begin = slot * self.slot_bytes + offset
        return self.stage[begin : begin + elements * self.itemsize].view(self.request.dtype)

    def _submit(self, slot: int, begin: int, end: int) -> int:
        request, connection = self.request, self.session.connection
        if self.send.flat is not None:
            rows = request.send_rows
            self._staged(slot, 0, (end - begin) * rows).copy_(self.send.flat[begin * rows : end * rows])
        base = slot * self.slot_bytes
        src = (self.segment, base) if self.send.staged else self.send.at(begin, self.itemsize)
        dst = (self.segment, base + self.recv_offset) if self.recv.staged else self.recv.at(begin, self.itemsize)
        if request.together and request.recv is None:
            dst = src
        shape = next((tuple(t.shape) for t in (request.send, request.recv) if t is not None), ())
        return connection.submit(
            connection.kinds[request.kind],
            comm=request.comm.id,
            dtype=connection.dtypes[DTYPES[request.dtype]],
            op=request.op,
            count=end - begin,
            root=request.root,
            src=src,
            dst=dst,
            shape=shape,
        )

    def _finish(self, ticket: int, slot: int, begin: int, end: int) -> None:
        self.session.connection.wait(ticket)
        if self.recv.flat is not None:
            rows = self.request.recv_rows
            self.recv.flat[begin * rows : end * rows].copy_(self._staged(slot, self.recv_offset, (end - begin) * rows))


def transfer(session: Session, request: Request) -> None:
    """Carries out ``request`` and returns when it is done. Raises CommunicationError."""
    with torch.no_grad(), session.staging_lock:
        Transfer(session, request).run()
