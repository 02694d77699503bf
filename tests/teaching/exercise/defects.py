"""Defects of what ranks share out, by exercise: (what is wrong, the function, what the sentence
must have).

Those whose result is right, and which are found by a number alone, say "right" in what they are
told.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from nnmpi.comm.collective import Step
from tests.teaching.exercise import solutions as right

Mistake = tuple[str, Callable[..., Any], str]
DIFFERS, SHAPE = r"the result of rank \d.*is .*, but must be", r"the result of rank \d.* has shape"
SLOW = r"the result is right, but rank \d sends or receives \d+ bytes; the limit is \d+"


def changed(function, change):
    """Return a function that hands on what `change` makes of the right result and the arguments."""

    @wraps(function)
    def wrong(*values):
        return change(function(*values), *values)

    return wrong


def whole_rows(rank, size):
    """All-to-all in which whole rows go around a ring."""

    def row(r):
        return range(r % size * size, (r % size + 1) * size)

    right, left = (rank + 1) % size, (rank - 1) % size
    return [Step(right, row(rank - i), left, row(left - i)) for i in range(size - 1)]


def summed_columns(group, x, w, columns):
    """Gather columns by a sum with zeros."""
    whole = np.zeros((len(x), sum(columns)))
    whole[:, sum(columns[: group.rank]) :][:, : columns[group.rank]] = x @ w
    return right._sum(group, whole)


def untrimmed(group, part, shape):
    return np.tile(part, group.size).reshape(shape)


def no_relu(group, x, a, b, grad):
    return right._sum(group, grad @ b.T @ a.T), x.T @ (grad @ b.T), (x @ a).T @ grad


def everyones(group, array):
    return group.all_gather_v(np.array(array, float).ravel(), [np.size(array)] * group.size)


def embedded(group, part, shape):
    """Gather by a sum with zeros, which sends twice as much."""
    whole = np.zeros((group.size, len(part)))
    whole[group.rank] = part
    return right._sum(group, whole).ravel()[: shape[0] * shape[1]].reshape(shape)


def forward(
    group, x, parts, shapes, gather=right._gather, relu=lambda x: np.maximum(x, 0), mine=slice(None)
):
    w = [gather(group, part, shape) for part, shape in zip(parts[mine], shapes[mine], strict=True)]
    return relu(x @ w[0]) @ w[1]


def backward(
    group, inputs, grad, parts, shapes, scatter=right._scatter, mask=True, gather=right._gather
):
    last = scatter(group, inputs[1].T @ grad)
    grad = grad @ gather(group, parts[1], shapes[1]).T * ((inputs[1] > 0) if mask else 1)
    return grad @ gather(group, parts[0], shapes[0]).T, scatter(group, inputs[0].T @ grad), last


def own_part(group, gradient):
    return right.zero3_partition(group, gradient)


def summed_part(group, gradient):
    return own_part(group, right._sum(group, gradient))


def adam(
    group, weights, gradient, m, v, mine, step, scatter=None, correct=True, inside=0.0, share=True
):
    (scatter or group.reduce_scatter)(gradient)
    own = gradient[mine]
    m[:], v[:] = 0.9 * m + 0.1 * own, 0.999 * v + 0.001 * own**2
    one, two = (1 - 0.9**step, 1 - 0.999**step) if correct else (1, 1)
    weights[mine] -= 0.01 * (m / one) / (np.sqrt(v / two + inside) + 1e-8)
    if share:
        group.all_gather(weights)


def experts_everywhere(group, x, chosen, experts, owner):
    """All tokens go to all ranks."""
    tokens = group.all_to_all([np.column_stack([x, chosen])] * group.size)
    made = [
        np.array(
            [row[:-1] @ experts.get(int(row[-1]), np.zeros((x.shape[1],) * 2)) for row in part]
        )
        for part in tokens
    ]
    return np.sum(group.all_to_all(made), axis=0)


def experts_unordered(group, x, chosen, experts, owner):
    order = np.argsort(np.array(owner)[chosen], kind="stable")
    return right.expert_parallel(group, x, chosen, experts, owner)[order]


def expert_of_rank(group, x, chosen, experts, owner):
    return right.expert_parallel(group, x, [owner.index(owner[e]) for e in chosen], experts, owner)


def waits_for_each(backward):
    sums = []
    for layer in reversed(range(backward.layers)):
        backward.start(backward.gradient(layer))
        sums += backward.finish()
    return sums[::-1]


def sums_at_the_end(backward):
    for gradient in [backward.gradient(layer) for layer in reversed(range(backward.layers))]:
        backward.start(gradient)
    return backward.finish()[::-1]


def one_sum_less(backward):
    for layer in reversed(range(backward.layers)):
        gradient = backward.gradient(layer)
        if layer or backward.rank:
            backward.start(gradient)
    return [gradient, *backward.finish()[::-1]][-backward.layers :]


def ends(rows, rank, size):
    """Return the rows of a rank where the last one takes what is left."""
    return rank * (rows // size), rows if rank == size - 1 else (rank + 1) * (rows // size)


GIVES = r"rows? on \d ranks?, rank \d: it gives .*, but must give \(\d+, \d+\)"
TIME = r"the result is right, but it takes [\d.]+ s of simulated time; the limit is [\d.]+"
DEFECTS = {
    "all-to-all": [
        (
            "whole rows go around",
            whole_rows,
            r"the result is right, but rank 0 sends \d+ chunks; the limit is \d+",
        )
    ],
    "data-split": [
        ("the remainder is dropped", lambda n, r, p: (r * (n // p), (r + 1) * (n // p)), GIVES),
        ("too many", lambda n, r, p: (r * -(-n // p), (r + 1) * -(-n // p)), GIVES),
        (
            "one row twice",
            changed(right.data_split, lambda part, *_: (part[0], part[1] + 1)),
            GIVES,
        ),
        ("a list of rows", changed(right.data_split, lambda part, *_: [*range(*part)]), GIVES),
        ("halves of rows", lambda n, r, p: (r * n / p, (r + 1) * n / p), GIVES),
        ("the last takes the rest", ends, GIVES),
    ],
    "gradient-mean": [
        ("a mean of means", lambda g, x, n: right._sum(g, x / max(n, 1)) / g.size, DIFFERS),
        ("over ranks, not rows", lambda g, x, n: right._sum(g, x) / g.size, DIFFERS),
        ("own rows alone", lambda g, x, n: x / max(n, 1), DIFFERS),
        (
            "divided by own rows",
            lambda g, x, n: right._sum(g, x) / n,
            "divide by zero|is .*, but must be",
        ),
        ("all is gathered", lambda g, x, n: (b := sum(everyones(g, [*x, n])))[:-1] / b[-1], SLOW),
    ],
    "grid-split": [
        ("colors swapped", lambda g, tp, x: right.grid_split(g, g.size // tp, x), DIFFERS),
        (
            "one colour",
            lambda g, tp, x: (right._sum(g, x), np.concatenate(everyones(g, x))),
            f"{DIFFERS}|{SHAPE}",
        ),
        (
            "keys the other way",
            changed(right.grid_split, lambda y, g, tp, x: (y[0], y[1][::-1])),
            DIFFERS,
        ),
        ("a sum alone", changed(right.grid_split, lambda y, g, tp, x: y[0]), "must be 2 arrays"),
        (
            "all is gathered",
            lambda g, tp, x: (
                sum((a := everyones(g, x))[g.rank // tp * tp :][:tp]),
                np.concatenate(a[g.rank % tp :: tp]),
            ),
            SLOW,
        ),
    ],
    "gathered-linear": [
        ("own columns alone", lambda g, x, w, n: x @ w, SHAPE),
        ("columns as rows", changed(right.gathered_linear, lambda y, *_: y.T), SHAPE),
        (
            "ranks in the wrong order",
            changed(right.gathered_linear, lambda y, g, *_: np.roll(y, g.rank, 1)),
            DIFFERS,
        ),
        ("a sum with zeros", summed_columns, SLOW),
    ],
    "gathered-gradient": [
        (
            "not summed",
            lambda g, x, w, grad, mine: (grad[:, mine] @ w.T, x.T @ grad[:, mine]),
            DIFFERS,
        ),
        (
            "all columns",
            lambda g, x, w, grad, mine: (right.column_gradient(g, grad[:, mine], w), x.T @ grad),
            SHAPE,
        ),
        (
            "one array",
            lambda g, x, w, grad, mine: right.column_gradient(g, grad[:, mine], w),
            "must be 2 arrays",
        ),
    ],
    "pair-gradient": [
        (
            "ReLU forgotten",
            lambda g, x, a, b, y: (right._sum(g, y @ b.T @ a.T), x.T @ (y @ b.T), (x @ a).T @ y),
            DIFFERS,
        ),
        (
            "not summed",
            lambda g, *rest: right.pair_gradient(type("", (), {"all_reduce": id})(), *rest),
            DIFFERS,
        ),
        (
            "weights summed",
            changed(right.pair_gradient, lambda y, g, *_: (y[0], y[1] * g.size, y[2] * g.size)),
            DIFFERS,
        ),
        (
            "two sums",
            changed(right.pair_gradient, lambda y, g, x, *_: (y[0] + 0 * right._sum(g, x), *y[1:])),
            SLOW,
        ),
    ],
    "zero3-partition": [
        ("not padded", lambda g, w: np.array_split(w.ravel(), g.size)[g.rank], SHAPE),
        (
            "zeros in front",
            lambda g, w: np.split(np.append(np.zeros(-w.size % g.size), w), g.size)[g.rank],
            DIFFERS,
        ),
        (
            "another's",
            lambda g, w: right.zero3_partition(type("", (), {"size": g.size, "rank": 0})(), w),
            DIFFERS,
        ),
    ],
    "zero3-forward": [
        ("ReLU forgotten", lambda *v: forward(*v, relu=lambda x: x), DIFFERS),
        ("zeros not taken off", lambda *v: forward(*v, gather=untrimmed), "ValueError|is .*must"),
        ("own part alone", lambda *v: forward(*v, gather=lambda g, p, s: np.resize(p, s)), DIFFERS),
        ("a sum with zeros", lambda *v: forward(*v, gather=embedded), SLOW),
        ("gathered twice", lambda *v: (forward(*v), forward(*v))[1], SLOW),
    ],
    "zero3-backward": [
        ("ReLU forgotten", lambda *v: backward(*v, mask=False), DIFFERS),
        ("not summed", lambda *v: backward(*v, scatter=own_part), DIFFERS),
        (
            "the mean",
            changed(right.zero3_backward, lambda y, g, *_: (y[0], y[1] / g.size, y[2] / g.size)),
            DIFFERS,
        ),
        ("whole gradients", lambda *v: backward(*v, scatter=right._sum), SHAPE),
        ("summed everywhere", lambda *v: backward(*v, scatter=summed_part), SLOW),
    ],
    "sharded-adam": [
        ("moments not corrected", lambda *v: adam(*v, correct=False), DIFFERS),
        ("epsilon in the root", lambda *v: adam(*v, inside=1e-3), DIFFERS),
        ("not summed", lambda *v: adam(*v, scatter=lambda gradient: None), DIFFERS),
        ("not gathered", lambda *v: adam(*v, share=False), DIFFERS),
        ("summed everywhere", lambda g, *v: adam(g, *v, scatter=g.all_reduce), SLOW),
    ],
    "expert-parallel": [
        ("in the order of ranks", experts_unordered, DIFFERS),
        ("one expert a rank", expert_of_rank, DIFFERS),
        (
            "own experts alone",
            lambda g, x, c, experts, o: [[*x[i] @ experts[e]] for i, e in enumerate(c)],
            "KeyError",
        ),
        (
            "a part too few",
            lambda g, x, *_: g.all_to_all([x] * (g.size - 1)),
            "needs one part for each of",
        ),
        ("all tokens go to all", experts_everywhere, SLOW),
    ],
    "overlap": [
        ("the last layer first", changed(right.overlap, lambda sums, _: sums[::-1]), SHAPE),
        (
            "front to back",
            lambda b: [b.gradient(layer) for layer in range(b.layers)],
            "out of order: layer 3 is next",
        ),
        ("not summed", lambda b: [b.gradient(layer) for layer in (3, 2, 1, 0)][::-1], DIFFERS),
        ("rank 0 leaves one out", one_sum_less, "rank"),
        ("waits for each", waits_for_each, TIME),
        ("all at the end", sums_at_the_end, TIME),
    ],
    "gpipe-clock": [
        (
            "the next stage at once",
            lambda s, m: [[(i, j) for j in range(s)] for i in range(m)],
            "comes before .* is over",
        ),
        (
            "the last one is missing",
            changed(right.gpipe_clock, lambda found, *_: found[:-1]),
            "is missing",
        ),
        (
            "twice",
            changed(right.gpipe_clock, lambda found, *_: [*found, found[0]]),
            "is done already",
        ),
        (
            "stage and microbatch the other way",
            changed(
                right.gpipe_clock, lambda found, *_: [[(s, m) for m, s in each] for each in found]
            ),
            r"comes before|is not a \(microbatch, stage\)|has another microbatch",
        ),
        ("no lists", lambda s, m: s * m, "give a list of lists"),
        (
            "one after the other",
            lambda s, m: [[(i, j)] for i in range(m) for j in range(s)],
            r"all is done, but it takes \d+ cycles; the limit is \d+",
        ),
    ],
}
