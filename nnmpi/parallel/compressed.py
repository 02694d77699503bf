"""Gradients in fewer bytes: sums that are not exact, for slow links. See `--compress`.

    fp16, bf16       each gradient and each sum is rounded to 16 bits, and sent so; added in float32
    powersgd:RANK    a matrix G is sent as P (m, RANK) and Q (n, RANK), with P Q' near G
    topk:SHARE       the largest SHARE of each gradient is sent, as values and their places

    n numbers of B bytes, k = SHARE n, N replicas      bytes that a replica gives    a link carries
    exact sums                                         B n                           2 (N-1)/N B n
    bf16, fp16 (and 8 for its scale)                   2 n                           2 (N-1)/N 2 n
    powersgd:r, of an (m, n) matrix                    B r (m + n)                   2 (N-1)/N of it
    topk                                               (4 + B) k                     (N-1) of it

The last two keep what they have not sent, and add it to the next gradient (error feedback: Stich et
al., "Sparsified SGD with memory", 2018; for PowerSGD: Vogels et al., "PowerSGD: practical low-rank
gradient compression for distributed optimization", 2019; Lin et al., "Deep gradient compression",
2018, trained with a thousandth). So what is sent in all steps, and what is kept, is the sum of all
gradients. Sixteen bits keep nothing: they round to the nearest number, by 2^-11 or 2^-8 of it. They
are summed by an all-to-all, float32 sums of each rank's chunk, and an all-gather: see
`comm.execution.halved`.

All replicas get the same bits, so they stay equal; but the sums differ from the serial run's, and
depend on the number of replicas. On one replica nothing is sent, and nothing compressed: such a run
is the serial one. The other axes of a layout send exact numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import ceil, frexp, inf, isfinite, nan, prod
from typing import Any, ClassVar

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape, namespace
from nnmpi.backend.blas import loaded_pools
from nnmpi.backend.precision import low_dtype
from nnmpi.base.errors import UsageError
from nnmpi.base.glossary import Glossary
from nnmpi.base.units import format_bytes
from nnmpi.comm.buffers import from_host, to_host
from nnmpi.comm.group import Group
from nnmpi.comm.world import Traffic
from nnmpi.parallel.summed import GradientSum

RESIDUAL = "residual"  # in a state: what was not sent yet
FACTOR = "factor"  # in PowerSGD's: Q of the last step, with which the next one begins
MOST_EXPONENT = 100  # of a scale, which is a float32
SCALE_BYTES = 8  # of a gradient's largest number, for its scale
PLACE: Dtype = np.dtype(np.uint32)
ALL_REDUCE, ALL_GATHER = "all-reduce", "all-gather"

SentBytes = Sequence[tuple[str, int]]
"""Collectives, and the bytes that a replica gives to each."""


class CompressedSum(GradientSum, ABC):
    """A sum of gradients in fewer bytes.

    Args:
        group, gradients: see `GradientSum`.
        word: the value of `--compress`.
    """

    acts_alone: ClassVar[bool] = False

    def __init__(self, group: Group, gradients: Mapping[str, Array], word: str) -> None:
        super().__init__(group, gradients)
        self.word = word

    def sum(self, gradients: Mapping[str, Array]) -> None:
        """See `GradientSum.sum`."""
        residual = self.state.get(RESIDUAL, {})
        for name in residual.keys() & gradients.keys():
            gradients[name][...] += residual[name]
            residual[name][...] = 0
        if gradients and self.group.size > 1:
            self.compress(gradients)

    @abstractmethod
    def compress(self, gradients: Mapping[str, Array]) -> None:
        """Sum gradients, which contain the residual, and write the next one into the state."""

    def describe(self, gradients: Mapping[str, Array]) -> str:
        """See `GradientSum.describe`."""
        itemsize = next((grad.itemsize for grad in gradients.values()), 0)
        messages = messages_of(self.word, [grad.shape for grad in gradients.values()], itemsize)
        given = format_bytes(sum(nbytes for _, nbytes in messages))
        kept = ", error feedback" if RESIDUAL in self.state else ""
        return (
            f"compressed ({self.word}{kept}), so digits differ from the serial run; a replica gives"
            f" {given} in a step"
        )


class HalfSum(CompressedSum):
    """Sums gradients of 16 bits.

    For fp16 each gradient is multiplied by a power of two, the same on all replicas, with which its
    sum cannot overflow. Without it numbers below 6e-8 would vanish, and the conversion of those
    below 6e-5 take 100 times as long. bf16 has the range of float32.
    """

    def __init__(self, group: Group, gradients: Mapping[str, Array], word: str) -> None:
        dtype = low_dtype(word)
        assert dtype is not None
        self._dtype, self._is_scaled = dtype, word == "fp16"
        super().__init__(group, gradients, word)

    def compress(self, gradients: Mapping[str, Array]) -> None:
        """See `CompressedSum.compress`."""
        arrays = [*gradients.values()]
        scales = self._scales(arrays) if self._is_scaled else [1.0] * len(arrays)
        low = joined([array * scale for array, scale in zip(arrays, scales, strict=True)])
        low = low.astype(self._dtype)
        self.group.all_reduce(low, check=False)
        put_back(low, arrays)
        for array, scale in zip(arrays, scales, strict=True):
            array /= scale

    def _scales(self, arrays: Sequence[Array]) -> list[float]:
        """Return a power of two for each gradient, from the largest number on any replica.

        The ranks of a tensor group find the same ones for what all of them have.
        """
        xp = namespace(arrays[0])
        largest = [
            abs(array).max() if array.size else xp.zeros((), array.dtype) for array in arrays
        ]
        sizes = to_host(xp.stack(largest)).tolist()
        # what is not finite is infinite here, since a maximum may forget what is no number
        given = [size if isfinite(size) else inf for size in sizes]
        self.group.count(Traffic(0.0, SCALE_BYTES * len(given), 1, nan))
        return [scale_of(size, self.group.size) for size in self.group.max_floats(given)]


class LargestSum(CompressedSum):
    """Sums the largest part of each gradient; the rest is added to the next one.

    A value that is no number is among the largest, so it is sent, and seen by all.
    """

    per_replica = (RESIDUAL,)

    def __init__(self, group: Group, gradients: Mapping[str, Array], word: str) -> None:
        super().__init__(group, gradients, word)
        self._share = parse(word)[1]
        self.state[RESIDUAL] = zeros_like(gradients)

    def compress(self, gradients: Mapping[str, Array]) -> None:
        """See `CompressedSum.compress`."""
        xp = namespace(next(iter(gradients.values())))
        places, values, counts = [], [], []
        for name, grad in gradients.items():
            flat, rest = grad.reshape(-1), self.state[RESIDUAL][name].reshape(-1)
            count = largest(self._share, grad.size)
            chosen = find_largest(flat, count)
            places.append(chosen.astype(PLACE))
            values.append(flat[chosen])
            counts.append(count)
            rest[...] = flat
            rest[chosen] = 0
            grad[...] = 0
        stops = [*accumulate(counts)]
        all_places = self.gather(xp.concatenate(places))
        all_values = self.gather(xp.concatenate(values))
        for of_replica, sent in zip(all_places, all_values, strict=True):  # in the order of ranks
            for grad, stop, count in zip(gradients.values(), stops, counts, strict=True):
                part = slice(stop - count, stop)
                grad.reshape(-1)[of_replica[part]] += sent[part]


class LowRankSum(CompressedSum):
    """PowerSGD: sums matrices of low rank near the gradients; the rest is added to the next ones.

    One step of a power iteration, which begins with the Q of the step before. A parameter of more
    axes is a matrix of its last axis, as the layers multiply it. What is no shorter as two factors
    is summed as it is. Products have one BLAS thread, as their bits may depend on the threads.
    """

    per_replica = (RESIDUAL,)

    def __init__(self, group: Group, gradients: Mapping[str, Array], word: str) -> None:
        super().__init__(group, gradients, word)
        rank = int(parse(word)[1])
        matrices = {
            name: grad for name, grad in gradients.items() if low_rank(rank, grad.shape) is not None
        }
        self.state[RESIDUAL] = zeros_like(matrices)
        self.state[FACTOR] = {
            name: first_factor(name, grad, rank) for name, grad in matrices.items()
        }

    def compress(self, gradients: Mapping[str, Array]) -> None:
        """See `CompressedSum.compress`."""
        factors = {name: item for name, item in self.state[FACTOR].items() if name in gradients}
        matrices = {name: as_matrix(gradients[name]) for name in factors}
        plain = [grad for name, grad in gradients.items() if name not in factors]
        with loaded_pools().limit(limits=1, user_api="blas"):
            left = [matrix @ factors[name] for name, matrix in matrices.items()]
            self._add([*plain, *left])
            bases = [orthonormal(item) for item in left]
            for (name, matrix), basis in zip(matrices.items(), bases, strict=True):
                factors[name][...] = matrix.T @ basis  # this replica's, and then the sum of all
                as_matrix(self.state[RESIDUAL][name])[...] = matrix - basis @ factors[name].T
            self._add([*factors.values()])
            for (name, matrix), basis in zip(matrices.items(), bases, strict=True):
                matrix[...] = basis @ factors[name].T

    def _add(self, arrays: Sequence[Array]) -> None:
        """Sum arrays over the replicas, in place, by one all-reduce."""
        if arrays:
            total = joined(arrays)
            self.group.all_reduce(total, check=False)
            put_back(total, arrays)


# ---- the values of --compress ----


def _low_messages(shapes: Sequence[Shape], itemsize: int, _: float) -> SentBytes:
    return [(ALL_REDUCE, 2 * sum(map(prod, shapes)))]


def _scaled_messages(shapes: Sequence[Shape], itemsize: int, _: float) -> SentBytes:
    return [(ALL_REDUCE, SCALE_BYTES * len(shapes)), *_low_messages(shapes, itemsize, 0)]


def _factor_messages(shapes: Sequence[Shape], itemsize: int, number: float) -> SentBytes:
    first = second = 0
    for shape in shapes:
        rank, size = low_rank(int(number), shape), prod(shape)
        columns = shape[-1] if shape else 1
        first += size if rank is None else rank * (size // columns)
        second += 0 if rank is None else rank * columns
    return [(ALL_REDUCE, first * itemsize), (ALL_REDUCE, second * itemsize)]


def _factor_state(shape: Shape, number: float) -> int:
    rank = int(number)
    return 0 if low_rank(rank, shape) is None else prod(shape) + rank * shape[-1]


def _largest_messages(shapes: Sequence[Shape], itemsize: int, share: float) -> SentBytes:
    count = sum(largest(share, prod(shape)) for shape in shapes)
    return [(ALL_GATHER, count * PLACE.itemsize), (ALL_GATHER, count * itemsize)]


@dataclass(frozen=True)
class Compression:
    """What a value of `--compress` stands for; its help, the planner and pages read these.

    Attributes:
        kind: the class of the sum.
        help: what is sent, in a few words.
        messages: (shapes of the gradients on a rank, bytes of a number, the number behind the
            colon) -> the collectives of a step.
        state: (shape of a gradient, the number behind the colon) -> the numbers that are kept for
            it from step to step.
        number: what stands behind a colon, such as "RANK"; "" for nothing.
        example: such a number.
        fits: whether a number may stand there.
    """

    kind: type[CompressedSum]
    help: str
    messages: Callable[[Sequence[Shape], int, float], SentBytes]
    state: Callable[[Shape, float], int] = lambda shape, number: 0
    number: str = ""
    example: str = ""
    fits: Callable[[float], bool] = lambda number: False


COMPRESSIONS: Mapping[str, Compression] = {
    "fp16": Compression(
        HalfSum, "16 bits, scaled so that nothing overflows", messages=_scaled_messages
    ),
    "bf16": Compression(HalfSum, "16 bits with the range of 32", messages=_low_messages),
    "powersgd": Compression(
        LowRankSum,
        "matrices of low rank; the rest is added to the next gradient",
        messages=_factor_messages,
        state=_factor_state,
        number="RANK",
        example="4",
        fits=lambda rank: rank >= 1 and rank.is_integer(),
    ),
    "topk": Compression(
        LargestSum,
        "the largest part of each gradient; the rest is added to the next one",
        messages=_largest_messages,
        state=lambda shape, share: prod(shape),
        number="SHARE",
        example="0.01",
        fits=lambda share: 0 < share <= 1,
    ),
}
EXAMPLES = {name: ":".join(filter(None, (name, row.example))) for name, row in COMPRESSIONS.items()}
"""A value of `--compress` for each name."""

FORMS = {name: ":".join(filter(None, (name, row.number))) for name, row in COMPRESSIONS.items()}
"""Each name with what stands behind it."""

HELP = Glossary(
    {
        FORMS[name] + (f", such as {EXAMPLES[name]}" if row.example else ""): row.help
        for name, row in COMPRESSIONS.items()
    }
)


def parse(word: str, option: str = "compress") -> tuple[str, float]:
    """Return the name in a value of `--compress`, and its number: 0 for 16 bits.

    Args:
        word: the value.
        option: as its user spells it.

    Raises:
        UsageError: for other words and numbers.
    """
    name, colon, given = word.partition(":")
    row = COMPRESSIONS.get(name)
    if row is not None and not row.number and not colon:
        return name, 0.0
    with suppress(ValueError):
        if row is not None and row.number and row.fits(number := float(given)):
            return name, number
    examples = " or ".join(EXAMPLES[name] for name, row in COMPRESSIONS.items() if row.example)
    raise UsageError(f"{option} is {word}; give {', '.join(FORMS.values())}, such as {examples}")


def compression(
    word: str, option: str = "compress"
) -> Callable[[Group, Mapping[str, Array]], CompressedSum]:
    """Return what makes the sum of a value of `--compress`: (group, gradients) -> it.

    Args:
        word, option: see `parse`.

    Raises:
        UsageError: see `parse`.
    """
    name, _ = parse(word, option)
    return partial(COMPRESSIONS[name].kind, word=word)


# ---- formulas ----


def messages_of(word: str, shapes: Any, itemsize: int) -> SentBytes:
    """Return the collectives of a step's sum of gradients of these shapes, by formula.

    Args:
        word: of `--compress`.
        shapes: of the gradients on a rank.
        itemsize: the bytes of one of their numbers.
    """
    name, number = parse(word)
    return COMPRESSIONS[name].messages([*shapes], itemsize, number)


def held_bytes(word: str, shapes: Any, itemsize: int) -> int:
    """Return the bytes of a state for these gradients, with the copies of it that a step keeps."""
    name, number = parse(word)
    return 2 * itemsize * sum(COMPRESSIONS[name].state(shape, number) for shape in shapes)


def largest(share: float, size: int) -> int:
    """Return how many of a gradient's numbers `topk` sends: at least one of some."""
    return min(size, ceil(share * size))


def scale_of(size: float, replicas: int) -> float:
    """Return the power of two by which fp16's numbers up to a size are multiplied.

    The sum of so many stays below 2^15; the largest number is 65504.
    """
    if not size or not isfinite(size):
        return 1.0
    return 2.0 ** min(15 - frexp(size * replicas)[1], MOST_EXPONENT)


def low_rank(rank: int, shape: Shape) -> int | None:
    """Return the rank of a gradient's two factors; None if they are no shorter than itself."""
    if len(shape) < 2:
        return None
    rows, columns = prod(shape[:-1]), shape[-1]
    return rank if rank * (rows + columns) < rows * columns else None


# ---- arrays ----


def zeros_like(gradients: Mapping[str, Array]) -> dict[str, Array]:
    """Return zeros of the gradients' shapes."""
    return {name: namespace(grad).zeros_like(grad) for name, grad in gradients.items()}


def find_largest(flat: Array, count: int) -> Array:
    """Return the places of so many largest numbers, in order; what is no number is among them."""
    xp = namespace(flat)
    if not count:  # this rank's part of the parameter is empty
        return xp.zeros(0, PLACE)
    size = xp.nan_to_num(abs(flat), nan=np.inf, posinf=np.inf)
    return xp.sort(xp.argpartition(size, flat.size - count)[flat.size - count :])


def as_matrix(array: Array) -> Array:
    """Return a view of an array as a matrix of its last axis."""
    return array.reshape(-1, array.shape[-1])


def orthonormal(tall: Array) -> Array:
    """Return orthonormal columns that span those of a matrix; on the host, as there are few."""
    basis, _ = np.linalg.qr(to_host(tall))
    return from_host(np.ascontiguousarray(basis), namespace(tall))


def first_factor(name: str, grad: Array, rank: int) -> Array:
    """Return random directions (n, rank), which depend on the parameter's name alone."""
    xp, draws = namespace(grad), np.random.default_rng([*name.encode()])
    return xp.asarray(draws.standard_normal((grad.shape[-1], rank)).astype(grad.dtype))


def joined(arrays: Any) -> Array:
    """Return a copy of arrays as one 1-D array."""
    parts = [array.reshape(-1) for array in arrays]
    return namespace(parts[0]).concatenate(parts)


def put_back(flat: Array, arrays: Any) -> None:
    """Write what `joined` has returned back into the arrays."""
    start = 0
    for array in arrays:
        array[...] = flat[start : start + array.size].reshape(array.shape)
        start += array.size
