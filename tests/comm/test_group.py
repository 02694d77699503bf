"""What a group does besides sums: values, arrays, groups from groups."""

import math
from functools import partial

import numpy as np
import pytest

from nnmpi import Group
from nnmpi.base.errors import CommError, DtypeError, ShapeError, UsageError
from nnmpi.base.timeline import Timeline, tracing
from nnmpi.comm.agreement import decode_json, encode_json
from nnmpi.comm.point_to_point import send_and_receive
from tests.harness.refusals import refuses, told, usage_error

VALUES = [
    None,
    True,
    -3,
    0.1,
    2**70,
    "",
    "grüße, 世界 🌍",
    "\ud800 alone",
    [1, [2, {}]],
    {"a": {"b": [None]}},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_json_values_come_back_from_the_wire(value):
    assert decode_json(encode_json(value), 0) == value


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", np.float32(1), object, {(1, 2): 3}])
def test_what_json_cannot_hold_raises_where_it_arrives(value):
    text = encode_json(value)
    refuses(CommError, "rank 5 sent something that is not a JSON value", decode_json, text, 5)


@pytest.mark.both_worlds
def test_gather_gives_all_values_to_all(group):
    gathered = [
        group.gather([VALUES[(rank + group.rank) % len(VALUES)] for rank in range(3)])
        for _ in range(2)
    ]
    expected = [
        [VALUES[(rank + other) % len(VALUES)] for rank in range(3)] for other in range(group.size)
    ]
    assert all(group.gather(gathered == [expected, expected]))


@pytest.mark.both_worlds
def test_share_gives_the_roots_value_to_all(group):
    for root in range(group.size):
        value = {"root": root, "text": "ü" * 10_000}
        result = group.share(value if group.rank == root else object(), root)
        assert all(group.gather(result == value))


@pytest.mark.simulated
def test_a_value_that_cannot_be_sent_raises_on_all_ranks(group):
    guilty = group.size - 1
    texts = [
        told(CommError, call)
        for call in (
            lambda: group.gather({1, 2} if group.rank == guilty else "fine"),
            lambda: group.share({1, 2}, guilty),
        )
    ]
    expected = f"rank {guilty} sent something that is not a JSON value"
    assert all(all(expected in text for text in every) for every in group.gather(texts))


@pytest.mark.both_worlds
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "uint8", "bool", "complex64", "float16", "S3"]
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (3, 4, 5)])
def test_broadcast_takes_any_shape_and_dtype(group, shape, dtype):
    root = group.size - 1
    values = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    array = values.copy() if group.rank == root else np.zeros(shape, dtype)
    group.broadcast(array, root)
    assert all(group.gather(bool(np.array_equal(array, values))))


@pytest.mark.simulated
def test_broadcast_refuses_what_it_could_not_write_to(group):
    refuses(ShapeError, "is not contiguous", group.broadcast, np.zeros((3, 4)).T)
    refuses(DtypeError, "Python objects", group.broadcast, np.array([None]))
    for send in group.broadcast, group.share:
        usage_error("root 99 is none of", send, np.zeros(3), 99)


# By words of the refusal: what a rank calls with a dtype and a number that differ on one.
DIFFERENT = {
    "3 elements of int64": lambda group, dtype, odd: group.broadcast(np.zeros(3, dtype)),
    "3 elements of >f8": lambda group, _, odd: group.broadcast(np.zeros(3, "<>"[odd] + "f8")),
    "(3, 2) 6 elements of float64": lambda group, _, odd: group.broadcast(
        np.zeros((2 + odd, 3 - odd))
    ),
    "broadcast from rank 1": lambda group, _, odd: group.broadcast(np.zeros(3), odd),
    "1] elements of int64": lambda group, dtype, odd: group.all_gather_v(
        np.zeros(1, dtype), [1] * group.size
    ),
    "rank 1 has [2, 2": lambda group, _, odd: group.all_gather_v(
        np.zeros(1 + odd), [1 + odd] * group.size
    ),
    "elements of int64": lambda group, dtype, odd: group.reduce_scatter_v(
        np.zeros(group.size, dtype), [1] * group.size
    ),
    "sends (2,) of float64 to rank 1, which expects (2,) of int64": lambda group, dtype, odd: (
        group.all_to_all_v([np.zeros(2, dtype)] * group.size, [(2,)] * group.size)
    ),
    "sends (2,) of float64 to rank 1, which expects (3,) of float64": lambda group, _, odd: (
        group.all_to_all_v([np.zeros(2 + odd)] * group.size, [(2 + odd,)] * group.size)
    ),
    "the ranks are in different collectives: rank": lambda group, _, odd: (
        group.all_reduce if odd else group.broadcast
    )(np.zeros(3)),
}


@pytest.mark.both_worlds(min_size=2, max_size=3)
@pytest.mark.parametrize("words", DIFFERENT)
def test_different_arrays_are_refused_on_all_ranks(group, words):
    """Their bytes would be read as another dtype or shape."""
    odd = group.rank == 1
    dtype = "int64" if odd else "float64"
    text = told(CommError, lambda: DIFFERENT[words](group, dtype, int(odd)))
    assert all(words in item for item in group.gather(text)), text


# Each call that gives an array to the others: of three elements, or one that is refused.
CALLS = {
    **{name: lambda group, x, name=name: getattr(group, name)(x) for name in (
        "all_reduce", "reduce_scatter", "all_gather", "broadcast", "bind")},
    "unchecked": lambda group, x: group.all_reduce(x, "ring", check=False),
    "all_gather_v": lambda group, x: group.all_gather_v(x, [3] * group.size),
    "reduce_scatter_v": lambda group, x: group.reduce_scatter_v(x, [3] + [0] * (group.size - 1)),
    "all_to_all_v": lambda group, x: group.all_to_all_v([x] * group.size, [(3,)] * group.size),
    "send": lambda group, x: send_and_receive(group, *_around(group, x, np.empty(3))),
    "receive": lambda group, x: send_and_receive(group, *_around(group, np.empty(3), x)),
    "sum_floats": lambda group, x: group.sum_floats(x),
    "max_floats": lambda group, x: group.max_floats(x),
}  # fmt: skip
# Those without an array.
BARE = {
    **{name: lambda group, _, name=name: getattr(group, name)() for name in (
        "barrier", "node", "memory", "duplicate", "free")},
    "gather": lambda group, _: group.gather(1),
    "share": lambda group, _: group.share(1),
    "split": lambda group, _: group.split(0),
    "group": lambda group, _: Group(group.comm),
}  # fmt: skip


def _around(group, sent, received):
    rank, size = group.rank, group.size
    return [((rank + 1) % size, sent)], [((rank - 1) % size, received)]


@pytest.mark.both_worlds(max_size=3)
def test_a_freed_group_is_refused_by_every_call(group):
    """MPI would say MPI_ERR_COMM, and read memory that is gone; a simulation would go on."""
    texts = []
    for make in (lambda: group.split(0), group.node, group.duplicate):
        part = make()
        shared = part.memory().allocate(3, "float64")
        bound = [part.bind(np.ones(3), name) for name in ("native", "ring")]
        bound.append(part.bind(shared, "shared"))
        part.free()
        for call in (CALLS | BARE).values():
            texts.append(told(UsageError, partial(call, part, np.ones(3))))
        if part.size > 1:  # alone, a sum is nothing to do
            texts += [told(UsageError, begin) for item in bound for begin in (item.run, item.start)]
    assert all("freed" in text for text in texts), texts
    assert len({*group.gather(texts)[0]}) <= 2  # of groups, and of their shared memory


@pytest.mark.both_worlds(max_size=3)
@pytest.mark.parametrize("call", CALLS)
def test_arrays_of_numpys_subclasses_are_plain_ones_or_refused(group, call):
    """What is under a mask would count as a value."""

    class Named(np.ndarray):
        def __array_ufunc__(self, *arguments, **named):
            raise AssertionError("nnmpi computes with plain arrays")

    masked = np.ma.masked_array(np.ones(3), [0, 1, 0])
    text = told((UsageError, CommError), lambda: CALLS[call](group, masked))
    assert "gaps" in text
    result = CALLS[call](group, np.ones(3).view(Named))
    assert not any(isinstance(item, Named) for item in (result if isinstance(result, list) else []))
    assert group.gather(text) == [text] * group.size


@pytest.mark.both_worlds
def test_sums_and_maxima_of_a_few_numbers(group):
    rank, size = group.rank, group.size
    sums, asleep = (group.sum_floats([rank, 0.5, -1.0], asleep) for asleep in (False, True))
    largest = group.max_floats([rank, -rank, math.nan if rank == size - 1 else 0.0])
    outcome = sums == asleep == [size * (size - 1) / 2, size * 0.5, -size] and largest[:2] == [
        size - 1,
        0,
    ]
    assert all(group.gather(outcome and math.isnan(largest[2])))
    assert all(group.gather(group.sum_floats([]) == group.max_floats([]) == []))


@pytest.mark.both_worlds
def test_split_makes_groups_that_work_apart(group):
    half = group.split(group.rank % 2, key=-group.rank)
    members = half.gather(group.rank)
    expected = [rank for rank in reversed(range(group.size)) if rank % 2 == group.rank % 2]
    array = np.full(10, group.rank, np.float32)
    half.all_reduce(array, "ring")
    outcome = (
        members == expected and half.size == len(expected) and array[0] == array[9] == sum(expected)
    )
    half.free()
    assert all(group.gather(bool(outcome)))


@pytest.mark.both_worlds
def test_a_node_holds_the_ranks_that_share_memory(group):
    node = group.node()
    members = node.gather(group.rank)
    outcome = group.rank in members and members == sorted(members) and 1 <= node.size <= group.size
    roots, number = group.sum_floats([float(node.is_root)])[0], node.rank  # one root per node
    node.free()
    assert all(group.gather(outcome and 1 <= roots <= group.size and group.local_rank() == number))


@pytest.mark.both_worlds
def test_messages_of_a_duplicate_never_meet_those_of_the_group(group):
    """Both use the same tag, and every other rank starts them in the other order."""
    other = group.duplicate()
    arrays = [np.full(9, 1.0), np.full(9, 100.0)]
    pair = [group.bind(arrays[0], "ring", 1), other.bind(arrays[1], "ring", 1)]
    for pending in pair if group.rank % 2 else reversed(pair):
        pending.start()
    while not all([pending.poll() for pending in pair]):  # noqa: C419 - both must move on
        pass
    outcome = np.all(arrays[0] == group.size) and np.all(arrays[1] == 100 * group.size)
    other.free()
    assert all(group.gather(bool(outcome)))


@pytest.mark.both_worlds
def test_no_rank_leaves_a_barrier_before_all_have_come(group, tmp_path_factory):
    folder = group.share(str(tmp_path_factory.mktemp("barrier")) if group.is_root else None)
    mark = f"{folder}/{{}}"
    with open(mark.format(group.rank), "w"):
        pass
    group.barrier()
    seen = []
    for rank in range(group.size):
        with open(mark.format(rank)):
            seen.append(rank)
    assert group.gather(seen) == [list(range(group.size))] * group.size


@pytest.mark.simulated(max_size=2)
def test_a_meeting_is_joined_when_it_begins_or_when_a_rank_says(group):
    with tracing(Timeline()) as mine:
        for arrived_s in (-1.0, None):
            with group.collective("sum", arrived_s):
                pass
    first, second = mine.events
    assert (first.arrived_s, second.arrived_s) == (
        -1.0,
        second.begin_s,
    ) and first.collective == second.collective
