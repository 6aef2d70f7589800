"""Checks of primitives' arguments, before anything is sent."""

from __future__ import annotations

import torch

from bagua.algorithms.codec import Codec
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.transfer import ReduceOp, check_tensor


def check_root(root: int, group: Members, name: str) -> int:
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < group.nranks():
        raise ValueError(f"{name} is {root!r}: it must be a rank from 0 to {group.nranks() - 1}. [BG404]")
    return root


def pair(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, send_rows: int = 1, recv_rows: int = 1) -> int:
    """Elements per rank of tensors of ``send_rows`` and ``recv_rows`` times that many. Raises TypeError, ValueError."""
    check_tensor(send_tensor, "send_tensor")
    if recv_tensor is send_tensor and send_rows == recv_rows == 1:
        return send_tensor.numel()
    check_tensor(recv_tensor, "recv_tensor")
    if send_tensor.dtype != recv_tensor.dtype:
        raise TypeError(
            f"send_tensor is {send_tensor.dtype} and recv_tensor is {recv_tensor.dtype}: they must agree. [BG402]"
        )
    if send_tensor.device != recv_tensor.device:
        raise TypeError(
            f"send_tensor is on {send_tensor.device} and recv_tensor on {recv_tensor.device}: move one to the other. "
            "[BG402]"
        )
    if send_tensor.numel() * recv_rows != recv_tensor.numel() * send_rows:
        ratio = "have equal sizes" if send_rows == recv_rows else f"be as {send_rows} to {recv_rows}"
        raise ValueError(
            f"send_tensor has {send_tensor.numel()} elements {list(send_tensor.shape)} and recv_tensor "
            f"{recv_tensor.numel()} {list(recv_tensor.shape)}: they must {ratio}. [BG403]"
        )
    if send_tensor.numel() % send_rows:
        raise ValueError(
            f"send_tensor has {send_tensor.numel()} elements {list(send_tensor.shape)}, which {send_rows} ranks can't "
            "share equally. [BG403]"
        )
    return send_tensor.numel() // send_rows


def check_codec(codec: Codec | str, dtype: torch.dtype, op: ReduceOp) -> Codec | None:
    """``codec`` as a Codec, None for none. Raises TypeError or ValueError where nothing can be encoded so."""
    found = Codec.of(codec)
    if found is None:
        return None
    if dtype is not torch.float32:
        raise TypeError(f"{dtype} tensors can't be encoded: a codec takes torch.float32. Pass codec=None. [BG405]")
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"op is {op.name}: with a codec it must be SUM or AVG. [BG405]")
    return found


def share(tensor: torch.Tensor, group: Members) -> int:
    """Elements per rank of a tensor that is cut in equal blocks, one for each rank."""
    count, left = divmod(check_tensor(tensor, "tensor").numel(), group.nranks())
    if left:
        raise ValueError(
            f"tensor has {tensor.numel()} elements {list(tensor.shape)}, which {group.nranks()} ranks "
            "can't share equally. [BG403]"
        )
    return count


def check_count(tensor: torch.Tensor, count: int, blocks: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"count is {count!r}: it must be a whole number of elements, at least 0. [BG403]")
    if check_tensor(tensor, "tensor").numel() != count * blocks:
        raise ValueError(
            f"tensor has {tensor.numel()} elements {list(tensor.shape)}; with count={count} this rank must pass "
            f"{count * blocks}. [BG403]"
        )


class Blocks:
    """A tensor seen as equal blocks, one for each rank, also if it is not contiguous: then ``close`` copies back."""

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
