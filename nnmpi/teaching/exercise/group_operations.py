"""Exercises on group operations: sharded batches, layers, gradients, optimizer states, experts.

Each is a function that returns one rank's arguments and expected result; its docstring is the
statement. A solution gets a group (`Ranks`) and this rank's shard of drawn arrays. It runs on
simulated ranks, and each rank's result is compared with the serial one. Some exercises limit the
bytes of the busiest rank or the simulated seconds, as the simulated world counts them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.base import clock
from nnmpi.base.errors import CommError, counted
from nnmpi.base.shard import split
from nnmpi.comm.algorithms.registry import ALGORITHMS
from nnmpi.comm.duration import price
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Machine
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.teaching.exercise.exercise import (
    Exercise,
    Measures,
    Setting,
    Solver,
    call,
    described,
)
from nnmpi.teaching.exercise.wire import WrongAnswer

SIZES = (1, 2, 3, 4)
BATCH, IN, MIDDLE, OUT = 3, 7, 6, 5
WEIGHTS = 211
TOKENS, EXPERTS, WIDTH = 20, 5, 16
ITEM_BYTES = 8
UNITS = [(23, 17), (17, 9)]  # layers of ZeRO-3
UNIT = [i * o for i, o in UNITS]
# of overlap's layers: numbers of a gradient, seconds of a backward pass
NUMBERS, SECONDS = (6_000, 20_000, 12_000, 30_000), (0.002, 0.004, 0.003, 0.005)
LINK = 50e-6, 8e-9  # alpha_us=50,gbit=1


class Ranks(Group):
    """The group of an exercise."""

    lent = (
        *("rank", "size", "split", "all_reduce", "reduce_scatter"),
        *("all_gather", "all_gather_v", "broadcast", "all_to_all"),
    )

    def all_to_all(self, parts: Sequence[Array]) -> list[Array]:
        """Return the parts that the ranks send to this one.

        Args:
            parts: one per rank, of any length; all have the same further axes.

        Raises:
            WrongAnswer: for another number of parts.
        """
        if len(parts) != self.size:
            raise WrongAnswer(
                f"all_to_all needs one part for each of {self.size} ranks, not {len(parts)}"
            )
        counts = np.empty((self.size, self.size), np.int64)
        self.comm.allgather(np.array([len(part) for part in parts]), counts)
        shapes = [(int(count), *np.shape(parts[0])[1:]) for count in counts[:, self.rank]]
        return self.all_to_all_v(parts, shapes, check=False)


class Backward:
    """A backward pass on simulated clocks, layer by layer, with sums in flight.

    Args:
        group: the ranks.
        gradients: this rank's gradient of each layer.
        seconds: of each layer.
    """

    lent = ("rank", "size", "layers", "gradient", "start", "finish")

    def __init__(self, group: Ranks, gradients: Sequence[Array], seconds: Sequence[float]) -> None:
        self.rank, self.size, self.layers = group.rank, group.size, len(gradients)
        self._group, self._gradients, self._seconds = group, gradients, seconds
        self._next = len(gradients) - 1
        self._flying: list[tuple[Array, Any]] = []

    def gradient(self, layer: int) -> Array:
        """Return the gradient of a layer, after its seconds.

        Raises:
            WrongAnswer: for a layer out of order.
        """
        if layer != self._next:
            raise WrongAnswer(f"gradient({layer}) is out of order: layer {self._next} is next")
        self._next -= 1
        clock.sleep(self._seconds[layer])
        return self._gradients[layer].copy()

    def start(self, array: Array) -> None:
        """Start the sum of an array over the ranks, and return at once."""
        pending = self._group.bind(array)
        pending.start()
        self._flying.append((array, pending))

    def finish(self) -> list[Array]:
        """Wait for all started sums; return them in order."""
        flying, self._flying = self._flying, []
        for _, pending in flying:
            pending.wait()
        return [array for array, _ in flying]


MakeArrays: TypeAlias = Callable[..., list[Array]]
"""Shapes -> arrays of those shapes, the same on every rank of a check."""

RankCase: TypeAlias = tuple[Any, ...]
"""One rank's arguments, expected result, and the indices of arguments that are changed in place."""

MakeCase: TypeAlias = Callable[[Ranks, MakeArrays], RankCase]

Most: TypeAlias = Callable[[int], float]
"""Number of ranks -> the limit: bytes of the busiest rank, or seconds if there is a network."""


def measure_on_ranks(trial: MakeCase, network: str, function: Solver, setting: Setting) -> Measures:
    """Run a solution; return the bytes of the busiest rank, and the simulated seconds.

    Args:
        trial: the exercise.
        network: the default if the setting has none.
        function: the solution.
        setting: the simulated machine.

    Raises:
        WrongAnswer: naming rank and element, or who waits for whom.
    """
    where = f"on {counted(setting.ranks, 'rank')}"
    machine = replace(setting, network=setting.network or network).machine
    seed = secrets.randbits(64)  # a solution could contain the answers to fixed inputs

    def arrays(*shapes: tuple[int, ...]) -> list[Array]:
        draw = np.random.default_rng(seed)
        return [draw.normal(size=shape) for shape in shapes]

    def copied(value: Any) -> Any:
        """Copy the arrays in a value, contiguous."""
        if isinstance(value, list):
            return [*map(copied, value)]
        return np.array(value, order="C") if isinstance(value, np.ndarray) else value

    def main(group: Group) -> tuple[Any, Any]:
        given, expected, *changed = trial(Ranks(group.comm, True), arrays)
        values = [*map(copied, given)]
        result = call(function, *values)
        return tuple(values[index] for index in changed) or result, expected

    try:
        run = simulate(main, setting.ranks, machine, cpu_factor=0)
    except CommError as error:
        raise WrongAnswer(f"{where}: {error}") from None
    for rank, (result, expected) in enumerate(run):
        of = f"{where}, the result of rank {rank}"
        if not isinstance(expected, tuple):
            _compare(of, result, expected)
            continue
        if not isinstance(result, tuple | list) or len(result) != len(expected):
            raise WrongAnswer(
                f"{of} must be {len(expected)} arrays, but is a {type(result).__name__}"
            )
        for number, pair in enumerate(zip(result, expected, strict=True)):
            _compare(f"{of}, array {number}", *pair)
    busiest, nbytes = run.busiest
    bytes_by_rank = [nbytes * (rank == busiest) for rank in range(len(run))]
    return where, {"bytes": bytes_by_rank, "seconds": [run.seconds]}, ""


def _compare(what: str, result: Any, expected: Any) -> None:
    """Refuse a result of another type or shape; else name the first element that differs."""
    expected = np.asarray(expected)
    try:
        given = np.asarray(result)
    except ValueError:  # rows of several lengths
        given = np.asarray(None)
    if given.dtype.kind not in "fiu":
        raise WrongAnswer(f"{what} is {result!r}, but must be numbers of shape {expected.shape}")
    if given.shape != expected.shape:
        raise WrongAnswer(f"{what} has shape {given.shape}, but must have {expected.shape}")
    for index in np.argwhere(~np.isclose(given, expected, rtol=1e-9, atol=1e-12)).tolist()[:1]:
        at = f": element {tuple(index) if len(index) > 1 else index[0]}" if index else ""
        raise WrongAnswer(
            f"{what}{at} is {given[*index]:.12g}, but must be {expected[*index]:.12g}"
        )


# ---- the exercises ----

_GROUP = (
    "group has rank, size, and for flat arrays, in place: all_reduce(array), reduce_scatter(array),"
    " all_gather(array)."
)
_PARTS = """
group has rank, size, and for flat arrays: all_reduce(array), reduce_scatter(array) and
all_gather(array), all in place; all_gather_v(own, counts), which returns the list of all
ranks' parts, with counts[r] numbers from rank r."""
_SMALLER = f"""{_GROUP}
group.split(color, key) returns the group of the ranks with the same color, ordered by key."""
_ALL_TO_ALL = """
group has rank, size, all_to_all(parts), which sends the array parts[r] to rank r, and returns the
list of arrays received, by rank."""
_BACKWARD = """
backward has rank, size and layers; gradient(layer), which takes that layer's time; start(array),
which starts the array's sum over the ranks and returns at once; finish(), which waits for all sums,
and returns them in a list, in the order of their start."""


def _on_ranks(
    arguments: str,
    more: str = _GROUP,
    most: Most = lambda size: inf,
    sizes: Sequence[int] = SIZES,
    network: str = "",
) -> Callable[[MakeCase], Exercise]:
    def best(setting: Setting) -> Measures:
        limits = dict.fromkeys(("bytes", "seconds"), [inf])
        return "", limits | {"seconds" if network else "bytes": [most(setting.ranks)]}, ""

    def make(trial: MakeCase) -> Exercise:
        name, statement = described(trial)
        return Exercise(
            name,
            f"{statement}\n\n{more.strip()}",
            arguments,
            sizes,
            imports="import numpy as np",
            measure=partial(measure_on_ranks, trial, network),
            best=best,
        )

    return make


def _moved(times: float, *numbers: int) -> Most:
    """Return the bytes of `times` turns around a ring, each rank with a padded part of every array.

    An all-gather or reduce-scatter is one turn; the tenths above whole turns are tolerance.
    """
    return lambda size: times * ITEM_BYTES * (size - 1) * sum(-(-n // size) for n in numbers)


def _gridded(size: int) -> float:
    """Return the bytes of a sum over a replica and a gather over the others; two fifths more."""
    tp = _shards(size)
    return 1.4 * ITEM_BYTES * WEIGHTS * (2 * (tp - 1) / tp + size // tp - 1) // 1


def _routed(size: int) -> float:
    """Return the busiest rank's bytes of tokens, both ways; a third more for expert numbers."""
    most = -(-EXPERTS // size)  # experts of a rank
    return 4 / 3 * ITEM_BYTES * WIDTH * TOKENS // EXPERTS * (EXPERTS - most + most * (size - 1))


def _shards(size: int) -> int:
    return next((tp for tp in (3, 2) if size > tp and size % tp == 0), size)


def _mine(n: int, group: Ranks) -> slice:
    part = split(n, group.size)[group.rank]
    return slice(part.start, part.stop)


def _part(array: Array, group: Ranks) -> Array:
    """Return this rank's part of the flat array, zero-padded so that all parts are equally long."""
    flat = array.ravel()
    return np.pad(flat, (0, -flat.size % group.size)).reshape(group.size, -1)[group.rank]


@_on_ranks("group, loss_sum, samples")
def global_mean(group: Ranks, arrays: MakeArrays) -> RankCase:
    """The mean loss over all ranks' samples; some ranks have more samples than others, some none.

    loss_sum is the sum of the losses of this rank's samples, and samples their number. Return the
    mean on every rank.
    """
    (losses,) = arrays((7,))
    mine = losses[_mine(7, group)]
    return (group, float(mine.sum()), len(mine)), losses.mean()


@_on_ranks("group, gradient, rows", most=_moved(3, WEIGHTS, 1))
def gradient_mean(group: Ranks, arrays: MakeArrays) -> RankCase:
    """The mean gradient over all ranks' rows; some ranks have more rows than others, some none.

    gradient is flat: the sum over this rank's rows, and rows their number. Return the mean over the
    rows of all ranks, on every rank.
    """
    (gradients,), rows = arrays((group.size, WEIGHTS)), np.resize([3, 0, 5, 1], group.size)
    gradients *= np.sign(rows)[:, None]
    return (group, gradients[group.rank], int(rows[group.rank])), gradients.sum(0) / sum(rows)


@_on_ranks("group, tp, x", _SMALLER, _gridded, (1, 2, 3, 4, 6))
def grid_split(group: Ranks, arrays: MakeArrays) -> RankCase:
    """Ranks on a grid: rank d * tp + t is shard t of replica d.

    Return two arrays: the sum of x over the ranks of this replica; and the x of all ranks with the
    same shard, in one flat array, in the order of replicas. Send no more bytes than these two need.
    """
    (x,), tp = arrays((group.size, WEIGHTS)), _shards(group.size)
    d, t = divmod(group.rank, tp)
    return (group, tp, x[group.rank]), (x[d * tp : (d + 1) * tp].sum(0), x[t::tp].ravel())


@_on_ranks("group, x, w")
def row_linear(group: Ranks, arrays: MakeArrays) -> RankCase:
    """x @ w, where each rank has some columns of x and the rows of w with the same numbers.

    Return the whole product on every rank.
    """
    (x, w), mine = arrays((BATCH, IN), (IN, OUT)), _mine(IN, group)
    return (group, x[:, mine], w[mine]), x @ w


@_on_ranks("group, grad, w")
def column_gradient(group: Ranks, arrays: MakeArrays) -> RankCase:
    """The gradient of x in y = x @ w, where each rank has some columns of w and the same columns of
    y's gradient.

    grad is the gradient of y. Return the whole gradient of x on every rank.
    """
    (grad, w), mine = arrays((BATCH, OUT), (IN, OUT)), _mine(OUT, group)
    return (group, grad[:, mine], w[:, mine]), grad @ w.T


@_on_ranks("group, x, w, columns", _PARTS, _moved(1.5, BATCH * OUT))
def gathered_linear(group: Ranks, arrays: MakeArrays) -> RankCase:
    """y = x @ w, where each rank has some columns of w: the whole y on every rank.

    columns[r] is the number of rank r's columns. Send no more bytes than an all-gather of y does.
    """
    x, w = arrays((BATCH, IN), (IN, OUT))
    return (group, x, w[:, _mine(OUT, group)], [*map(len, split(OUT, group.size))]), x @ w


@_on_ranks("group, x, w, grad, mine")
def gathered_gradient(group: Ranks, arrays: MakeArrays) -> RankCase:
    """The backward pass of a layer whose outputs were gathered: every rank has the whole gradient
    of y.

    mine is the slice of this rank's columns, w these columns, and grad the gradient of y. Return
    (the whole gradient of x, the gradient of this rank's w).
    """
    (x, w, grad), mine = arrays((BATCH, IN), (IN, OUT), (BATCH, OUT)), _mine(OUT, group)
    return (group, x, w[:, mine], grad, mine), (grad @ w.T, x.T @ grad[:, mine])


@_on_ranks("group, x, a, b")
def sharded_pair(group: Ranks, arrays: MakeArrays) -> RankCase:
    """max(x @ a, 0) @ b, where each rank has some columns of a and the rows of b with the same
    numbers.

    Return the whole result on every rank; one all-reduce is enough.
    """
    (x, a, b), mine = arrays((BATCH, IN), (IN, MIDDLE), (MIDDLE, OUT)), _mine(MIDDLE, group)
    return (group, x, a[:, mine], b[mine]), np.maximum(x @ a, 0) @ b


@_on_ranks("group, x, a, b, grad", most=_moved(3, BATCH * IN))
def pair_gradient(group: Ranks, arrays: MakeArrays) -> RankCase:
    """The backward pass of max(x @ a, 0) @ b, where each rank has some columns of a and the rows of
    b with the same numbers.

    grad is the gradient of the result. Return (the whole gradient of x, the gradient of this rank's
    a, the gradient of this rank's b). One all-reduce is enough.
    """
    x, a, b, grad = arrays((BATCH, IN), (IN, MIDDLE), (MIDDLE, OUT), (BATCH, OUT))
    mine, middle = _mine(MIDDLE, group), np.maximum(x @ a, 0)
    back = grad @ b.T * (middle > 0)
    return (group, x, a[:, mine], b[mine], grad), (
        back @ a.T,
        x.T @ back[:, mine],
        middle[:, mine].T @ grad,
    )


@_on_ranks("group, weights, gradient, mine, rate", most=_moved(2.5, WEIGHTS))
def zero_update(group: Ranks, arrays: MakeArrays) -> RankCase:
    """A step of ZeRO: each rank updates its own part of the weights.

    weights and gradient are flat, and mine is this rank's slice. weights[mine] has the old weights;
    the rest of weights is undefined. Change all of weights in place, on every rank, to the old
    weights minus rate times the sum of all ranks' gradients: reduce_scatter, update, all_gather.
    Send no more bytes than these do.
    """
    (weights, *gradients), mine = arrays(*[(WEIGHTS,)] * (1 + group.size)), _mine(WEIGHTS, group)
    return (
        (group, _alone(weights, mine), gradients[group.rank], mine, 0.1),
        (weights - 0.1 * sum(gradients),),
        1,
    )


def _alone(weights: Array, mine: slice) -> Array:
    shard = np.full_like(weights, np.nan)
    shard[mine] = weights[mine]
    return shard


@_on_ranks("group, w")
def zero3_partition(group: Ranks, arrays: MakeArrays) -> RankCase:
    """ZeRO-3, 1: a rank's part of a layer's weights.

    Return this rank's part of the flat w. All parts have the same length; zeros pad the end of w.
    """
    (w,) = arrays((IN, OUT))
    return (group, w), _part(w, group)


@_on_ranks("group, x, parts, shapes", most=_moved(1.25, *UNIT))
def zero3_forward(group: Ranks, arrays: MakeArrays) -> RankCase:
    """ZeRO-3, 2: forward. max(x @ w0, 0) @ w1 for this rank's rows.

    parts[i] is this rank's part of layer i's flat weights, padded as in zero3-partition; shapes[i]
    is the layer's shape. Gather each layer only once, when it is needed.
    """
    xs, *weights = arrays((group.size * BATCH - 1, UNITS[0][0]), *UNITS)
    x = xs[_mine(len(xs), group)]
    return (group, x, [_part(w, group) for w in weights], UNITS), np.maximum(
        x @ weights[0], 0
    ) @ weights[1]


@_on_ranks("group, inputs, grad, parts, shapes", most=_moved(2.5, *UNIT))
def zero3_backward(group: Ranks, arrays: MakeArrays) -> RankCase:
    """ZeRO-3, 3: backward. Weights are gathered once more, gradients are reduced to their owners.

    inputs[i] is layer i's input (layer 1's after max), and grad the gradient of the result. Return
    (the gradient of x, this rank's part of the sum of layer 0's gradients over all ranks, the same
    for layer 1). Parts are as in zero3-partition.
    """
    rows = group.size * BATCH - 1
    xs, grads, *weights = arrays((rows, UNITS[0][0]), (rows, UNITS[1][1]), *UNITS)
    middles, mine = np.maximum(xs @ weights[0], 0), _mine(rows, group)
    backs = grads @ weights[1].T * (middles > 0)
    given = group, [xs[mine], middles[mine]], grads[mine], [_part(w, group) for w in weights], UNITS
    return given, (
        (backs @ weights[0].T)[mine],
        _part(xs.T @ backs, group),
        _part(middles.T @ grads, group),
    )


@_on_ranks("group, weights, gradient, m, v, mine, step", most=_moved(2.5, WEIGHTS))
def sharded_adam(group: Ranks, arrays: MakeArrays) -> RankCase:
    """A step of Adam, where each rank has its own part of the weights and of both moments.

    weights and gradient are flat. m, v and weights[mine] are this rank's parts; the rest of weights
    is undefined. Sum the gradients over the ranks, and change in place m, v and, on every rank, all
    of weights. The learning rate is 0.01, the betas are 0.9 and 0.999, epsilon is 1e-8 and is added
    to the root; both moments are corrected for the bias of this step; step counts from 1. Send no
    more bytes than reduce_scatter and all_gather do.
    """
    weights, m, v, *gradients = arrays(*[(WEIGHTS,)] * (3 + group.size))
    mine, v, total = _mine(WEIGHTS, group), v * v, sum(gradients)
    given = group, _alone(weights, mine), gradients[group.rank], m[mine], v[mine], mine, 3
    m, v = 0.9 * m + 0.1 * total, 0.999 * v + 0.001 * total**2
    step = 0.01 * (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.999**3)) + 1e-8)
    return given, (weights - step, m[mine], v[mine]), 1, 3, 4


@_on_ranks("group, x, chosen, experts, owner", _ALL_TO_ALL, _routed)
def expert_parallel(group: Ranks, arrays: MakeArrays) -> RankCase:
    """A mixture of experts: each token goes to its expert's rank, and comes back.

    x is (tokens, width). chosen[i] is the expert of token i, owner[e] the rank of expert e, and
    experts = {e: matrix} has this rank's experts. Return x[i] @ (matrix of chosen[i]) for each
    token. Send no token whose expert is on its rank.
    """
    xs, order, experts = arrays(
        (group.size, TOKENS, WIDTH), (group.size, TOKENS), (EXPERTS, WIDTH, WIDTH)
    )
    chosen, x = np.argsort(order[group.rank]) % EXPERTS, xs[group.rank]
    owner = [rank for rank, part in enumerate(split(EXPERTS, group.size)) for _ in part]
    local = {e: experts[e] for e in range(EXPERTS) if owner[e] == group.rank}
    return (group, x, chosen.tolist(), local, owner), np.einsum("ti,tio->to", x, experts[chosen])


def _overlapped_s(size: int) -> float:
    """Return the seconds of the backward pass and one sum of layer 0; 5 % more."""
    last_s = price(ALGORITHMS["ring"], size, ITEM_BYTES * NUMBERS[0], Machine.uniform(*LINK))
    return 1.05 * (sum(SECONDS) + last_s)


@_on_ranks(
    "backward",
    _BACKWARD,
    _overlapped_s,
    network="alpha_us=50,gbit=1",
)
def overlap(group: Ranks, arrays: MakeArrays) -> RankCase:
    """Sum gradients while the backward pass continues.

    Return the list of all layers' sums, layer 0 first. Gradients come from the last layer to the
    first. The simulated time may be at most 5 % above the time of the backward pass and one sum of
    layer 0.
    """
    gradients = arrays(*((group.size, numbers) for numbers in NUMBERS))
    backward = Backward(group, [layer[group.rank] for layer in gradients], SECONDS)
    return (backward,), tuple(layer.sum(0) for layer in gradients)


SHARED = (
    global_mean,
    gradient_mean,
    grid_split,
    row_linear,
    column_gradient,
    gathered_linear,
    gathered_gradient,
    sharded_pair,
    pair_gradient,
    zero_update,
    zero3_partition,
    zero3_forward,
    zero3_backward,
    sharded_adam,
    expert_parallel,
    overlap,
)
