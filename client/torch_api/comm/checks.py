"""Checks of primitives' arguments, before anything is sent."""

from __future__ import annotations

import torch

from bagua.algorithms.codec import Codec
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.transfer import Carried, ReduceOp, check_alike, check_tensor


def check_root(root: int, group: Members, name: str) -> int:
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < group.nranks():
        raise ValueError(f"{name} is {root!r}: it must be a rank from 0 to {group.nranks() - 1}. [BG404]")
    return root


def pair(
    send_tensor: Carried, recv_tensor: Carried, send_rows: int = 1, recv_rows: int = 1
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The tensors that travel, and their elements per rank: they have ``send_rows`` and ``recv_rows`` times as many.
    Raises TypeError, ValueError."""
    send = check_tensor(send_tensor, "send_tensor")
    if recv_tensor is send_tensor and send_rows == recv_rows == 1:
        return send, send, send.numel()
    recv = check_tensor(recv_tensor, "recv_tensor")
    check_alike(send, recv)
    if send.numel() * recv_rows != recv.numel() * send_rows:
        ratio = "have equal sizes" if send_rows == recv_rows else f"be as {send_rows} to {recv_rows}"
        raise ValueError(
            f"send_tensor has {send.numel()} elements {list(send.shape)} and recv_tensor {recv.numel()} "
            f"{list(recv.shape)}: they must {ratio}. [BG403]"
        )
    return send, recv, _share(send, send_rows, "send_tensor")


def check_codec(codec: Codec | str, dtype: torch.dtype, op: ReduceOp) -> Codec | None:
    """``codec`` as a Codec, None for none. Raises TypeError or ValueError where nothing can be encoded so."""
    found = Codec.of(codec)
    if found is None:
        return None
    if dtype is not torch.float32:
        # Our kernels encode float32 alone.
        raise TypeError(f"{dtype} tensors can't be encoded: a codec takes torch.float32. Pass codec=None. [BG405]")
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"op is {op.name}: with a codec it must be SUM or AVG. [BG405]")
    return found


def _share(tensor: torch.Tensor, ranks: int, name: str) -> int:
    count, left = divmod(tensor.numel(), ranks)
    if left:
        raise ValueError(
            f"{name} has {tensor.numel()} elements {list(tensor.shape)}, which {ranks} ranks can't share equally. "
            "[BG403]"
        )
    return count


class Blocks:
    """A tensor seen as equal blocks, one for each rank, also if it is not contiguous: then ``close`` copies back."""

    @classmethod
    def of(cls, carried: Carried, group: Members) -> Blocks:
        """Divides a tensor into a block for each rank of ``group``. Raises ValueError if these would not be equal,
        TypeError."""
        tensor = check_tensor(carried)
        return cls(tensor, _share(tensor, group.nranks(), "tensor"))

    @classmethod
    def counted(cls, carried: Carried, count: int, blocks: int) -> Blocks:
        """Divides a tensor into blocks of ``count`` elements. Raises ValueError if it is too short, TypeError."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"count is {count!r}: it must be a whole number of elements, at least 0. [BG403]")
        tensor = check_tensor(carried)
        if tensor.numel() != count * blocks:
            raise ValueError(
                f"tensor has {tensor.numel()} elements {list(tensor.shape)}; with count={count} this rank must pass "
                f"{count * blocks}. [BG403]"
            )
        return cls(tensor, count)

    def __init__(self, tensor: torch.Tensor, count: int) -> None:
        self.tensor = tensor
        self.count = count
        self.flat = tensor.detach().contiguous().view(-1)

    def block(self, index: int) -> torch.Tensor:
        return self.flat[index * self.count : (index + 1) * self.count]

    def close(self) -> None:
        if not self.tensor.is_contiguous():
            with torch.no_grad():
                self.tensor.copy_(self.flat.view(self.tensor.shape))


def check_peer(peer: int, group: Members, name: str) -> None:
    if check_root(peer, group, name) == group.rank():
        raise ValueError(f"{name} is {peer}, this rank itself: name another rank. [BG404]")
