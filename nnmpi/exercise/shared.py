"""Exercises on what ranks share out: batches, layers, gradients, optimizers' states, experts.

A solution gets a group (`Ranks`) and this rank's part of drawn arrays; it runs on simulated ranks, and each rank's
result is compared with the serial one. Where the bytes of the busiest rank or simulated seconds are limited, they are
counted as the simulated world counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Any, TypeAlias

import numpy as np

from nnmpi import clock
from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Machine
from nnmpi.comm.simulated.simulated_world import SimulatedRun, simulate
from nnmpi.errors import CommError, counted
from nnmpi.exercise.exercise import Exercise, Function, Measures, Setting, WrongAnswer, call, compare, draws
from nnmpi.shard import split

SIZES = (1, 2, 3, 4)
BATCH, IN, MIDDLE, OUT = 3, 7, 6, 5
WEIGHTS = 211
TOKENS, EXPERTS, WIDTH = 20, 5, 16
ITEM_BYTES = 8
UNITS = [(23, 17), (17, 9)]  # layers of ZeRO-3
NUMBERS, SECONDS = (6_000, 20_000, 12_000, 30_000), (0.002, 0.004, 0.003, 0.005)  # of layers that go back
NETWORK = Machine.uniform(50e-6, 8e-9)  # 1 Gbit/s
BEST_S = {1: 0.014, 2: 0.0145, 3: 0.0147, 4: 0.0148}  # with so many ranks

LENT = ("rank", "size", "split", "all_reduce", "reduce_scatter", "all_gather", "all_gather_v", "broadcast")


class Ranks(Group):
    """A group as exercises have it."""

    lent = (*LENT, "all_to_all")

    def all_to_all(self, parts: Sequence[Array]) -> list[Array]:
        """Return what each rank has for this one.

        Args:
            parts: for each rank, of any length; further axes are the same for all.

        Raises:
            WrongAnswer: for another number of parts.
        """
        if len(parts) != self.size:
            raise WrongAnswer(f"all_to_all takes a part for each of {self.size} ranks, not {len(parts)}")
        counts = np.empty((self.size, self.size), np.int64)
        self.comm.allgather(np.array([len(part) for part in parts]), counts)
        shapes = [(int(count), *np.shape(parts[0])[1:]) for count in counts[:, self.rank]]
        return self.all_to_all_v(parts, shapes)


class Backward:
    """A backward pass on simulated clocks: layer by layer a gradient, and sums that are under way meanwhile.

    Args:
        group: the ranks.
        gradients: this rank's, of the layers.
        seconds: that each layer takes.
    """

    lent = ("rank", "size", "layers", "gradient", "start", "finish")

    def __init__(self, group: Ranks, gradients: Sequence[Array], seconds: Sequence[float]) -> None:
        self.rank, self.size, self.layers = group.rank, group.size, len(gradients)
        self._group, self._gradients, self._seconds, self._next = group, gradients, seconds, len(gradients) - 1
        self._flying: list[tuple[Array, Any]] = []

    def gradient(self, layer: int) -> Array:
        """Return the gradient of a layer when its seconds are over.

        Raises:
            WrongAnswer: for another layer than the one before the last.
        """
        if layer != self._next:
            raise WrongAnswer(f"gradient({layer}) is asked for when it is the turn of layer {self._next}")
        self._next -= 1
        clock.sleep(self._seconds[layer])
        return self._gradients[layer].copy()

    def start(self, array: Array) -> None:
        """Begin its sum over the ranks, and return at once."""
        pending = self._group.bind(array)
        pending.start()
        self._flying.append((array, pending))

    def finish(self) -> list[Array]:
        """Return the sums that were started, in that order, when all are there."""
        flying, self._flying = self._flying, []
        for _, pending in flying:
            pending.wait()
        return [array for array, _ in flying]


Arrays: TypeAlias = Callable[..., list[Array]]
"""Shapes -> arrays of those shapes; for every rank of a check the same."""

Trial: TypeAlias = Callable[[Ranks, Function, Arrays], tuple[Any, Any]]
"""What one rank does: what the function gave it, and what it should have given."""

Most: TypeAlias = Callable[[int], float]
"""Number of ranks -> bytes that one rank may send or receive, or seconds that all may take."""


def check_shared(
    trial: Trial, most: Most, most_s: Most, machine: Machine | None, function: Function, sizes: Sequence[int] = SIZES
) -> str:
    """Return that every rank gets the serial result.

    Args:
        trial: what one rank does.
        most: size -> the bytes that are enough for a rank.
        most_s: size -> the seconds that are enough.
        machine: on which; None: messages take no time.
        function: what was written.
        sizes: the numbers of ranks.

    Raises:
        WrongAnswer: naming rank and element, or who waits for whom, or what the busiest rank sends.
    """
    for size in sizes:
        run, right = (
            _run_shared(trial, function, size, machine),
            f"on {counted(size, 'rank')}: the result is right, but",
        )
        rank, nbytes = run.busiest
        if nbytes > most(size):
            raise WrongAnswer(f"{right} rank {rank} sends or receives {nbytes} bytes, and {most(size):.0f} are enough")
        if run.seconds > most_s(size) * (1 + 1e-9):
            raise WrongAnswer(
                f"{right} it takes {1e3 * run.seconds:.2f} ms of simulated time, and {1e3 * most_s(size):.2f} "
                "are enough"
            )
    return f"equal to the serial result on {', '.join(map(str, sizes))} ranks"


def _run_shared(trial: Trial, function: Function, size: int, machine: Machine | None) -> SimulatedRun[Any]:
    """Return the run of a solution whose results are right."""
    generator, where = draws(), f"on {counted(size, 'rank')}"

    def arrays(*shapes: tuple[int, ...]) -> list[Array]:
        draw = generator()
        return [draw.normal(size=shape) for shape in shapes]

    try:
        run = simulate(lambda group: trial(Ranks(group.comm, True), function, arrays), size, machine, cpu_factor=0)
    except CommError as error:
        raise WrongAnswer(f"{where}: {error}") from None
    for rank, (found, wanted) in enumerate(run):
        of = f"{where}, the result of rank {rank}"
        if not isinstance(wanted, tuple):
            compare(of, found, wanted)
        elif not isinstance(found, tuple | list) or len(found) != len(wanted):
            raise WrongAnswer(f"{of} must be {len(wanted)} arrays, and is a {type(found).__name__}")
        else:
            for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
                compare(f"{of}, array {number}", one, other)
    return run


def measure_shared(trial: Trial, function: Function, setting: Setting) -> Measures:
    """Return the simulated seconds of a right solution's messages, and the bytes of its busiest rank."""
    run = _run_shared(trial, function, setting.ranks, setting.machine)
    return {"seconds": run.seconds, "bytes": run.busiest[1]}, ""


def _mine(n: int, group: Ranks) -> slice:
    part = split(n, group.size)[group.rank]
    return slice(part.start, part.stop)


def _row_linear(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    x, w = arrays((BATCH, IN), (IN, OUT))
    mine = _mine(IN, group)
    return call(function, group, x[:, mine].copy(), w[mine].copy()), x @ w


def _column_gradient(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    grad, w = arrays((BATCH, OUT), (IN, OUT))
    mine = _mine(OUT, group)
    return call(function, group, grad[:, mine].copy(), w[:, mine].copy()), grad @ w.T


def _sharded_pair(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    x, first, second = arrays((BATCH, IN), (IN, MIDDLE), (MIDDLE, OUT))
    mine = _mine(MIDDLE, group)
    found = call(function, group, x.copy(), first[:, mine].copy(), second[mine].copy())
    return found, np.maximum(x @ first, 0) @ second


def _global_mean(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    (losses,) = arrays((7,))
    mine = losses[_mine(7, group)]
    return call(function, group, float(mine.sum()), len(mine)), losses.mean()


def _zero_update(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    weights, *gradients = arrays((WEIGHTS,), *[(WEIGHTS,)] * group.size)
    mine = _mine(WEIGHTS, group)
    found = np.full_like(weights, np.nan)
    found[mine] = weights[mine]
    call(function, group, found, gradients[group.rank].copy(), mine, 0.1)
    return found, weights - 0.1 * sum(gradients)


def _gathered_linear(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    x, w = arrays((BATCH, IN), (IN, OUT))
    columns = [len(part) for part in split(OUT, group.size)]
    return call(function, group, x, w[:, _mine(OUT, group)].copy(), columns), x @ w


def _gathered_gradient(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    x, w, grad = arrays((BATCH, IN), (IN, OUT), (BATCH, OUT))
    mine = _mine(OUT, group)
    return call(function, group, x, w[:, mine].copy(), grad, mine), (grad @ w.T, x.T @ grad[:, mine])


def _pair_gradient(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    x, first, second, grad = arrays((BATCH, IN), (IN, MIDDLE), (MIDDLE, OUT), (BATCH, OUT))
    mine = _mine(MIDDLE, group)
    found = call(function, group, x.copy(), first[:, mine].copy(), second[mine].copy(), grad.copy())
    middle = x @ first
    back = grad @ second.T * (middle > 0)
    return found, (back @ first.T, x.T @ back[:, mine], np.maximum(middle, 0)[:, mine].T @ grad)


def _gradient_mean(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    (gradients,), rows = arrays((group.size, WEIGHTS)), np.resize([3, 0, 5, 1], group.size)
    gradients *= np.sign(rows)[:, None]
    found = call(function, group, gradients[group.rank].copy(), int(rows[group.rank]))
    return found, gradients.sum(0) / sum(rows)


def _shards(size: int) -> int:
    return next((tp for tp in (3, 2) if size > tp and size % tp == 0), size)


def _grid_split(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    (everyones,) = arrays((group.size, WEIGHTS))
    tp = _shards(group.size)
    found = call(function, group, tp, everyones[group.rank].copy())
    d, t = divmod(group.rank, tp)
    return found, (everyones[d * tp : (d + 1) * tp].sum(0), everyones[t::tp].ravel())


def _padded(array: Array, size: int) -> Array:
    """Return the parts of ranks: a row for each, zeros at the end."""
    flat = array.ravel()
    return np.pad(flat, (0, -flat.size % size)).reshape(size, -1)


def _zero_partition(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    (w,) = arrays((IN, OUT))
    return call(function, group, w), _padded(w, group.size)[group.rank]


def _zero_forward(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    xs, *weights = arrays((group.size * BATCH - 1, UNITS[0][0]), *UNITS)
    x = xs[_mine(len(xs), group)]
    found = call(function, group, x.copy(), [_padded(w, group.size)[group.rank] for w in weights], UNITS)
    return found, np.maximum(x @ weights[0], 0) @ weights[1]


def _zero_backward(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    rows = group.size * BATCH - 1
    xs, grads, *weights = arrays((rows, UNITS[0][0]), (rows, UNITS[1][1]), *UNITS)
    middles, mine = np.maximum(xs @ weights[0], 0), _mine(len(xs), group)
    backs = grads @ weights[1].T * (middles > 0)
    parts = [_padded(w, group.size)[group.rank] for w in weights]
    found = call(function, group, [xs[mine], middles[mine]], grads[mine].copy(), parts, UNITS)
    sums = (_padded(each, group.size)[group.rank] for each in (xs.T @ backs, middles.T @ grads))
    return found, ((backs @ weights[0].T)[mine], *sums)


def _sharded_adam(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    weights, m, v, *gradients = arrays((WEIGHTS,), (WEIGHTS,), (WEIGHTS,), *[(WEIGHTS,)] * group.size)
    mine, v = _mine(WEIGHTS, group), v * v
    own = np.full_like(weights, np.nan), m[mine].copy(), v[mine].copy()
    own[0][mine] = weights[mine]
    call(function, group, own[0], gradients[group.rank].copy(), own[1], own[2], mine, 3)
    total = sum(gradients)
    m, v = 0.9 * m + 0.1 * total, 0.999 * v + 0.001 * total**2
    step = 0.01 * (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.999**3)) + 1e-8)
    return own, (weights - step, m[mine], v[mine])


def _expert_parallel(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    xs, order, experts = arrays((group.size, TOKENS, WIDTH), (group.size, TOKENS), (EXPERTS, WIDTH, WIDTH))
    chosen = np.argsort(order[group.rank]) % EXPERTS
    owner = [rank for rank, part in enumerate(split(EXPERTS, group.size)) for _ in part]
    own = {e: experts[e] for e in range(EXPERTS) if owner[e] == group.rank}
    x = xs[group.rank]
    found = call(function, group, x.copy(), chosen.tolist(), own, owner)
    return found, np.einsum("ti,tio->to", x, experts[chosen])


def _overlap(group: Ranks, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    gradients = arrays(*((numbers,) for numbers in NUMBERS))
    found = call(function, Backward(group, [each * (group.rank + 1) for each in gradients], SECONDS))
    return found, tuple(each * group.size * (group.size + 1) / 2 for each in gradients)


# ---- a batch's rows: no ranks are needed ----


def check_split(function: Function, sizes: Sequence[int] = (1, 2, 3, 5, 8)) -> str:
    """Return that each row belongs to one rank, and that no rank has too many.

    Raises:
        WrongAnswer: naming rank and row.
    """
    draw = Random()
    for size in sizes:
        for rows in (size, size + 1, size - 1, 7 * size + draw.randrange(size), draw.randrange(100, 1000)):
            where, end = f"{counted(rows, 'row')} on {counted(size, 'rank')}", 0
            lengths = []
            for rank in range(size):
                part = call(function, rows, rank, size)
                if not isinstance(part, tuple | list) or [type(each) for each in part] != [int, int]:
                    raise WrongAnswer(f"{where}: rank {rank} gets {part!r}; return (start, stop), two whole numbers")
                if part[0] != end or part[1] < end:
                    raise WrongAnswer(f"{where}: rank {rank} gets rows {part[0]} to {part[1]}; its first is {end}")
                end = part[1]
                lengths.append(end - part[0])
            if end != rows:
                raise WrongAnswer(f"{where}: the last rank ends before row {end}, and not before row {rows}")
            if max(lengths) > -(-rows // size):
                most = lengths.index(max(lengths))
                raise WrongAnswer(
                    f"{where}: all rows are there, but rank {most} has {lengths[most]}, and {-(-rows // size)} "
                    "are enough"
                )
    return f"right on {', '.join(map(str, sizes))} ranks, also where rows do not divide"


# ---- the exercises ----

_GROUP = """

group has rank, size, all_reduce(array), reduce_scatter(array), all_gather(array): on flat arrays, in place."""
_PARTS = """

group has rank, size, and on flat arrays: all_reduce(array), reduce_scatter(array), all_gather(array), in place;
all_gather_v(own, counts), which returns the parts of all ranks, of so many numbers each."""
_SMALLER = f"""{_GROUP}
group.split(color, key) returns the group of the ranks that give the same color, in the order of their keys."""
_ALL_TO_ALL = """

group has rank, size, all_to_all(parts): parts[r], an array, goes to rank r; returns the list of what came from
each rank."""
_BACKWARD = """

backward has rank, size, layers; gradient(layer), which takes that layer's time; start(array), which begins its sum over
the ranks and returns at once; finish(), which waits and returns the list of sums that were started, in that order."""


def _shared(
    name: str,
    statement: str,
    arguments: str,
    trial: Trial,
    more: str = _GROUP,
    most: Most = lambda size: inf,
    sizes: Sequence[int] = SIZES,
    most_s: Most = lambda size: inf,
    machine: Machine | None = None,
) -> Exercise:
    check = partial(check_shared, trial, most, most_s, machine, sizes=sizes)
    return Exercise(name, f"{statement}{more}", arguments, check, "import numpy as np", partial(measure_shared, trial))


def _sums(*numbers: int) -> Most:
    """Return what sums of so many numbers send, and half as much more."""
    return lambda size: 1.5 * ITEM_BYTES * sum(numbers) * 2 * (size - 1) / size


def _halves(*numbers: int) -> Most:
    """Return what all-gathers, or reduce-scatters, of so many numbers send, and a quarter more; parts may be padded."""
    return lambda size: 1.25 * ITEM_BYTES * (size - 1) * sum(-(-each // size) for each in numbers)


def _gridded(size: int) -> float:
    """Return what a sum over a replica and a gather over the others send, and two fifths more."""
    tp = _shards(size)
    return 1.4 * ITEM_BYTES * WEIGHTS * (2 * (tp - 1) / tp + size // tp - 1)


def _routed(size: int) -> float:
    """Return what the busiest rank's tokens take there and back, and a third more for numbers of experts."""
    own = -(-EXPERTS // size)
    return 4 / 3 * ITEM_BYTES * WIDTH * TOKENS // EXPERTS * (EXPERTS - own + own * (size - 1))


_UNIT = [i * o for i, o in UNITS]
SHARED = (
    Exercise(
        "data-split",
        "Which rows of a batch a rank takes.\n\nReturn (start, stop). The ranks have all rows, each once, in "
        "their order; no rank has more than rows / size, rounded up.",
        "rows, rank, size",
        check_split,
    ),
    _shared(
        "global-mean",
        "The mean loss over all ranks' samples; some ranks have more samples than others, "
        "some none.\n\nReturn it on every rank, from the sum of this rank's losses and how "
        "many they are.",
        "group, loss_sum, samples",
        _global_mean,
    ),
    _shared(
        "gradient-mean",
        "The mean gradient over all ranks' rows; some ranks have more rows than others, some "
        "none.\n\ngradient is flat, the sum over this rank's rows. Return the mean over the "
        "rows of all ranks, on every rank.",
        "group, gradient, rows",
        _gradient_mean,
        most=_sums(WEIGHTS, 1),
    ),
    _shared(
        "grid-split",
        "Ranks on a grid: rank d * tp + t is shard t of replica d.\n\nReturn (the sum of x "
        "over the ranks of this replica, the x of all ranks with the same shard in one flat "
        "array, in the\norder of replicas). No rank sends more than for these.",
        "group, tp, x",
        _grid_split,
        _SMALLER,
        most=_gridded,
        sizes=(1, 2, 3, 4, 6),
    ),
    _shared(
        "row-linear",
        "x @ w, where each rank has some columns of x and the same rows of w.\n\nReturn the "
        "whole product on every rank.",
        "group, x, w",
        _row_linear,
    ),
    _shared(
        "column-gradient",
        "The gradient of x in y = x @ w, where each rank has some columns of w and the same "
        "columns of y's gradient.\n\nReturn the whole gradient on every rank.",
        "group, grad, w",
        _column_gradient,
    ),
    _shared(
        "gathered-linear",
        "y = x @ w, where each rank has some columns of w: the whole y on every rank.\n\n"
        "columns[r] is how many rank r has. No more bytes are sent than by one gather of y.",
        "group, x, w, columns",
        _gathered_linear,
        _PARTS,
        most=lambda size: 1.5 * ITEM_BYTES * BATCH * OUT * (size - 1) / size,
    ),
    _shared(
        "gathered-gradient",
        "The way back of a layer whose outputs were gathered: every rank has the whole "
        "gradient of y.\n\nw is this rank's columns mine, a slice. Return (the whole "
        "gradient of x, the gradient of w).",
        "group, x, w, grad, mine",
        _gathered_gradient,
    ),
    _shared(
        "sharded-pair",
        "max(x @ a, 0) @ b, where each rank has some columns of a and the same rows of b.\n\n"
        "Return the whole result on every rank; one sum is enough.",
        "group, x, a, b",
        _sharded_pair,
    ),
    _shared(
        "pair-gradient",
        "The way back of max(x @ a, 0) @ b, where each rank has some columns of a and the "
        "same rows of b.\n\ngrad is that of the result. Return (the whole gradient of x, of "
        "a, of b). One sum is enough.",
        "group, x, a, b, grad",
        _pair_gradient,
        most=_sums(BATCH * IN),
    ),
    _shared(
        "zero-update",
        "A step of ZeRO: each rank updates its own part of the weights.\n\nweights and "
        "gradient are flat, and mine is this rank's slice. The old weights stand in "
        "weights[mine];\nwhat is elsewhere in weights is of no use. Change weights in place, "
        "so that everywhere they are the old\nones less rate times the sum of all ranks' "
        "gradients: reduce_scatter, update, all_gather.\nNo more bytes are sent than by "
        "these.",
        "group, weights, gradient, mine, rate",
        _zero_update,
        most=lambda size: 20 * WEIGHTS * (size - 1) / size,
    ),
    _shared(
        "zero3-partition",
        "ZeRO-3, 1: a rank's part of a layer's weights.\n\nReturn the flat w's part of this "
        "rank. All parts are of the same length; at the end of the last ones there are zeros.",
        "group, w",
        _zero_partition,
    ),
    _shared(
        "zero3-forward",
        "ZeRO-3, 2: forward. max(x @ w0, 0) @ w1 for this rank's rows.\n\nparts[i] is this "
        "rank's part of layer i's flat weights, padded as in zero3-partition; shapes[i] is "
        "the layer's shape.\nGather a layer when it is needed, and once.",
        "group, x, parts, shapes",
        _zero_forward,
        most=_halves(*_UNIT),
    ),
    _shared(
        "zero3-backward",
        "ZeRO-3, 3: backward. Weights are gathered once more, gradients are summed to their "
        "owners.\n\ninputs[i] is what came to layer i (to layer 1 behind max), grad the "
        "gradient of the result. Return (the gradient of x,\nthis rank's part of the sum of "
        "layer 0's gradients over all ranks, the same of layer 1), parts as in "
        "zero3-partition.",
        "group, inputs, grad, parts, shapes",
        _zero_backward,
        most=_halves(*_UNIT, *_UNIT),
    ),
    _shared(
        "sharded-adam",
        "A step of Adam, where each rank has its own part of the weights and of both moments."
        "\n\nweights and gradient are flat, m, v and weights[mine] this rank's parts; what "
        "is elsewhere in weights is of no use.\nSum the gradients, change m and v in place, "
        "and weights everywhere: rate 0.01, betas 0.9 and 0.999, epsilon 1e-8 beside\nthe "
        "root, both moments corrected by the number of the step. No more bytes are sent "
        "than by\nreduce_scatter and all_gather.",
        "group, weights, gradient, m, v, mine, step",
        _sharded_adam,
        most=lambda size: 20 * WEIGHTS * (size - 1) / size,
    ),
    _shared(
        "expert-parallel",
        "A mixture of experts: each token goes to its expert, wherever that is, and comes "
        "back.\n\nx is (tokens, width); chosen[i] is the expert of token i, owner[e] the "
        "rank of expert e; experts = {e: matrix} has this\nrank's. Return x[i] @ (matrix of "
        "chosen[i]) for each token. Only tokens that must travel do.",
        "group, x, chosen, experts, owner",
        _expert_parallel,
        _ALL_TO_ALL,
        most=_routed,
    ),
    _shared(
        "overlap",
        "Sum gradients while the backward pass goes on.\n\nReturn the list of all layers' "
        "sums, layer 0 first. Gradients come from the last layer to the first. In simulated "
        "time\nit must take no longer than the backward pass and one sum of layer 0 (and 5 % "
        "more).",
        "backward",
        _overlap,
        _BACKWARD,
        most_s=lambda size: 1.05 * BEST_S.get(size, BEST_S[4]),
        machine=NETWORK,
    ),
)
