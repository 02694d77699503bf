"""Sums in a fixed tree: the same bits for any dealing of any number of leaves to any number of
ranks.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnmpi.comm.fixed_order
from nnmpi.base.errors import CommError, UsageError
from nnmpi.comm.fixed_order import SumTree, covered, sum_in_fixed_order


def wild(leaves, length, dtype="float32"):
    """Return arrays whose sum depends on the order: magnitudes around 1, or from 1e-20 to 1e20, and
    both signs.
    """
    random = np.random.default_rng(leaves)
    width = random.choice([2, 20], (leaves, length))
    numbers = random.standard_normal((leaves, length)) * 10.0 ** random.integers(-width, width + 1)
    return list(numbers.astype(dtype))


def plain_sum(arrays, level, index):
    """Return the sum of a block as its definition says it, by recursion."""
    if level == 0:
        return arrays[index]
    left = plain_sum(arrays, level - 1, 2 * index)
    if (2 * index + 1) << (level - 1) >= len(arrays):
        return left
    return left + plain_sum(arrays, level - 1, 2 * index + 1)


def top(leaves):
    return math.ceil(math.log2(leaves))


# ---- one tree ----


@given(st.integers(1, 20), st.randoms(use_true_random=False))
def test_any_order_gives_the_same_bits(leaves, random):
    arrays = wild(leaves, 5)
    order = list(range(leaves))
    random.shuffle(order)
    tree = SumTree(leaves)
    for leaf in order:
        tree.push(leaf, arrays[leaf])
    assert list(tree.blocks) == [(top(leaves), 0)]
    assert tree.blocks[top(leaves), 0].tobytes() == plain_sum(arrays, top(leaves), 0).tobytes()


def test_the_order_matters_for_these_values():
    """Otherwise these tests would say nothing."""
    arrays = wild(20, 100)
    backwards = plain_sum(arrays[::-1], top(20), 0)
    assert (backwards != plain_sum(arrays, top(20), 0)).mean() > 0.1


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_blocks_are_the_largest_that_are_complete(leaves, chosen):
    chosen = {leaf for leaf in chosen if leaf < leaves}
    arrays = wild(leaves, 3)
    tree = SumTree(leaves)
    for leaf in chosen:
        tree.push(leaf, arrays[leaf])
    blocks = tree.blocks
    result = [leaf for block in blocks for leaf in covered(block, leaves)]
    assert result == sorted(chosen)
    for (level, index), array in blocks.items():
        assert array.tobytes() == plain_sum(arrays, level, index).tobytes()
        if level < top(leaves):
            assert not set(covered((level + 1, index // 2), leaves)) <= chosen


@given(st.integers(1, 64))
def test_in_order_few_arrays_are_kept(leaves):
    """And never the caller's."""
    arrays = wild(leaves, 3)
    tree = SumTree(leaves)
    for leaf in range(leaves):
        tree.push(leaf, arrays[leaf])
        assert len(tree.blocks) <= top(leaves + 1)
        assert not any(
            np.shares_memory(local, array) for local in tree.blocks.values() for array in arrays
        )


@pytest.mark.parametrize(
    "leaf, array, kind, words",
    [
        (3, np.ones(2), UsageError, r"leaf 3 is not one of 0\.\.2"),
        (-1, np.ones(2), UsageError, "leaf -1"),
        (0, np.ones(2), UsageError, "leaf 0 was already pushed"),
    ],
)
def test_what_cannot_be_pushed(leaf, array, kind, words):
    tree = SumTree(3)
    tree.push(0, np.ones(2))
    with pytest.raises(kind, match=words):
        tree.push(leaf, array)
    assert list(tree.blocks) == [(0, 0)]


def test_a_leaf_may_be_read_only_or_have_gaps():
    """What is kept of it has neither trait."""
    tree = SumTree(2)
    tree.push(1, np.broadcast_to(np.float64(2.0), 3))
    tree.push(0, np.arange(6.0)[::2])
    assert tree.blocks[1, 0].tolist() == [2.0, 4.0, 6.0]


def test_no_leaves():
    with pytest.raises(UsageError, match="leaves is 0; give a whole number of at least 1"):
        SumTree(0)


# ---- over ranks ----


def deal(group, dealing, arrays):
    """Return this rank's tree, when leaf i lies on rank dealing[i]."""
    tree = SumTree(len(arrays))
    for leaf, rank in enumerate(dealing):
        if rank == group.rank:
            tree.push(leaf, arrays[leaf])
    return tree


def is_right(group, dealing, arrays):
    """Return whether the sum has the bits of the definition on this rank, and the tree is as it
    was.
    """
    tree = deal(group, dealing, arrays)
    before = {block: array.copy() for block, array in tree.blocks.items()}
    out = np.full(arrays[0].size, np.nan, arrays[0].dtype)
    sum_in_fixed_order(group, tree, out)
    same = all(np.array_equal(array, before[block]) for block, array in tree.blocks.items())
    return same and out.tobytes() == plain_sum(arrays, top(len(arrays)), 0).tobytes()


@pytest.mark.both_worlds
@pytest.mark.parametrize("seed", range(8))
def test_any_dealing_gives_the_same_bits(group, seed):
    """Leaves in runs or at random, ranks without any; lengths that do not divide."""
    random = np.random.default_rng(seed)
    for leaves in random.integers(1, 21, 3):
        dealing = random.integers(0, group.size, leaves).tolist()
        arrays = wild(
            leaves, int(random.integers(0, 21)), str(random.choice(["float32", "float64"]))
        )
        assert all(group.gather(is_right(group, sorted(dealing) if seed % 2 else dealing, arrays)))


@pytest.mark.both_worlds
def test_long_arrays_go_in_several_rounds(group, monkeypatch):
    """With few bytes a round, and with as many as usual."""
    assert all(
        group.gather(is_right(group, [leaf % group.size for leaf in range(5)], wild(5, 300_001)))
    )
    for round_bytes in (1, 64, 1000):
        monkeypatch.setattr(nnmpi.comm.fixed_order, "ROUND_BYTES", round_bytes)
        assert all(
            group.gather(is_right(group, [leaf % group.size for leaf in range(7)], wild(7, 101)))
        )


def complaints(group, tree, out):
    """Return what every rank raises."""
    text = "nothing"
    try:
        sum_in_fixed_order(group, tree, out)
    except CommError as error:
        text = str(error)
    return group.gather(text)


@pytest.mark.simulated
def test_leaves_that_do_not_make_a_sum_are_refused_on_all_ranks(group):
    arrays, last = wild(3, 4), group.size - 1
    missing = complaints(group, deal(group, [0, last], arrays), np.empty(4, np.float32))
    assert missing == ["leaf 2 of 3 was pushed on no rank; push each leaf on one rank"] * group.size
    twice = deal(group, [0, 0, 0], arrays)
    if group.rank == last and last > 0:
        twice.push(1, arrays[1])
    expected = (
        f"leaf 1 of 3 was pushed on ranks 0{'-' if last == 1 else ', '}{last}; push each leaf on"
        " one rank"
    )
    assert (
        complaints(group, twice, np.empty(4, np.float32))
        == [expected if last else "nothing"] * group.size
    )


@pytest.mark.simulated
def test_ranks_that_differ_are_refused_on_all(group):
    arrays, last = wild(3, 4), group.size - 1
    is_last = group.rank == last
    if last:
        longer = complaints(
            group, deal(group, [last] * 3, arrays), np.empty(4 + is_last, np.float32)
        )
        assert all(f"rank {last} has 3 leaves and a result of 5 float32" in text for text in longer)
        wider = complaints(
            group,
            deal(group, [last] * 3, arrays),
            np.empty(4, np.float64 if is_last else np.float32),
        )
        assert all(f"rank {last} has 3 leaves and a result of 4 float64" in text for text in wider)
    fewer = SumTree(2) if is_last and last else deal(group, [0] * 3, arrays)
    message = complaints(group, fewer, np.empty(4, np.float32))
    assert all(
        (f"rank {last} has 2 leaves" in text) if last else text == "nothing" for text in message
    )
