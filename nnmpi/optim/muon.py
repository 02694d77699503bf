"""Muon: matrices move along the nearest orthogonal one of their momentum, everything else by AdamW.

    m = m + (1 - momentum) * (g - m)                        the slot "m", zeros at first
    d = m + (1 - momentum) * (g - m)                        Nesterov's; m itself without
    O = orthogonalized(d)                                   all its singular values near 1
    w = w * (1 - lr * weight_decay) - lr * 0.2 * sqrt(max(rows, columns)) * O

Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the factor: Liu et al., "Muon is
scalable for LLM training", 2025: an update is then as long as AdamW's, so that both take one learning rate.

All but O is elementwise, so each rank does it where its part of a matrix lies. O needs the whole matrix, and has an
owner for that among the ranks that share the work:

    ZeRO, 2 ranks      w  | 0 0 0 1 1 1 |      d of rank 1 -> rank 0, which then has all      a half of O -> rank 1
    replicas           w  | all | all |        each has all of d                              O -> the others

Owners are dealt out so that each has as many multiplications as others, and then as many elements. Whatever the ranks,
the owner multiplies the serial run's matrices: the update is its own to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import sqrt
from typing import Any, Final

from nnmpi.backend.array import Array, namespace
from nnmpi.errors import LayoutError, UsageError
from nnmpi.optim.adaptive import AdamW
from nnmpi.optim.optimizer import BufferBlock, ByGroup, Storage, number

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: they bring singular values into 0.7..1.2 the soonest
LEAST_NORM = 1e-7


def orthogonalize(matrix: Array, steps: int = 5) -> Array:
    """Return a matrix with the same singular vectors and singular values near 1, by Newton and Schulz's iteration.

    >>> import numpy as np
    >>> np.linalg.svd(orthogonalize(np.diag([3.0, 2.0, 1.0])))[1].round(1)
    array([1.1, 0.7, 0.7])

    Args:
        matrix: (rows, columns).
        steps: each x <- a x + (b x x' + c (x x')^2) x.
    """
    xp, (a, b, c) = namespace(matrix), COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / xp.maximum(xp.sqrt((matrix * matrix).sum()), LEAST_NORM)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x if x.shape == matrix.shape else x.T


@dataclass(frozen=True)
class Matrix:
    """A parameter with an owner.

    Attributes:
        shape: (rows, columns).
        buffer: the number of the flat array that has it.
        place: where this rank's part lies in that.
        counts: how many of its elements each rank has, one behind the other; empty where each has them all.
    """

    shape: tuple[int, ...]
    buffer: int
    place: slice
    counts: Sequence[int]

    @property
    def work(self) -> tuple[int, int]:
        """The multiplications of an iteration, and the elements."""
        short, long = sorted(self.shape)
        return short * short * (2 * long + short), short * long


class Muon(AdamW):
    """Muon for matrices (parameters of two axes that are no embedding's table), AdamW for the rest.

    >>> import nnmpi
    >>> from nnmpi import models, optim
    >>> model = models.mlp([4], 3, [8]).initialize(seed=0)
    >>> optim.Muon(model.storage, lr=0.01)
    Muon(lr=0.01, 67 parameters, after 0 steps)

    Args:
        storage: a model's, with whole parameters.
        lr: the learning rate, at least 0.
        momentum: what m keeps of its past in one update, in [0, 1).
        nesterov: look ahead along the momentum.
        adjust: "match_rms_adamw", as above; "original": in place of 0.2 sqrt(max(rows, columns)), max(1,
            sqrt(columns / rows)), for layers whose weights are (in, out).
        betas, eps, weight_decay: see `AdamW`; the decay is of matrices, too.

    Raises:
        LayoutError: for a model whose ranks have parts of matrices.
        UsageError: for values out of range, an unknown group, and a storage that is no model's.
    """

    elementwise = False

    def __init__(
        self,
        storage: Storage,
        lr: ByGroup = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: ByGroup = 1e-2,
    ) -> None:
        self.momentum: Final = number("momentum", momentum, 1)
        if adjust not in ("match_rms_adamw", "original"):
            raise UsageError(f"adjust is {adjust!r}; give match_rms_adamw or original")
        self.nesterov, self.adjust = nesterov, adjust
        super().__init__(storage, lr, betas, eps, weight_decay)

    def _runs(self, buffer: int) -> Iterator[slice]:
        """Yield what AdamW does of a buffer: all between matrices, which lie in order."""
        self._matrices = _matrices(self.storage)
        start = 0
        for matrix in self._matrices:
            if matrix.buffer == buffer:
                yield slice(start, matrix.place.start)
                start = matrix.place.stop
        yield slice(start, None)

    def _update_groups(self, lr: float, blocks: Iterable[BufferBlock]) -> None:
        super()._update_groups(lr, blocks)
        found = self._orthogonal([self._direct(matrix) for matrix in self._matrices])
        for matrix, change in zip(self._matrices, found, strict=True):
            data, (rows, columns) = self._data[matrix.buffer][matrix.place], matrix.shape
            ratio = max(1, sqrt(columns / rows)) if self.adjust == "original" else 0.2 * sqrt(max(rows, columns))
            rate = lr * self.rates[matrix.buffer]
            data *= 1 - rate * self.weight_decay[matrix.buffer]
            data -= change * (rate * ratio)

    def _direct(self, matrix: Matrix) -> Array:
        """Go on with the momentum of this rank's part of a matrix; return its direction there."""
        grad, m = (arrays[matrix.buffer][matrix.place] for arrays in (self._grads, self._slots["m"]))
        m += (grad - m) * (1 - self.momentum)
        return m + (grad - m) * (1 - self.momentum) if self.nesterov else m

    def _orthogonal(self, own: Sequence[Array]) -> list[Array]:
        """Return this rank's parts of the orthogonalized matrices, of whose directions it has these."""
        ranks, matrices = self.ranks or getattr(self.storage, "ranks", None), self._matrices
        size, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
        owned, shared = deal([each.work for each in matrices], size), any(each.counts for each in matrices)
        counts = [each.counts or [each.work[1]] * size for each in matrices]  # that each rank wants back
        mine = owned[rank]
        whole = [own[i] for i in mine]
        if shared:
            out = [[own[i] for i in theirs] for theirs in owned]
            came = _swap(ranks, out, [[counts[i][r] for i in mine] for r in range(size)], own[0])
            whole = [namespace(own[0]).concatenate(parts) for parts in zip(*came, strict=True)]
        done = [orthogonalize(d.reshape(matrices[i].shape)).reshape(-1) for i, d in zip(mine, whole, strict=True)]
        back = [done]
        if ranks is not None and matrices:
            cut = [_apart(d, counts[i]) if shared else [d] * size for i, d in zip(mine, done, strict=True)]
            out = [[parts[r] for parts in cut] for r in range(size)]
            back = _swap(ranks, out, [[counts[i][rank] for i in theirs] for theirs in owned], own[0])
        found = dict(zip(chain(*owned), chain(*back), strict=True))
        return [found[i] for i in range(len(matrices))]


def deal(works: Sequence[tuple[int, int]], size: int) -> list[list[int]]:
    """Return the numbers of what each rank does: the largest first, to the rank that has the least to do.

    >>> deal([(9, 1), (4, 1), (3, 1), (3, 1)], 2)
    [[0], [1, 2, 3]]
    """
    owned: list[list[int]] = [[] for _ in range(size)]
    loads = [(0, 0, rank) for rank in range(size)]
    for i in sorted(range(len(works)), key=works.__getitem__, reverse=True):
        operations, elements, rank = min(loads)
        owned[rank].append(i)
        loads[rank] = (operations + works[i][0], elements + works[i][1], rank)
    return owned


def _swap(
    ranks: Any, send: Sequence[Sequence[Array]], counts: Sequence[Sequence[int]], like: Array
) -> list[list[Array]]:
    """Send each rank some arrays; return those that come from each, of so many elements. All are like one."""
    flat = [namespace(like).concatenate([like[:0], *some]) for some in send]
    came = ranks.all_to_all_v(flat, [(sum(each),) for each in counts], "muon")
    return [_apart(array, each) for array, each in zip(came, counts, strict=True)]


def _apart(array: Array, counts: Sequence[int]) -> list[Array]:
    """Return views of so many elements each, one behind the other."""
    stops = accumulate(counts)
    return [array[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]


def _matrices(storage: Any) -> list[Matrix]:
    """Return the matrices of a model's storage, in its order.

    Raises:
        LayoutError, UsageError: see `Muon`.
    """
    if not hasattr(storage, "spans"):
        raise UsageError(
            "Muon works on the matrices of a model, and plain arrays do not say which these are; give model.storage"
        )
    found = []
    for span in storage.spans:
        each = span.parameter
        if len(each.declared) != 2 or each.is_table:
            continue
        if each.region is not None:
            raise LayoutError(
                f"Muon works on whole matrices, and this rank has a part of {each.name}; leave tp at 1, as dp, pp, sp "
                "and zero leave matrices whole, or take adamw"
            )
        counts = getattr(storage.view(span, storage.data), "counts", ())
        found.append(Matrix(each.declared, span.buffer, storage.place(span), counts))
    return found
