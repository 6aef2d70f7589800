"""PowerSGD: gradients travel as products of two thin matrices."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bagua.algorithms.base import Algorithm, Bucket, DataParallel, ProcessGroup
from bagua.algorithms.checks import check_count
from bagua.algorithms.codec import Codec
from bagua.algorithms.plan import FRESH, RESULT, SCRATCH, AllReduce, Local, Plan
from bagua.algorithms.warm_up import WarmedUpImpl, WarmUp

LEFT = "left"  # Slot: gradients that travel as they are, then P of every matrix

RIGHT = "right"  # Slot: Q of every matrix


@dataclass
class _State:
    """State that outlives buckets.

    ``memory`` - P Qᵀ is the part of the gradients that earlier steps have not sent: [rows, columns]. ``left`` is P of
    the last step, transposed: [rank, rows]; ``right`` is its Q, transposed: [rank, columns]. The product leaves the
    memory in the pass that adds the next gradient. All float32, or float64 for gradients of float64."""

    memory: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class _Matrix:
    """A parameter that is compressed: its ``number`` in the bucket, and where its parts begin in LEFT and RIGHT, in
    elements. P and Q lie there transposed."""

    name: str
    number: int
    rows: int
    columns: int
    rank: int
    left_at: int
    right_at: int
    state: _State

    def of(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns its tensor among those of the bucket, as [rows, columns]."""
        tensor = views[self.number]
        # A view: rows lie outermost in memory.
        return tensor.as_strided((self.rows, self.columns), (self.columns, 1), tensor.storage_offset())

    def left(self, flat: torch.Tensor) -> torch.Tensor:
        """P transposed, [rank, rows]."""
        return flat[self.left_at : self.left_at + self.rank * self.rows].view(self.rank, self.rows)

    def right(self, flat: torch.Tensor) -> torch.Tensor:
        """Q transposed, [rank, columns]."""
        return flat[self.right_at : self.right_at + self.rank * self.columns].view(self.rank, self.columns)


def matrix_shape(tensor: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix. Rows are the dimension that lies outermost in memory, which is that
    of the outputs, so that the matrix is a view of the flat gradient."""
    if tensor.dim() < 2 or tensor.numel() == 0:  # a vector can't be compressed
        return 1, tensor.numel()
    # The stride of a dimension of one element says nothing.
    strides = [stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    rows = tensor.shape[strides.index(max(strides))]
    return rows, tensor.numel() // rows


class _Compressed:
    """Matrices of one bucket, and the three computations of its plan.

    ``looks``: the host looks whether gradients are finite. On a GPU it would have to wait for that: both cases are
    computed there.
    """

    def __init__(self, bucket: Bucket, settings: PowerSGDAlgorithm, state_of: Callable[..., _State]) -> None:
        self.arithmetic = bucket.low_rank
        self.plain: list[tuple[int, int, int]] = []  # (number in the bucket, place in LEFT, elements)
        self.matrices: list[_Matrix] = []
        found: list[tuple[int, int, int, int]] = []
        left = right = 0
        for number, tensor in enumerate(bucket.tensors):
            rows, columns = matrix_shape(tensor)
            rank = min(settings.rank, rows, columns)
            if (rows + columns) * rank * settings.min_compression_rate >= tensor.numel():  # too little would be saved
                self.plain.append((number, left, tensor.numel()))
                left += tensor.numel()
            else:
                found.append((rows, rank, columns, number))
        # Equal shapes of P side by side: one batch to orthogonalise.
        found.sort(key=lambda one: one[:2])
        for rows, rank, columns, number in found:
            name = bucket.names[number]
            state = state_of(name, rows, columns, rank, bucket.tensors[0])
            self.matrices.append(_Matrix(name, number, rows, columns, rank, left, right, state))
            left += rows * rank
            right += columns * rank
        self.left_elements, self.right_elements = left, right
        self.batches = _batches(self.matrices)
        self.broken: set[str] = set()
        self.looks = not bucket.tensors[0].is_cuda
        self.finite: dict[str, torch.Tensor] = {}

    def plan(self) -> Plan:
        """Returns the plan with both phases. It can't be repeated, because the memories are state."""
        return Plan(
            (
                Local(self.project, "P = M Q", reads=(FRESH,), writes=(LEFT,), beside=self.memories),
                AllReduce("AVG", src=LEFT, dst=LEFT),
                Local(self.back_project, "Q = Mᵀ P", reads=(LEFT,), writes=(LEFT, RIGHT)),
                AllReduce("AVG", src=RIGHT, dst=RIGHT),
                Local(self.restore, "P Qᵀ", reads=(LEFT, RIGHT), writes=(RESULT,)),
            )
        )

    def memories(self) -> list[torch.Tensor]:
        """Returns the state that ``project`` changes."""
        return [matrix.state.memory for matrix in self.matrices]

    def project(self, bucket: Bucket) -> None:
        """M = gradient + error, in place of the error; P = M Q."""
        fresh, left = bucket.views(FRESH), bucket.slot(LEFT)
        for number, to, count in self.plain:
            tensor = fresh[number]
            # In the order of memory: no pass that permutes.
            left[to : to + count].copy_(tensor.as_strided((count,), (1,), tensor.storage_offset()))
        for matrix in self.matrices:
            state = matrix.state
            self.arithmetic.project(state.memory, matrix.of(fresh), state.left, state.right, matrix.left(left))

    def back_project(self, bucket: Bucket) -> None:
        """P becomes orthonormal; Q = Mᵀ P. An infinite or undefined gradient on any rank shows in P on all of them."""
        left, right = bucket.slot(LEFT), bucket.slot(RIGHT)
        for first, last in self.batches:
            like = self.matrices[first]
            count = last - first
            batch = left[like.left_at : like.left_at + count * like.rows * like.rank]
            batch = batch.view(count, like.rank, like.rows).transpose(1, 2)
            batch.copy_(orthonormal(batch))
        self.broken = set()
        for matrix in self.matrices:
            basis = matrix.left(left)
            if not self.looks:
                finite = self.finite[matrix.name] = basis.sum().isfinite()
                self.arithmetic.back_project(matrix.state.memory, basis, matrix.right(right))
                _choose(finite, matrix.right(right), matrix.state.right)
            elif math.isfinite(float(basis.sum())):  # one number tells it: a sum keeps NaN and infinity
                self.arithmetic.back_project(matrix.state.memory, basis, matrix.right(right))
            else:
                self.broken.add(matrix.name)
                matrix.right(right).copy_(matrix.state.right)  # the last Q stands in: a message must go in any case

    def restore(self, bucket: Bucket) -> None:
        """The result P Qᵀ; the error is what M has more. Where the gradient was not finite the result is NaN, and the
        error begins anew: the next step is free of it."""
        result, left, right = bucket.views(RESULT), bucket.slot(LEFT), bucket.slot(RIGHT)
        for number, source, count in self.plain:
            tensor = result[number]
            tensor.as_strided((count,), (1,), tensor.storage_offset()).copy_(left[source : source + count])
        for matrix in self.matrices:
            state, mine, basis = matrix.state, matrix.of(result), matrix.left(left)
            if matrix.name in self.broken:
                mine.fill_(math.nan)  # the program sees it, as after an all-reduce
                state.memory.zero_()
                state.left.zero_()
                continue
            state.right.copy_(matrix.right(right))
            state.left.copy_(basis)
            self.arithmetic.product(basis, state.right, mine)
            if not self.looks:
                finite = self.finite[matrix.name]
                _choose(finite, mine, math.nan)
                _choose(finite, state.memory, 0.0)
                _choose(finite, state.left, 0.0)


def _batches(matrices: Sequence[_Matrix]) -> list[tuple[int, int]]:
    """Returns (first, last + 1) of neighbours with P of one shape."""
    found, first = [], 0
    for _, group in itertools.groupby(matrices, key=lambda matrix: (matrix.rows, matrix.rank)):
        last = first + len(list(group))
        found.append((first, last))
        first = last
    return found


def _choose(finite: torch.Tensor, values: torch.Tensor, otherwise: torch.Tensor | float) -> None:
    """Keeps ``values`` if ``finite`` (one element) is true; else they become ``otherwise``."""
    values.copy_(torch.where(finite, values, otherwise))


def orthonormal(batch: torch.Tensor) -> torch.Tensor:
    """Orthonormal bases of the columns, [count, rows, rank], by QR. Columns that depend on others are replaced by
    some that do not, so that a gradient of zeros does no harm to what comes after it."""
    # QR is there for these dtypes alone.
    wide = batch if batch.dtype in (torch.float32, torch.float64) else batch.float()
    basis: torch.Tensor = torch.linalg.qr(wide)[0]
    return basis


class PowerSGDAlgorithmImpl(WarmedUpImpl):
    """``PowerSGDAlgorithm`` at work on one model. Errors and factors are kept by parameter name, so that they survive
    when buckets are made anew."""

    def __init__(self, process_group: ProcessGroup, settings: PowerSGDAlgorithm) -> None:
        super().__init__(process_group, settings.warm_up)
        self.settings = settings
        self._states: dict[str, _State] = {}

    def tensors_for_newcomers(self) -> list[torch.Tensor]:
        """The factors Q with which the next step begins. What this rank has not sent yet stays its own."""
        return [self._states[name].right for name in sorted(self._states)]  # sorted: all ranks have the same order

    def tensors_of_rank(self) -> list[torch.Tensor]:
        """Gradients that this rank has not sent yet: the memory, and the P that is to be taken off it."""
        states = [self._states[name] for name in sorted(self._states)]
        return [tensor for state in states for tensor in (state.memory, state.left)]

    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Gives the bucket two all-reduces of thin matrices, or one of gradients if nothing is worth compressing."""
        if self.compresses:
            compressed = _Compressed(bucket, self.settings, self._state_of)
            if compressed.matrices:
                bucket.add_slot(LEFT, compressed.left_elements, on_change=SCRATCH)
                bucket.add_slot(RIGHT, compressed.right_elements, on_change=SCRATCH)
                bucket.set_plan(compressed.plan())
                return
        bucket.set_plan(Plan((AllReduce("AVG"),)) if self.compresses else self.warm_up.plan())

    def _state_of(self, name: str, rows: int, columns: int, rank: int, like: torch.Tensor) -> _State:
        if name not in self._states:
            dtype = torch.promote_types(like.dtype, torch.float32)  # sums of float16 would lose what is not sent
            # crc32: ``hash`` of a text differs between processes.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.settings.seed} {name}".encode()))
            # Every device has random numbers of its own.
            right = torch.randn(rank, columns, dtype=dtype, generator=generator, device="cpu")
            memory = torch.zeros(rows, columns, dtype=dtype, device=like.device)
            left = torch.zeros(rank, rows, dtype=dtype, device=like.device)
            self._states[name] = _State(memory, left, right.to(like.device))
        return self._states[name]


class PowerSGDAlgorithm(Algorithm):
    """The gradient of each matrix, [n, m], travels as P [n, r] and Q [m, r], by one step of the power method.

    Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019.
    With G_i rank i's gradient, E_i what it has not sent yet, and Q that of the step before:

        M_i = G_i + E_i;   P = orthonormal(mean(M_i Q));   Q = mean(M_iᵀ P);   result = P Qᵀ;   E_i = M_i - result

    Per step 2(h-1)/h · 4 r (n + m) bytes per matrix go in and out of each of h hosts, in two messages per bucket, where
    gradients would be 4 n m: for 4096 x 4096 and r = 2, a thousandth. Vectors and small matrices travel as they are. A
    rank keeps one float32 per element. What counts of the arithmetic is three passes over memory: one adds the gradient
    from where autograd left it, and multiplies by Q; one multiplies by P; one writes the result. What bfloat16 or
    float16 round of the result is not fed back.

    Choose it where the network is very slow and the model has large matrices; what 8 or 4 bits make small enough, they
    lose less of. Ranks compute the same result from the same P and Q: replicas are bit-identical on processors of one
    kind, and to rounding on different ones. Clip gradients after backward, as ever.

    Args:
        rank: r. 2 kept the accuracy of full gradients on digits from the first step on; 4 is safer.
        start_after: Steps with all-reduce of all gradients before the first compressed one. Gradients of the first
            steps are large and turn quickly: a few per cent of the training help.
        min_compression_rate: A parameter is compressed if P and Q have fewer than 1/this of its elements.
        seed: Of the first Q; the same on all ranks.
        warmup_codec: How gradients are encoded between hosts before that; None: as they are.
    """

    def __init__(
        self,
        rank: int = 2,
        start_after: int = 0,
        min_compression_rate: float = 2.0,
        seed: int = 0,
        warmup_codec: Codec | str | None = None,
    ) -> None:
        self.rank = check_count("rank", rank, 1)
        self.warm_up = WarmUp.of(start_after, warmup_codec, "start_after")
        if not min_compression_rate >= 1:  # NaN is refused, too
            raise ValueError(f"min_compression_rate is {min_compression_rate}: it must be at least 1. [BG302]")
        self.min_compression_rate = float(min_compression_rate)
        self.seed = check_count("seed", seed, 0)

    def reify(self, process_group: ProcessGroup) -> PowerSGDAlgorithmImpl:
        return PowerSGDAlgorithmImpl(process_group, self)
