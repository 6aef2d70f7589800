"""Few bits inside a sharded model: FSDP2's own collectives, encoded where they cross between hosts.

    torch.distributed.init_process_group("bagua")
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks: fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    bagua.fsdp.compress(model)

Of N ranks on H hosts each host has L = N/H, and each rank a shard of s elements of a unit. Rank l of a host exchanges
messages with rank l of the other hosts, for all ranks of its own; the ranks of a host exchange the rest in full
precision, through shared memory.

Weights: a codec with error feedback sends differences to what all hosts hold of a shard, so its error does not grow,
and all ranks compute with the same bits. Shards that have not changed since the last gather, as in a backward pass, do
not cross again. A host holds one copy of the unit for it, each of its ranks s·H elements. A codec without error
feedback sends the shards themselves, and nothing is held.

Gradients: a host's sums for the other hosts' shards are encoded. With error feedback a rank keeps what they lost,
s·(H-1) float32, and adds it to its next sums.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import ReduceOp, distributed_c10d

from bagua.algorithms.codec import Codec
from bagua.base.errors import ConfigError
from bagua.c10d.names import NAME
from bagua.torch_api.comm.shards import fsdp_units
from bagua.torch_api.job.session import current
from bagua.torch_api.step.transcoding import Transcoder

PIECE = 1 << 20  # elements of a message: a piece is encoded while the one before it is on its way
BLOCK = 128  # elements that have a scale of their own in "int4"
ALIGNED = 64  # bytes: where messages begin
FAR = 0.25  # a difference of this share of the weights is no small step: they were replaced, and travel whole
# torch 2.13 has new names.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
_COMPRESSED = weakref.WeakSet[torch.nn.Module]()  # units whose collectives are ours, so that None puts back what was
_SAME, _MOVED, _REPLACED = range(3)  # what became of a shard since the last gather


def compress(
    model: torch.nn.Module,
    gather: Codec | str | None = "int4",
    reduce: Codec | str | None = "int4",
    *,
    rotate: bool = False,
) -> State:
    """Encodes what FSDP2 sends between hosts: weights that it gathers by ``gather``, gradients that it reduces by
    ``reduce``. All ranks call it, after ``fully_shard`` and before the first forward pass.

    Codecs are names (``bagua.algorithms.Codec`` has the table), a ``Codec``, or None: as they are. Ranks of one host
    exchange as they are in any case. ``rotate``: blocks of 128 elements of gradients are turned by a Hadamard matrix
    with random signs, the same everywhere, before they are encoded, and back at their owner: a few large elements cost
    the others of their block less precision. Differences of weights need none, as what they lose is sent next.

    Returns the state of it, for checkpoints. Raises ConfigError for a model without units of FSDP2; ValueError and
    TypeError for codecs that can't be. FSDP alone knows its groups, so the first gather raises ConfigError for one over
    another backend than "bagua", hosts with different numbers of ranks, and ranks that called this with other codecs.
    """
    codecs = Codec.of(gather), Codec.of(reduce)
    if codecs[0] is not None and codecs[0].name in ("int2", "onebit", "topk") and not codecs[0].error_feedback:
        raise ValueError(
            f"gather: {codecs[0].name!r} is too coarse for weights without error feedback: leave error_feedback=False "
            "out. [BG303]"
        )
    found = set(fsdp_units(model))
    units = {name: unit for name, unit in model.named_modules() if unit in found}
    if not units:
        raise ConfigError(
            f"{type(model).__name__} has no units of FSDP2: call torch.distributed.fsdp.fully_shard() for its layers "
            "and for itself first. [BG619]"
        )
    if not hasattr(next(iter(units.values())), "set_custom_reduce_scatter"):
        raise ConfigError(f"FSDP2 of torch {torch.__version__} takes no collectives of others: 2.9 does. [BG619]")
    layouts = _Layouts(f"{codecs}, rotate={rotate}, {list(units)}")
    state = State()
    for name, unit in units.items():
        state.add(name, unit, layouts, *codecs, rotate)
    return state


class _Layouts:
    """Layouts by the ranks of their groups. Ranks make one at the first collective of a group, which FSDP alone knows.
    ``words``: of the call, which all ranks must have alike."""

    def __init__(self, words: str) -> None:
        self._words = words
        self._made: dict[str, _Layout] = {}

    def of(self, unit: str, group: distributed.ProcessGroup, tensor: torch.Tensor) -> _Layout:
        """Raises ConfigError where our backend does not carry such tensors, or ranks can't take part."""
        has = distributed.get_backend(group)
        carriers = distributed_c10d.BackendConfig(distributed_c10d.Backend(has)).get_device_backend_map()
        if not tensor.is_cpu or carriers.get("cpu") != NAME:
            raise ConfigError(
                f"Unit {unit!r} is sharded over backend {has!r} on device {tensor.device}. compress() takes tensors on "
                'the CPU over backend "bagua": call init_process_group("bagua"), and shard over '
                'init_device_mesh("cpu", ...). [BG619]'
            )
        name = group.group_name
        if name not in self._made:
            self._made[name] = _Layout(group, self._words)
        return self._made[name]


class _Layout:
    """Ranks of a group by their hosts. ``hosts``: their number; ``host``: this rank's; ``each``: ranks on each of them;
    ``place``: this rank's among those of its host; ``across``: group of the ranks at this place of each host;
    ``inside``: of the ranks of this host. ``words``: of the call, which all ranks must have alike."""

    def __init__(self, group: distributed.ProcessGroup, words: str) -> None:
        self.ranks = ranks = distributed.get_process_group_ranks(group)
        self._name = group.group_name
        _check_alike(group, ranks, words)
        membership = current().membership
        where = {rank: host for host, members in enumerate(membership.hosts) for rank in members}
        runs = [where[membership.island[rank]] for rank in ranks]  # torch.distributed counts inside of an island
        self.hosts = len(set(runs))
        self.each = len(ranks) // self.hosts
        starts = range(0, len(ranks), self.each)
        if len(ranks) % self.hosts or any(len(set(runs[at : at + self.each])) > 1 for at in starts):
            raise ConfigError(
                f"Ranks {list(ranks)} lie on hosts {runs}: compress() takes hosts with equally many ranks of a group, "
                "one after the other. [BG619]"
            )
        self.host, self.place = divmod(group.rank(), self.each)
        self.across = self.inside = group
        if self.hosts > 1 and self.each > 1:
            at = self.host * self.each
            self.inside = _subgroup(ranks[at : at + self.each])
            self.across = _subgroup(ranks[self.place :: self.each])

    def is_of(self, group: distributed.ProcessGroup) -> bool:
        return bool(group.group_name == self._name)

    @property
    def others(self) -> list[int]:
        """Numbers of the other hosts."""
        return [host for host in range(self.hosts) if host != self.host]


def _subgroup(ranks: Sequence[int]) -> distributed.ProcessGroup:
    made: distributed.ProcessGroup = distributed.new_group(list(ranks), backend=NAME, use_local_synchronization=True)
    return made


def _check_alike(group: distributed.ProcessGroup, ranks: Sequence[int], words: str) -> None:
    """Raises ConfigError on all ranks if one of them has other words."""
    digest = hashlib.blake2b(words.encode(), digest_size=7).digest()
    mine = torch.tensor([int.from_bytes(digest, "big")])
    found = mine.new_empty(len(ranks))
    _all_gather(found, mine, group=group)
    for rank, other in zip(ranks, found.tolist(), strict=True):
        if other != int(found[0]):
            raise ConfigError(
                f"Ranks {ranks[0]} and {rank} called compress() with other codecs, or for models with other units. "
                f"Here: {words}. [BG619]"
            )


class State:
    """The tensors that a rank holds for a compressed model, by the names of its units. Each rank has its own, and saves
    and loads them as it does a generator's state. Training goes on from a checkpoint without them as well: weights
    travel whole once, and what the last gradients lost is forgotten."""

    def __init__(self) -> None:
        self._units: dict[str, dict[str, Any]] = {}

    def add(
        self, name: str, unit: Any, layouts: _Layouts, gather: Codec | None, reduce: Codec | None, rotate: bool
    ) -> None:
        found = self._units[name] = {}
        if gather is not None or unit in _COMPRESSED:
            found["gather"] = _AllGather(name, layouts, gather)
            unit.set_custom_all_gather(found["gather"])
        if reduce is not None or unit in _COMPRESSED:
            found["reduce"] = _ReduceScatter(name, layouts, reduce, _rotation() if rotate else None)
            unit.set_custom_reduce_scatter(found["reduce"])
        if found:
            _COMPRESSED.add(unit)

    def forget_gradients(self) -> None:
        """Forgets what messages of gradients have lost so far: call it when the gradients of a step are thrown away.
        Ranks need not agree."""
        for made in self._units.values():
            if "reduce" in made:
                made["reduce"].held = {}

    def state_dict(self) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
        """{unit: {"gather" or "reduce": {name: tensor}}}, in the memory that training goes on with."""
        found = {
            name: {kind: dict(one.held) for kind, one in made.items() if one.held} for name, made in self._units.items()
        }
        return {name: held for name, held in found.items() if held}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Mapping[str, torch.Tensor]]]) -> None:
        """Takes what ``state_dict`` of this rank gave, in a job with as many ranks and hosts. Raises ConfigError for
        one of another model."""
        if not state.keys() <= self._units.keys():
            raise ConfigError(
                f"The state is one of units {sorted(state)}, and this model has {sorted(self._units)}: load it into "
                "the model that it was taken from, on as many hosts, or leave it out. [BG619]"
            )
        for name, made in self._units.items():
            for kind, one in made.items():
                one.held = {key: tensor.clone() for key, tensor in state.get(name, {}).get(kind, {}).items()}


class _Encoded:
    """A collective of one unit. ``held``: the tensors that it keeps from call to call."""

    _layout: _Layout  # that of the first collective

    def __init__(self, unit: str, layouts: _Layouts, codec: Codec | None) -> None:
        """``codec``: None: all travels as it is."""
        self._unit, self._layouts, self._codec = unit, layouts, codec
        self.held: dict[str, torch.Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _codec_for(self, group: distributed.ProcessGroup, tensor: torch.Tensor) -> Codec | None:
        """The codec. None where all travels as it is: inside of a host, and for another group, the smaller one of
        ``reshard_after_forward=N``. Raises ConfigError where it can't encode, on all ranks."""
        if self._codec is None:
            return None
        if not hasattr(self, "_layout"):
            self._layout = self._layouts.of(self._unit, group, tensor)
        if not (self._layout.hosts > 1 and self._layout.is_of(group)):
            return None
        if not tensor.is_floating_point():
            raise ConfigError(
                f"Unit {self._unit!r} has parameters of several dtypes, which FSDP exchanges as {tensor.dtype}: "
                "compress() takes one in each unit. Shard the others as units of their own. [BG619]"
            )
        return self._codec

    def _pieces(
        self,
        count: int,
        encode: Callable[[Transcoder, slice], tuple[torch.Tensor, Any]],
        decode: Callable[[Transcoder, slice, torch.Tensor], None],
    ) -> None:
        """Exchanges ``count`` elements. ``encode`` begins the exchange of a piece, and returns where its messages will
        lie, [hosts, bytes], with the work that is under way."""
        assert self._codec is not None
        under_way = []
        for begin in range(0, count, PIECE):
            piece = slice(begin, min(begin + PIECE, count))
            transcoder = Transcoder(self._codec, piece.stop - piece.start)
            under_way.append((transcoder, piece, *encode(transcoder, piece)))
        for transcoder, piece, messages, work in under_way:
            work.wait()
            decode(transcoder, piece, messages)

    def _room(self, transcoder: Transcoder, messages: int) -> torch.Tensor:
        """Memory for messages, one in a row."""
        return torch.empty(messages, -(-transcoder.message_bytes // ALIGNED) * ALIGNED, dtype=torch.uint8)


class _AllGather(_Encoded):
    """FSDP's all-gather. With error feedback it holds "weights", [hosts, shard]: for each host the shard at this rank's
    place as all ranks have it; and "sent": this rank's own shard at the last gather."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        codec = self._codec_for(group, input_tensor)
        if codec is None:
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        layout, own = self._layout, input_tensor
        rows = output_tensor.view(layout.hosts, layout.each, own.numel())
        if codec.error_feedback:
            change = torch.tensor([self._change(own)])
            distributed.all_reduce(change, ReduceOp.MAX, group)
            if change == _REPLACED:
                _all_gather(output_tensor, own, group=group)
                with torch.inference_mode(False):  # else later steps could not write into them
                    self.held = {"weights": rows[:, layout.place].clone(), "sent": own.clone()}
                return None
            if change == _MOVED:
                try:
                    self._exchange(own, self.held["weights"])
                except BaseException:  # some hosts may have a difference that others lack: next they travel whole
                    self.held = {}
                    raise
                self.held["sent"].copy_(own)
            weights = self.held["weights"]
        else:
            weights = own.new_zeros(layout.hosts, own.numel())
            self._exchange(own, weights)
        for row, of_host in zip(rows, weights, strict=True):
            if layout.each > 1:
                _all_gather(row.view(-1), of_host, group=layout.inside)
            else:
                row[0].copy_(of_host)
        return None

    def _change(self, own: torch.Tensor) -> int:
        shape = (self._layout.hosts, own.numel())
        if self.held and (self.held["weights"].shape != shape or self.held["sent"].dtype != own.dtype):
            self.held = {}  # of a checkpoint with other ranks or another dtype
        if not self.held or torch.equal(own, self.held["sent"]):
            return _SAME if self.held else _REPLACED
        # Weights with NaN are replaced, too: no difference leads away from one.
        norm = functools.partial(torch.linalg.vector_norm, dtype=torch.promote_types(own.dtype, torch.float32))
        near = norm(own - self.held["weights"][self._layout.host]) <= FAR * norm(own)
        return _MOVED if near else _REPLACED

    def _exchange(self, own: torch.Tensor, weights: torch.Tensor) -> None:
        """Adds to ``weights`` of each host what its shard differs from them, as it arrives from there."""
        layout = self._layout

        def encode(transcoder: Transcoder, piece: slice) -> tuple[torch.Tensor, Any]:
            mine = weights[layout.host, piece]
            difference = (own[piece] - mine).float()
            message, messages = self._room(transcoder, 1), self._room(transcoder, layout.hosts)
            transcoder.encode(difference, message, None, difference)
            mine.add_(difference)
            work = _all_gather(messages, message, group=layout.across, async_op=True)
            return messages, work

        def decode(transcoder: Transcoder, piece: slice, messages: torch.Tensor) -> None:
            decoded = torch.empty(piece.stop - piece.start, dtype=torch.float32)
            for host in layout.others:
                transcoder.decode(messages[host], decoded)
                weights[host, piece].add_(decoded)

        self._pieces(own.numel(), encode, decode)


class _ReduceScatter(_Encoded):
    """FSDP's reduce-scatter. With error feedback it holds "lost", [hosts - 1, shard], float32: what the messages to
    each other host have lost, turned as they are."""

    def __init__(self, unit: str, layouts: _Layouts, codec: Codec | None, rotation: torch.Tensor | None) -> None:
        super().__init__(unit, layouts, codec)
        self._rotation = rotation

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        codec = self._codec_for(group, input_tensor)
        if codec is None or op not in (ReduceOp.SUM, ReduceOp.AVG):
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        layout, count = self._layout, output_tensor.numel()
        sums = input_tensor.view(layout.hosts, -1)
        if layout.each > 1:
            rows, sums = sums, sums.new_empty(layout.hosts, count)
            for row, of_host in zip(rows, sums, strict=True):
                _reduce_scatter(of_host, row, op=ReduceOp.SUM, group=layout.inside)
        # FSDP reduces parameters that have gradients alone: others in this step, and what was lost is not theirs.
        shape = (layout.hosts - 1, count)
        if not codec.error_feedback:
            self.held = {}
        elif not self.held or self.held["lost"].shape != shape:
            self.held = {"lost": torch.zeros(shape, dtype=torch.float32)}
        lost = self.held.get("lost")
        scale = 1.0 if op == ReduceOp.SUM else 1.0 / len(layout.ranks)

        def encode(transcoder: Transcoder, piece: slice) -> tuple[torch.Tensor, Any]:
            messages = self._room(transcoder, layout.hosts)
            for number, host in enumerate(layout.others):
                kept = None if lost is None else lost[number, piece]
                transcoder.encode(_turned(sums[host, piece].float(), self._rotation), messages[host], kept)
            arrived = torch.empty_like(messages)
            return arrived, distributed.all_to_all_single(arrived, messages, group=layout.across, async_op=True)

        def decode(transcoder: Transcoder, piece: slice, messages: torch.Tensor) -> None:
            arrived, result = [messages[host] for host in layout.others], sums[layout.host, piece].float()
            if self._rotation is None:
                transcoder.add(arrived, result, scale)
            else:
                others = torch.zeros(result.numel(), dtype=torch.float32)
                transcoder.add(arrived, others)
                result = (result + _turned(others, self._rotation.t())) * scale
            output_tensor[piece].copy_(result)

        self._pieces(count, encode, decode)
        return None


def _rotation() -> torch.Tensor:
    """A Hadamard matrix of one block of "int4", with random signs and a determinant of 1 or -1."""
    signs = torch.randint(2, (BLOCK,), generator=torch.Generator().manual_seed(BLOCK)) * 2 - 1
    made = torch.ones(1, 1, dtype=torch.float32)
    while len(made) < BLOCK:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    turned: torch.Tensor = signs[:, None] * made / BLOCK**0.5
    return turned


def _turned(values: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    """``values`` with each whole block of them multiplied by this matrix; themselves without one."""
    if rotation is None:
        return values
    blocks = values.numel() // BLOCK * BLOCK
    return torch.cat([(values[:blocks].view(-1, BLOCK) @ rotation).view(-1), values[blocks:]])
