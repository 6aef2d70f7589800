"""PowerSGD: gradients travel as products of two thin matrices."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bagua.algorithms.base import Algorithm, AlgorithmImpl, Bucket, DataParallel, ProcessGroup
from bagua.algorithms.periodic import check_count
from bagua.algorithms.plan import GRADIENT, RESULT, AllReduce, Local, Plan
from bagua.algorithms.registry import GlobalAlgorithmRegistry

LEFT = "left"
"""Slot: gradients that travel as they are, then P of every matrix."""

RIGHT = "right"
"""Slot: Q of every matrix."""

_BLOCK_ELEMENTS = 1 << 18  # fit into a processor's cache together with what is computed from them
_ALL = 1 << 62


@dataclass
class _State:
    """What outlives buckets. ``error``: what earlier steps have not sent, [rows, columns]; ``right``: the last Q,
    transposed: [rank, columns]. Both float32, or float64 for gradients of float64."""

    error: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class _Matrix:
    """A parameter that is compressed, and where its parts begin, in elements: ``at`` in the bucket's gradient, the
    others in LEFT and RIGHT. P and Q lie there transposed: products with few long rows are the fastest."""

    name: str
    rows: int
    columns: int
    rank: int
    at: int
    left_at: int
    right_at: int
    state: _State

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The gradient, [rows, columns], in a flat tensor of the whole bucket."""
        return flat[self.at : self.at + self.rows * self.columns].view(self.rows, self.columns)

    def left(self, flat: torch.Tensor) -> torch.Tensor:
        """P transposed, [rank, rows]."""
        return flat[self.left_at : self.left_at + self.rank * self.rows].view(self.rank, self.rows)

    def right(self, flat: torch.Tensor) -> torch.Tensor:
        """Q transposed, [rank, columns]."""
        return flat[self.right_at : self.right_at + self.rank * self.columns].view(self.rank, self.columns)

    def blocks(self, elements: int) -> Iterator[slice]:
        """Runs of rows of about so many elements."""
        step = max(1, elements // self.columns)
        for first in range(0, self.rows, step):
            yield slice(first, min(first + step, self.rows))


def matrix_shape(tensor: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix. Rows are the dimension that lies outermost in memory, which is that
    of the outputs, so that the matrix is a view of the flat gradient."""
    if tensor.dim() < 2 or tensor.numel() == 0:
        return 1, tensor.numel()
    strides = [stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    rows = tensor.shape[strides.index(max(strides))]
    return rows, tensor.numel() // rows


class _Compressed:
    """One bucket's matrices, and the three computations of its plan.

    ``looks``: the host looks whether gradients are finite. On a GPU it would have to wait for that: both cases are
    computed there.
    """

    def __init__(self, bucket: Bucket, settings: PowerSGDAlgorithm, state_of: Callable[..., _State]) -> None:
        self.plain: list[tuple[int, int, int]] = []  # (place in the gradient, place in LEFT, elements)
        self.matrices: list[_Matrix] = []
        places = itertools.accumulate((tensor.numel() for tensor in bucket.tensors), initial=0)
        found: list[tuple[int, int, int, str, int]] = []
        left = right = 0
        for name, tensor, at in zip(bucket.names, bucket.tensors, places, strict=False):
            rows, columns = matrix_shape(tensor)
            rank = min(settings.rank, rows, columns)
            if (rows + columns) * rank * settings.min_compression_rate >= tensor.numel():
                self.plain.append((at, left, tensor.numel()))
                left += tensor.numel()
            else:
                found.append((rows, rank, columns, name, at))
        # Equal shapes of P side by side: one batch to orthogonalise.
        found.sort(key=lambda one: one[:2])
        for rows, rank, columns, name, at in found:
            state = state_of(name, rows, columns, rank, bucket.tensors[0])
            self.matrices.append(_Matrix(name, rows, columns, rank, at, left, right, state))
            left += rows * rank
            right += columns * rank
        self.left_elements, self.right_elements = left, right
        self.batches = _batches(self.matrices)
        self.broken: set[str] = set()
        self.looks = not bucket.tensors[0].is_cuda
        self.block = _BLOCK_ELEMENTS if self.looks else _ALL
        self.finite: dict[str, torch.Tensor] = {}

    def plan(self) -> Plan:
        """Both phases; the errors are state, so the plan can't be repeated."""
        return Plan(
            (
                Local(self.project, "P = M Q", reads=(GRADIENT,), writes=(LEFT,)),
                AllReduce("AVG", src=LEFT, dst=LEFT),
                Local(self.back_project, "Q = Mᵀ P", reads=(LEFT,), writes=(LEFT, RIGHT)),
                AllReduce("AVG", src=RIGHT, dst=RIGHT),
                Local(self.restore, "P Qᵀ", reads=(LEFT, RIGHT), writes=(RESULT,)),
            )
        )

    def project(self, bucket: Bucket) -> None:
        """M = gradient + error, in place of the error; P = M Q."""
        gradient, left = bucket.slot(GRADIENT), bucket.slot(LEFT)
        for at, to, count in self.plain:
            left[to : to + count].copy_(gradient[at : at + count])
        for matrix in self.matrices:
            state, mine, projected = matrix.state, matrix.of(gradient), matrix.left(left)
            for rows in matrix.blocks(self.block):
                block = state.error[rows].add_(mine[rows])
                _multiply(state.right, block.t(), projected[:, rows])

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
                _multiply(basis, matrix.state.error, matrix.right(right))
                _choose(finite, matrix.right(right), matrix.state.right)
            elif math.isfinite(float(basis.sum())):
                _multiply(basis, matrix.state.error, matrix.right(right))
            else:
                self.broken.add(matrix.name)
                matrix.right(right).copy_(matrix.state.right)

    def restore(self, bucket: Bucket) -> None:
        """The result P Qᵀ; the error is what M has more. Where the gradient was not finite the result is NaN, and the
        error begins anew: the next step is free of it."""
        result, left, right = bucket.slot(RESULT), bucket.slot(LEFT), bucket.slot(RIGHT)
        for at, source, count in self.plain:
            result[at : at + count].copy_(left[source : source + count])
        for matrix in self.matrices:
            state, mine = matrix.state, matrix.of(result)
            if matrix.name in self.broken:
                mine.fill_(math.nan)
                state.error.zero_()
                continue
            state.right.copy_(matrix.right(right))
            basis = matrix.left(left)
            for rows in matrix.blocks(self.block):
                _outer(basis[:, rows], state.right, mine[rows])
                state.error[rows].sub_(mine[rows])
            if not self.looks:
                finite = self.finite[matrix.name]
                _choose(finite, mine, math.nan)
                _choose(finite, state.error, 0.0)


def _batches(matrices: Sequence[_Matrix]) -> list[tuple[int, int]]:
    """(first, last + 1) of neighbours with P of one shape."""
    found, first = [], 0
    for _, group in itertools.groupby(matrices, key=lambda matrix: (matrix.rows, matrix.rank)):
        last = first + len(list(group))
        found.append((first, last))
        first = last
    return found


def _choose(finite: torch.Tensor, values: torch.Tensor, otherwise: torch.Tensor | float) -> None:
    """``values`` stay where ``finite`` (one element) is true, and become ``otherwise`` where it is not."""
    values.copy_(torch.where(finite, values, otherwise))


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out = a @ b``, rounded to the dtype of ``out`` at the end."""
    if a.dtype == b.dtype == out.dtype and out.is_contiguous():
        torch.mm(a, b, out=out)
    else:
        common = torch.promote_types(a.dtype, b.dtype)
        out.copy_(a.to(common) @ b.to(common))


def _outer(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out = aᵀ b`` for few rows in ``a`` and ``b``: the sum of their outer products, one after the other."""
    if out.dtype != b.dtype:
        out.copy_(a.to(b.dtype).t() @ b)
        return
    torch.mul(a[0].unsqueeze(1), b[0], out=out)
    for number in range(1, len(a)):
        out.addr_(a[number], b[number])


def orthonormal(batch: torch.Tensor) -> torch.Tensor:
    """Orthonormal bases of the columns, [count, rows, rank], by QR. Columns that depend on others are replaced by
    some that do not, so that a gradient of zeros does no harm to what comes after it."""
    wide = batch if batch.dtype in (torch.float32, torch.float64) else batch.float()
    basis: torch.Tensor = torch.linalg.qr(wide)[0]
    return basis


class PowerSGDAlgorithmImpl(AlgorithmImpl):
    """``PowerSGDAlgorithm`` at work on one model. Errors and factors are kept by parameter name, so that they survive
    when buckets are made anew."""

    def __init__(self, process_group: ProcessGroup, settings: PowerSGDAlgorithm) -> None:
        super().__init__(process_group)
        self.settings = settings
        self.steps = 0
        self.compresses = settings.start_after == 0
        self._states: dict[str, _State] = {}

    def need_reset(self) -> bool:
        """Once, when the full-precision steps are over."""
        if self.compresses or self.steps < self.settings.start_after:
            return False
        self.compresses = True
        return True

    def init_operations(self, ddp: DataParallel, bucket: Bucket) -> None:
        """Two all-reduces of thin matrices; one of the gradients where nothing is worth compressing."""
        if self.compresses:
            compressed = _Compressed(bucket, self.settings, self._state_of)
            if compressed.matrices:
                bucket.add_slot(LEFT, compressed.left_elements)
                bucket.add_slot(RIGHT, compressed.right_elements)
                bucket.set_plan(compressed.plan())
                return
        bucket.set_plan(Plan((AllReduce("AVG"),)))

    def _state_of(self, name: str, rows: int, columns: int, rank: int, like: torch.Tensor) -> _State:
        if name not in self._states:
            dtype = torch.promote_types(like.dtype, torch.float32)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.settings.seed} {name}".encode()))
            right = torch.randn(rank, columns, dtype=dtype, generator=generator, device="cpu")
            error = torch.zeros(rows, columns, dtype=dtype, device=like.device)
            self._states[name] = _State(error, right.to(like.device))
        return self._states[name]

    def init_post_backward_hook(self, ddp: DataParallel) -> Callable[[], None]:
        """Counts steps."""

        def after_backward() -> None:
            ddp.finish_backward()
            self.steps += 1

        return after_backward


class PowerSGDAlgorithm(Algorithm):
    """The gradient of each matrix, [n, m], travels as P [n, r] and Q [m, r], by one step of the power method.

    Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019.
    With G_i rank i's gradient, E_i what it has not sent yet, and Q that of the step before:

        M_i = G_i + E_i;   P = orthonormal(mean(M_i Q));   Q = mean(M_iᵀ P);   result = P Qᵀ;   E_i = M_i - result

    Per step 2(h-1)/h · 4 r (n + m) bytes per matrix go in and out of each of h hosts, in two messages per bucket, where
    gradients would be 4 n m: for 4096 x 4096 and r = 2, a thousandth. Vectors and small matrices travel as they are. A
    rank keeps one float32 per element. Three passes over gradient and error are all the arithmetic that counts.

    Choose it where the network is very slow and the model has large matrices; what 8 or 4 bits make small enough, they
    lose less of. Ranks compute the same result from the same P and Q: replicas are bit-identical on processors of one
    kind, and to rounding on different ones. Clip gradients after backward, as ever.

    Args:
        rank: r. 2 kept the accuracy of full gradients on digits from the first step on; 4 is safer.
        start_after: Steps with full-precision all-reduce before the first compressed one. Gradients of the first steps
            are large and turn quickly: a few per cent of the training help.
        min_compression_rate: A parameter is compressed if P and Q have fewer than 1/this of its elements.
        seed: Of the first Q; the same on all ranks.
    """

    def __init__(self, rank: int = 2, start_after: int = 0, min_compression_rate: float = 2.0, seed: int = 0) -> None:
        self.rank = check_count("rank", rank, 1)
        self.start_after = check_count("start_after", start_after, 0)
        if not min_compression_rate >= 1:
            raise ValueError(f"min_compression_rate is {min_compression_rate}: it must be at least 1.")
        self.min_compression_rate = float(min_compression_rate)
        self.seed = check_count("seed", seed, 0)

    def reify(self, process_group: ProcessGroup) -> PowerSGDAlgorithmImpl:
        """A new implementation for one model."""
        return PowerSGDAlgorithmImpl(process_group, self)


GlobalAlgorithmRegistry.register("power_sgd", PowerSGDAlgorithm, "gradients as products of two thin matrices")
