"""Every exchange is a linear map, and its backward the transposed one: <F x, y> = <x, F* y>, on
every rank.

The public ones are held against central differences, too.
"""

import re
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, ops
from nnmpi.base.errors import CommError, ShapeError, UsageError
from nnmpi.base.shard import part, split
from nnmpi.ops import collectives as exchange
from nnmpi.parallel.sharded.conv import RowWindows, halo
from nnmpi.tensor.placement import Placement, features, rows
from tests.harness.refusals import told

# of a vector: the same on all ranks, cut, another one on each rank
WHOLE, PARTS, OWN = "whole", "parts", "own"


def draw(group, space, shape, placement, seed):
    """Return small whole numbers, whose sums are exact: of a whole array, this rank's part of one,
    or its own.
    """
    generator = np.random.default_rng([seed, group.rank if space == OWN else 99])
    values = generator.integers(-9, 10, shape).astype(np.float64)
    if space == PARTS:
        values = np.ascontiguousarray(
            placement.region(shape, placement.axis, group.size, group.rank).take(values)
        )
    return values


def product(group, space, a, b):
    """Return the inner product of vectors that lie so on the ranks."""
    local = float((a * b).sum())
    return local if space == WHOLE else group.sum_floats([local])[0]


def check_adjoint(group, spaces, x, y, function):
    """Fail on all ranks unless <F x, y> = <x, F* y> on each."""
    leaf = Tensor(x, requires_grad=True)
    result = function(leaf)
    everyone = group.gather(result.shape == y.shape)
    assert all(everyone), f"F x has shape {result.shape} here, y {y.shape}"
    if result.requires_grad and result.node is not None:
        result.backward(y)
    gradient = y if leaf.grad is None else leaf.grad
    forward, backward = (
        product(group, spaces[1], result.data, y),
        product(group, spaces[0], x, gradient),
    )
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

EXCHANGES = {
    "copy": (WHOLE, OWN, lambda x, group, placement: exchange.copy(x, group)),
    "sum_over_ranks": (
        OWN,
        WHOLE,
        lambda x, group, placement: exchange.sum_over_ranks(
            (x * 1.0).transpose(), group
        ).transpose(),
    ),
    "scatter": (WHOLE, PARTS, exchange.scatter),
    "gather": (PARTS, WHOLE, exchange.gather),
    "gather_summing_grads": (PARTS, OWN, partial(exchange.redistribute, "gather_summing_grads")),
}


@pytest.mark.simulated
@pytest.mark.parametrize("name", EXCHANGES)
def test_adjoint(group, name):
    """All pairs, on parts of uneven sizes, some of them empty, along both axes."""
    source, target, function = EXCHANGES[name]
    for shape, placement in LAYOUTS:
        x, y = (
            draw(group, source, shape, placement, seed=1),
            draw(group, target, shape, placement, seed=2),
        )
        check_adjoint(
            group,
            (source, target),
            x,
            y,
            lambda leaf, placement=placement: function(leaf, group, placement),
        )


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
def test_halo(group, frame):
    """Whatever the windows are: rows come from where they are, and gradients go back there."""
    shape, placement = (2, frame.height, 2, 3), rows(frame.height)
    x = draw(group, PARTS, shape, placement, seed=4)
    needed = frame.needed(group.size, group.rank)
    y = draw(group, OWN, (2, len(needed), 2, 3), placement, seed=5)
    check_adjoint(group, (PARTS, OWN), x, y, lambda leaf: halo(leaf, group, frame))
    full = draw(group, WHOLE, shape, placement, seed=4)
    padded = np.pad(
        full,
        ((0, 0), (frame.padding, frame.padding + frame.reach), (0, 0), (0, 0)),
        constant_values=7,
    )
    seen = halo(Tensor(x), group, frame, value=7.0).data
    if part(frame.outputs, group.size, group.rank):
        right = np.array_equal(
            seen, padded[:, needed.start + frame.padding : needed.stop + frame.padding]
        )
    else:
        right = (seen == 7).all()
    assert all(group.gather(bool(right)))


def of_ranks(rank, length):
    """Return what a rank has, (2, length), the same wherever it is computed."""
    return np.random.default_rng([7, rank]).normal(size=(2, length))


PUBLIC = {
    "all_reduce": (
        lambda rank, size: 5,
        lambda x, group: ops.all_reduce(x, group),
        lambda all_, rank: sum(all_),
    ),
    "all_gather": (
        lambda rank, size: (3 * rank + 2) % 4,
        lambda x, group: ops.all_gather(x, group, axis=1),
        lambda all_, rank: np.concatenate(all_, axis=1),
    ),
    "reduce_scatter": (
        lambda rank, size: 7,
        lambda x, group: ops.reduce_scatter(x, group, axis=-1),
        lambda all_, rank: np.split(sum(all_), cuts(7, len(all_)), axis=1)[rank],
    ),
    "reduce_scatter, by lengths": (
        lambda rank, size: size * (size - 1) // 2,
        lambda x, group: ops.reduce_scatter(x, group, range(group.size), axis=1),
        lambda all_, rank: sum(all_)[:, rank * (rank - 1) // 2 : rank * (rank + 1) // 2],
    ),
    "all_to_all": (
        lambda rank, size: rank + 4,
        lambda x, group: ops.all_to_all(x, group, axis=1),
        lambda all_, rank: np.concatenate(
            [np.split(x, cuts(x.shape[1], len(all_)), axis=1)[rank] for x in all_], axis=1
        ),
    ),
    "all_to_all, by lengths": (
        lambda rank, size: size * (size - 1) // 2,
        lambda x, group: ops.all_to_all(x, group, range(group.size), axis=1),
        lambda all_, rank: np.concatenate(
            [x[:, rank * (rank - 1) // 2 : rank * (rank + 1) // 2] for x in all_], axis=1
        ),
    ),
}


def cuts(n, size):
    return [item.stop for item in split(n, size)][:-1]


@pytest.mark.both_worlds(max_size=5)
@pytest.mark.parametrize("name", PUBLIC)
def test_public_operations_and_their_numerical_gradients(group, name):
    """The loss is the sum of the ranks' losses, each of which weighs what came in its own way."""
    length_of, function, reference = PUBLIC[name]
    lengths = [length_of(rank, group.size) for rank in range(group.size)]
    everyones = [of_ranks(rank, length) for rank, length in enumerate(lengths)]
    leaf = Tensor(everyones[group.rank].copy(), requires_grad=True)
    result = function(leaf, group)
    expected = reference(everyones, group.rank)
    same = result.shape == expected.shape and np.allclose(result.data, expected, rtol=1e-14)
    (result * result * of_ranks(100 + group.rank, expected.shape[1])).sum().backward()

    def loss(rank, place, step):
        changed = [everyone.copy() for everyone in everyones]
        changed[rank][place] += step
        theirs = [(reference(changed, r), r) for r in range(group.size)]
        return sum(float((y * y * of_ranks(100 + r, y.shape[1])).sum()) for y, r in theirs)

    numerical = np.array(
        [
            (loss(group.rank, place, 1e-4) - loss(group.rank, place, -1e-4)) / 2e-4
            for place in np.ndindex(2, lengths[group.rank])
        ]
    ).reshape(2, -1)
    matches = np.zeros_like(leaf.data) if leaf.grad is None else leaf.grad
    right = np.allclose(matches, numerical, rtol=1e-6, atol=1e-6) and np.array_equal(
        leaf.data, everyones[group.rank]
    )
    assert group.gather([bool(same), bool(right)]) == [[True, True]] * group.size


@pytest.mark.both_worlds(min_size=2, max_size=5)
@pytest.mark.parametrize(
    "function, error, words",
    [
        (
            lambda x, group: ops.all_reduce(np.ones(2 + group.rank), group),
            CommError,
            "differ beyond that axis.*make",
        ),
        (
            lambda x, group: ops.all_gather(np.ones(2 * (group.rank == 0)), group, 1),
            ShapeError,
            "no axis 1",
        ),
        (
            lambda x, group: ops.reduce_scatter(
                x, group, [group.size * (r == group.rank) for r in range(group.size)]
            ),
            CommError,
            "lengths differ",
        ),
        (
            lambda x, group: ops.all_to_all(x, group, [1] * (group.size + (group.rank == 1))),
            ShapeError,
            "rank [01]",
        ),
        *(
            (
                lambda x, group, name=name: getattr(ops, name)(
                    np.ones((2, 2)), group, axis=group.rank % 2
                ),
                CommError,
                f"different operations: .* {name} along axis 0; .* {name} along axis 1",
            )
            for name in ("all_gather", "reduce_scatter", "all_to_all")
        ),
        *(
            (
                lambda x, group, names=names: getattr(ops, names[group.rank % 2])(x, group),
                CommError,
                f"different operations: .* {names[0]}.*; .* {names[1]}",
            )
            for names in (
                ("all_to_all", "all_gather"),
                ("all_reduce", "all_gather"),
                ("reduce_scatter", "all_to_all"),
            )
        ),
        *(
            (
                lambda x, group, wrong=wrong: ops.all_to_all(
                    x, group, [wrong] * group.size if group.rank else None
                ),
                ShapeError,
                "rank 1 has .*give one of its axes, and whole numbers",
            )
            for wrong in (1.0, "a", None)
        ),
        (lambda x, group: ops.all_gather(x, group, 0.0), ShapeError, "no axis 0.0"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(group, function, error, words):
    text = told(error, lambda: function(np.ones(group.size), group))
    assert all(re.search(words, item) for item in group.gather(text)), text


BOTH_ON_2_TO_3 = pytest.mark.both_worlds(min_size=2, max_size=3)


@BOTH_ON_2_TO_3
def test_a_compiled_step_agrees_each_time(group):
    """A rank of a new shape records while the others replay, and nobody waits. Lists of lengths are
    refused.
    """
    gather = nnmpi.compile(lambda x: ops.all_gather(x, group).sum())
    values = 1.0, 1.0, 2.0, 1.0  # the next call is replayed; the fourth is compared
    sums = [float(gather(Tensor(np.full(2 + group.rank, value))).data) for value in values]
    total = sum(2 + rank for rank in range(group.size))
    assert group.gather(sums) == [[total * value for value in values]] * group.size
    text = told(CommError, lambda: gather(Tensor(np.ones(2 + 2 * group.rank))))
    assert all("was recorded for lengths" in item for item in group.gather(text)), text
    dealt = nnmpi.compile(lambda x: ops.all_to_all(x, group, [1] * group.size))
    assert "list of lengths inside a compiled step" in told(
        UsageError, lambda: dealt(Tensor(np.ones(group.size)))
    )


def leaves(rank):
    return [10.0**k * (1.0 + rank + np.arange(2.0)) for k in range(3)]


@BOTH_ON_2_TO_3
def test_ranks_run_collectives_backward_in_the_order_of_the_forward_pass(group):
    """Whatever lies between them: rank 0 has a longer graph after the first one, and joins the two
    the other way round.
    """
    x, y, _ = (Tensor(item, requires_grad=True) for item in leaves(group.rank))
    a, b = ops.all_reduce(x, group), ops.all_reduce(y, group)
    first, second = (a * a).sum(), (b * b).sum()
    loss = second + first if group.rank else ((a.exp() * 0).sum() + first) + second
    loss.backward()
    for leaf, result in ((x, a), (y, b)):
        assert leaf.grad is not None
        right = bool((leaf.grad == 2 * group.size * result.data).all())
        assert all(group.gather(right))


USES = {
    "one each": lambda rank, a, b, x: [a, b][rank % 2],
    "one or none": lambda rank, a, b, x: [a, b, x][rank % 3],
    "only the first rank": lambda rank, a, b, x: x if rank else b,
    "of the result of another": lambda rank, a, b, x: ops.tanh(b) if rank else a,
}


@BOTH_ON_2_TO_3
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("is_early", [False, True])
def test_a_result_that_a_rank_does_not_use_gets_zeros(group, kind, use, is_early):
    """And the others the gradient of the sum of all losses, also of a loss computed before the
    second collective; and results may be dropped.
    """
    call = getattr(ops, kind)

    def loss(x):
        a = call(x, group)
        early = (a * a).sum()
        b = call(ops.tanh(a[:1]) if use == "of the result of another" else x * x, group)
        chosen = USES[use](group.rank, a, b, x)
        return early if is_early and chosen is a else (chosen * chosen).sum()

    x = Tensor(np.linspace(0.1, 0.5, group.size) * (1 + group.rank), requires_grad=True)
    loss(x).backward()
    wrong = []
    for rank in range(group.size):
        for i in range(group.size):
            sides = []
            for step in (1e-6, -1e-6):
                moved = x.data.copy()
                moved[i] += step * (rank == group.rank)
                with nnmpi.no_grad():
                    sides.append(loss(Tensor(moved)).item())
            # of the sum of all ranks' losses
            above, below = group.sum_floats(sides)
            numeric = (above - below) / 2e-6
            if rank == group.rank and not abs(x.grad[i] - numeric) < 1e-5 * (1 + abs(numeric)):
                wrong.append(i)
    assert not any(group.gather(wrong))


@BOTH_ON_2_TO_3
def test_passes_that_leave_results_to_others(group):
    """Losses of one forward pass each, the newer one first; and both twice."""
    x, y, _ = (Tensor(item, requires_grad=True) for item in leaves(group.rank))
    a = ops.all_reduce(x, group)
    first = (a * a).sum()
    b = ops.all_reduce(y, group)
    second = (b * b).sum()
    for _ in range(2):
        second.backward(retain_graph=True)
        first.backward(retain_graph=True)
    assert x.grad is not None and y.grad is not None
    right = np.array_equal(x.grad, 4 * group.size * a.data)
    right = right and np.array_equal(y.grad, 4 * group.size * b.data)
    assert all(group.gather(right))


@BOTH_ON_2_TO_3
def test_ranks_that_need_no_gradient_help_the_others(group):
    x = Tensor([1.0 + group.rank], requires_grad=group.rank == 0)
    y = ops.all_reduce(x, group)
    (y * y).backward()
    assert all(group.gather(group.rank > 0 or x.grad.tolist() == [2 * group.size * y.item()]))
    with nullcontext() if group.rank else nnmpi.no_grad():
        text = told(CommError, lambda: ops.all_reduce(Tensor([1.0], requires_grad=True), group))
    assert all("is under nnmpi.no_grad() on rank 0" in item for item in group.gather(text))


@BOTH_ON_2_TO_3
def test_a_compiled_step_may_use_other_results_on_each_rank(group):
    x, y, _ = (Tensor(item, requires_grad=True) for item in leaves(group.rank))

    @nnmpi.compile
    def step():
        x.grad = y.grad = None
        a, b = ops.all_reduce(x, group), ops.all_reduce(y, group)
        loss = ((b * b) if group.rank else (a * a)).sum()
        loss.backward()
        return loss

    for _ in range(4):
        step()
        sums = [ops.all_reduce(item.data, group).data for item in (x, y)]
        right = np.array_equal(x.grad, 2 * sums[0])
        right = right and np.array_equal(y.grad, 2 * (group.size - 1) * sums[1])
        assert all(group.gather(right))
        x.data += 1.0


@BOTH_ON_2_TO_3
def test_a_rank_records_a_backward_pass_while_others_replay_theirs(group):
    """They meet at the same operations, by the numbers of today."""
    w = Tensor([2.0], requires_grad=True)

    @nnmpi.compile
    def step(x):
        w.grad = None
        y = ops.all_reduce((w * x).sum(), group)
        (y * y).backward()
        return y

    for count in (2, 2, 2, 2 + (group.rank == 0), 2):
        y = step(Tensor(np.ones(count, "float32")))
        assert all(group.gather(w.grad.tolist() == [2 * group.size * y.item() * count]))


@BOTH_ON_2_TO_3
def test_a_pass_through_many_groups_ends_with_them_in_one_order(group):
    groups, x = [group.duplicate() for _ in range(8)], Tensor([1.0], requires_grad=True)
    total = Tensor([0.0])
    for each in groups:
        total = total + ops.all_reduce(x, each)
    total.backward()
    assert all(group.gather(x.grad.tolist() == [8.0 * group.size]))
    for each in groups:
        each.free()


@pytest.mark.simulated
def test_a_rank_that_forgets_its_backward_pass_is_told(group):
    x = Tensor([1.0], requires_grad=True)
    loss = ops.all_reduce(x, group)
    if group.size > 1:
        text = told(CommError, lambda: ops.all_reduce(x, group) if group.rank else loss.backward())
        assert "in the backward pass of a collective, and others in another" in text


@pytest.mark.simulated(min_size=2, max_size=3)
def test_a_group_that_is_freed_leaves_no_turns(group):
    """A result that was never used would otherwise be met at, on a communicator that is gone."""
    other = group.duplicate()
    x = Tensor(np.ones(3), requires_grad=True)
    unused = ops.all_reduce(x, other)
    other.free()
    y = Tensor(np.ones(3), requires_grad=True)
    (y * 2.0).sum().backward()
    np.testing.assert_array_equal(y.grad, np.full(3, 2.0))
    assert unused.requires_grad
