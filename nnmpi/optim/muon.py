"""Muon: the update of a matrix is its momentum, orthogonalized; AdamW updates everything else.

    m = m + (1 - momentum) * (g - m)               slot "m", initially zeros
    d = m + (1 - momentum) * (g - m)               Nesterov momentum
    O = orthogonalized(d)                          all singular values near 1
    w = w * (1 - lr * weight_decay) - lr * factor * O

Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. The default factor,
0.2 * sqrt(max(rows, columns)), is that of Liu et al., "Muon is scalable for LLM training", 2025:
updates then have the size of AdamW's, so both use one learning rate.

All but O is elementwise, so each rank computes it on its shard of a matrix. O needs the full
matrix. One rank, the matrix's owner, gathers d, computes O and sends it to the others:

    ZeRO, 2 ranks      w | 0 0 0 1 1 1 |     rank 1's d -> owner 0      half of O -> rank 1
    replicas           w | all | all |       each rank has all of d     O -> the others

Owners are assigned to balance multiplications first, elements second. On any number of ranks the
owner multiplies the matrices of the serial run, so the update has the same bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import sqrt
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.storage import Storage
from nnmpi.base.errors import LayoutError, UsageError, number
from nnmpi.optim.adaptive import AdamW
from nnmpi.optim.optimizer import BufferBlock, ByGroup

__all__ = ["Muon"]

# Jordan's: they bring singular values into 0.7..1.2 in the fewest steps
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7
# by PyTorch's names, of a matrix (in, out)
FACTORS: Mapping[str, Callable[[int, int], float]] = MappingProxyType(
    {
        "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
        "original": lambda rows, columns: sqrt(max(1, columns / rows)),
    }
)


def orthogonalize(matrix: Array, steps: int = 5) -> Array:
    """Return the matrix with its singular values near 1, by a Newton-Schulz iteration.

    >>> import numpy as np
    >>> np.linalg.svd(orthogonalize(np.diag([3.0, 2.0, 1.0])))[1].round(1)
    array([1.1, 0.7, 0.7])

    Args:
        matrix: (rows, columns).
        steps: each x <- a x + (b x x' + c (x x')^2) x.
    """
    (a, b, c) = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.maximum(np.sqrt((matrix * matrix).sum()), LEAST_NORM)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x if x.shape == matrix.shape else x.T


class Muon(AdamW, read_once="momentum adjust_lr_fn"):
    """Muon for matrices (parameters of two axes except embedding tables), AdamW for the rest.

    >>> import nnmpi
    >>> from nnmpi import models, optim
    >>> model = models.mlp([4], 3, [8]).initialize(seed=0)
    >>> optim.Muon(model.storage, lr=0.01)
    Muon(lr=0.01, 67 parameters, after 0 steps)

    Args:
        storage: a model's, without tensor parallelism.
        lr: the learning rate, at least 0.
        momentum: the decay rate of m, in [0, 1).
        betas, eps, weight_decay: see `AdamW`; the decay applies to matrices too.
        adjust_lr_fn: the factor of a matrix's update, by PyTorch's names: "match_rms_adamw", or
            "original", PyTorch's default, sqrt(max(1, outputs / inputs)) of a layer.

    Raises:
        LayoutError: for a model with matrices sharded by tensor parallelism.
        UsageError: for values out of range, an unknown group, and a storage of plain arrays.
    """

    elementwise = False
    _matrices: Sequence[Any] = ()  # a pipeline's stage may have no buffer

    def __init__(
        self,
        storage: Storage,
        lr: ByGroup = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: ByGroup = 1e-2,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        if adjust_lr_fn not in FACTORS:
            raise UsageError(
                f"adjust_lr_fn is {adjust_lr_fn!r}; give {' or '.join(map(repr, FACTORS))}"
            )
        self.adjust_lr_fn: Final = adjust_lr_fn
        self.momentum: Final = number("momentum", momentum, 1)
        super().__init__(storage, lr, betas, eps, weight_decay)

    def _runs(self, buffer: int) -> Iterator[slice]:
        """Yield the slices of a buffer that AdamW updates: those between the matrices."""
        self._matrices, start = _matrices(self.storage), 0
        for span, local, _ in self._matrices:  # in the order of the buffer
            if span.buffer == buffer:
                yield slice(start, local.start)
                start = local.stop
        yield slice(start, None)

    def update_all(self, lr: float, blocks: Iterable[BufferBlock]) -> None:
        """See `Optimizer.update_all`; the matrices are in no block."""
        super().update_all(lr, blocks)
        ranks = self.storage.replicas
        size, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
        owners = deal([span.parameter.declared for span, *_ in self._matrices], size)
        # 1. the momentum of each shard; gather d on the owner
        directions: list[Array] = []
        for (span, local, counts), owner in zip(self._matrices, owners, strict=True):
            grad, m = (arrays[span.buffer][local] for arrays in (self._grads, self._slots["m"]))
            m += (grad - m) * (1 - self.momentum)
            d = m + (grad - m) * (1 - self.momentum)
            if counts:
                d = _exchange(ranks, {owner: d}, [count * (owner == rank) for count in counts], d)
            directions.append(d)
        # 2. O of the owned matrices, all of them before the exchanges: so owners work in parallel
        for i, (span, *_) in enumerate(self._matrices):
            if owners[i] == rank:
                full = directions[i].reshape(span.parameter.declared)
                directions[i] = orthogonalize(full).reshape(-1)
        # 3. send O to the ranks that need it, and update
        for (span, local, counts), owner, d in zip(self._matrices, owners, directions, strict=True):
            data, rate = self._data[span.buffer][local], lr * self.rates[span.buffer]
            if size > 1:
                pieces = namespace(d).split(d, [*accumulate(counts[:-1])]) if counts else [d] * size
                parts = dict(enumerate(pieces)) if owner == rank else {}
                d = _exchange(ranks, parts, [data.size * (owner == r) for r in range(size)], d)
            data *= 1 - rate * self.weight_decay[span.buffer]
            data -= d * (rate * FACTORS[self.adjust_lr_fn](*span.parameter.declared))


def deal(shapes: Sequence[Sequence[int]], size: int) -> list[int]:
    """Assign an owner to each matrix: the largest first, each to the least loaded rank.

    Loads are compared by the multiplications of an iteration, then by the elements.

    >>> deal([(9, 9), (5, 9), (5, 8), (5, 8)], 2)
    [0, 1, 1, 1]
    """
    works = [(s * s * (2 * n + s), s * n) for s, n in map(sorted, shapes)]
    owners, loads = [0] * len(works), [(0, 0)] * size
    for i in sorted(range(len(works)), key=works.__getitem__, reverse=True):
        owners[i] = rank = loads.index(min(loads))
        loads[rank] = loads[rank][0] + works[i][0], loads[rank][1] + works[i][1]
    return owners


def _exchange(ranks: Any, parts: Mapping[int, Array], counts: Sequence[int], like: Array) -> Array:
    """Send parts, by rank; return the received ones, `counts` elements per rank, as one array."""
    sent = [parts.get(rank, like[:0]) for rank in range(ranks.size)]
    return namespace(like).concatenate(
        ranks.all_to_all_v(sent, [(count,) for count in counts], "muon", check=False)
    )


def _matrices(storage: Any) -> list[tuple[Any, slice, Sequence[int]]]:
    """Return a storage's matrices: span, this rank's slice, and the number of elements per rank.

    The numbers are () if every rank has the full matrix.

    Raises:
        LayoutError, UsageError: see `Muon`.
    """
    if not hasattr(storage, "spans"):
        raise UsageError(
            "Muon updates a model's matrices, which plain arrays do not identify; give"
            " model.storage"
        )
    spans = [
        s for s in storage.spans if len(s.parameter.declared) == 2 and not s.parameter.is_table
    ]
    for item in (span.parameter for span in spans):
        if item.region is not None:
            raise LayoutError(
                f"Muon works on whole matrices, but this rank has only part of {item.name}; leave"
                " tp at 1 (dp, pp, sp and zero keep matrices whole), or use adamw"
            )
    # gradients are divided wherever the update is; weights may be whole beside it
    return [
        (
            span,
            storage.trained_slice(span),
            getattr(storage.view(span, storage.grads), "counts", ()),
        )
        for span in spans
    ]
