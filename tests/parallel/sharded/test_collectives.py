"""Every exchange is a linear map, and its backward the transposed one: <F x, y> = <x, F* y>, on every rank."""

from collections.abc import Callable

import numpy as np
import pytest

from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.parallel.sharded import collectives as exchange
from nnmpi.parallel.sharded.conv import RowWindows, halo
from nnmpi.shard import part
from nnmpi.tensor.placement import Placement, features, rows
from nnmpi.tensor.tensor import Tensor

WHOLE, PARTS, OWN = "whole", "parts", "own"  # of a vector: the same on all ranks, cut, another one on each rank


def draw(group: Group, space: str, shape: tuple[int, ...], placement: Placement, seed: int) -> Array:
    """Return small whole numbers, whose sums are exact: of a whole array, this rank's part of one, or its own."""
    generator = np.random.default_rng([seed, group.rank if space == OWN else 99])
    values: Array = generator.integers(-9, 10, shape).astype(np.float64)
    if space == PARTS:
        values = np.ascontiguousarray(placement.region(shape, placement.axis, group.size, group.rank).take(values))
    return values


def product(group: Group, space: str, a: Array, b: Array) -> float:
    """Return the inner product of vectors that lie so on the ranks."""
    own = float((a * b).sum())
    return own if space == WHOLE else group.sum_floats([own])[0]


def check_adjoint(
    group: Group, spaces: tuple[str, str], x: Array, y: Array, function: Callable[[Tensor], Tensor]
) -> None:
    """Fail on all ranks unless <F x, y> = <x, F* y> on each."""
    leaf = Tensor(x, requires_grad=True)
    result = function(leaf)
    shape_fits = result.shape == y.shape
    everyone = group.gather(shape_fits)
    assert all(everyone), f"F x has shape {result.shape} here, y {y.shape}"
    if result.requires_grad and result.node is not None:
        result.backward(y)
    gradient = y if leaf.grad is None else leaf.grad
    forward, backward = product(group, spaces[1], result.data, y), product(group, spaces[0], x, gradient)
    everyone = group.gather([forward, backward])
    assert all(pair[0] == pair[1] == everyone[0][0] for pair in everyone), everyone
    assert any(group.gather(bool(x.any() and y.any()))), "nothing was tested"


LAYOUTS = [
    ((3, 5), features(5)),
    ((2, 12), features(2, 6)),
    ((2, 3, 4, 7), features(7)),
    ((3, 30), Placement(5, 2, 3)),
    ((4, 14), Placement(7, 1, 2)),
    ((2, 9, 3, 2), rows(9)),
    ((2, 1, 3, 2), rows(1)),
]

EXCHANGES: dict[str, tuple[str, str, Callable[[Tensor, Group, Placement], Tensor]]] = {
    "copy": (WHOLE, OWN, lambda x, group, placement: exchange.copy(x, group)),
    "sum_over_ranks": (OWN, WHOLE, lambda x, group, placement: exchange.sum_over_ranks(x * 1.0, group)),
    "scatter": (WHOLE, PARTS, exchange.scatter),
    "gather": (PARTS, WHOLE, exchange.gather),
    "gather_summing_grads": (PARTS, OWN, exchange.gather_summing_grads),
}


@pytest.mark.simulated
@pytest.mark.parametrize("name", EXCHANGES)
def test_adjoint(group: Group, name: str) -> None:
    """All pairs, on parts of uneven sizes, some of them empty, along both axes."""
    source, target, function = EXCHANGES[name]
    for shape, placement in LAYOUTS:
        x, y = draw(group, source, shape, placement, seed=1), draw(group, target, shape, placement, seed=2)
        check_adjoint(group, (source, target), x, y, lambda leaf, placement=placement: function(leaf, group, placement))


@pytest.mark.simulated
@pytest.mark.parametrize(
    "frame",
    [
        RowWindows(9, 3, 1, 1),
        RowWindows(9, 3, 2, 0),
        RowWindows(10, 2, 2, 0),
        RowWindows(5, 5, 1, 2),
        RowWindows(4, 7, 3, 3),
        RowWindows(11, 1, 4, 0),
        RowWindows(3, 3, 1, 0),
        RowWindows(8, 1, 1, 1),
    ],
)
def test_halo(group: Group, frame: RowWindows) -> None:
    """Whatever the windows are: rows come from where they are, and gradients go back there."""
    shape, placement = (2, frame.height, 2, 3), rows(frame.height)
    x = draw(group, PARTS, shape, placement, seed=4)
    needed = frame.needed(group.size, group.rank)
    y = draw(group, OWN, (2, len(needed), 2, 3), placement, seed=5)
    check_adjoint(group, (PARTS, OWN), x, y, lambda leaf: halo(leaf, group, frame))
    whole = draw(group, WHOLE, shape, placement, seed=4)
    padded = np.pad(whole, ((0, 0), (frame.padding, frame.padding + frame.reach), (0, 0), (0, 0)), constant_values=7)
    seen = halo(Tensor(x), group, frame, value=7.0).data
    if part(frame.outputs, group.size, group.rank):
        right = np.array_equal(seen, padded[:, needed.start + frame.padding : needed.stop + frame.padding])
    else:
        right = (seen == 7).all()
    assert all(group.gather(bool(right)))
