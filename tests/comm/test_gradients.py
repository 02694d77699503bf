"""The bucketed gradient exchange: whatever order gradients come in, every rank gets the same
sums.
"""

import math
import random
import time
import zlib

import numpy as np
import pytest

from nnmpi import simulate
from nnmpi.base.errors import CommError, DtypeError, UsageError
from nnmpi.comm.algorithms.registry import find_collective
from nnmpi.comm.duration import buffers_sent
from nnmpi.comm.gradients import BucketedAllReduce, plan_buckets
from nnmpi.comm.world import Traffic
from tests.device.library import load
from tests.harness.refusals import refuses, usage_error

LENGTHS = [300, 10, 0, 1, 2000, 7, 64, 5000, 33]


def layout(lengths, buffers=1):
    """Deal the lengths out to the buffers in turn."""
    ends = [0] * buffers
    spans = []
    for i, length in enumerate(lengths):
        buffer = i % buffers
        spans.append((buffer, ends[buffer], ends[buffer] + length))
        ends[buffer] += length
    return spans


def arrays(spans, dtypes):
    return [
        np.zeros(max(stop for b, _, stop in spans if b == i), dtype)
        for i, dtype in enumerate(dtypes)
    ]


def fill(buffers, rank, step):
    for i, buffer in enumerate(buffers):
        buffer[:] = (rank + 1) * np.random.default_rng([step, i]).integers(1, 9, buffer.size)


def summed(buffers, size, step):
    """Whether the buffers hold the sum of what all ranks were filled with."""
    expected = [np.empty_like(buffer) for buffer in buffers]
    fill(expected, size * (size + 1) // 2 - 1, step)
    return all(np.array_equal(*pair) for pair in zip(buffers, expected, strict=True))


def train(group, exchange, buffers, spans, steps):
    """Whether so many steps, whose gradients come from the end, give the sums on all ranks; frees
    the exchange.
    """
    right = []
    for step in range(steps):
        host = [np.empty(buffer.size, buffer.dtype) for buffer in buffers]
        fill(host, group.rank, step)
        for buffer, values in zip(buffers, host, strict=True):
            buffer[...] = values if isinstance(buffer, np.ndarray) else load().asarray(values)
        for span in reversed(range(len(spans))):
            exchange.ready(span)
        exchange.finish()
        host = [buffer if isinstance(buffer, np.ndarray) else buffer.get() for buffer in buffers]
        right.append(summed(host, group.size, step))
    exchange.free()
    return all(map(all, group.gather(right)))


EACH_OVERLAP = pytest.mark.parametrize("overlap", [True, False])


@pytest.mark.both_worlds
@EACH_OVERLAP
@pytest.mark.parametrize("bucket_bytes", [1, 2000])
@pytest.mark.parametrize("algorithm", ["auto", "native", "ring", "star", "shared"])
def test_any_order_of_gradients_gives_the_sums(group, algorithm, bucket_bytes, overlap):
    """On every rank in another order, each written just before it is reported; some never are, on
    one rank none.
    """
    spans = layout(LENGTHS, 2)
    buffers = arrays(spans, ["float32", "float64"])
    exchange = BucketedAllReduce(group, buffers, spans, algorithm, bucket_bytes, overlap)
    chance = random.Random(group.rank)
    right = []
    for step in range(3):
        order = list(range(len(spans)))
        if step:
            chance.shuffle(order)
        final = [np.empty_like(buffer) for buffer in buffers]
        fill(final, group.rank, step)
        reported = order[chance.randrange(3) :] if group.rank != step else []
        for span in reversed(reported):
            buffer, start, stop = spans[span]
            buffers[buffer][start:stop] = final[buffer][start:stop]
            exchange.ready(span)
        for span in set(order) - set(reported):
            buffer, start, stop = spans[span]
            buffers[buffer][start:stop] = final[buffer][start:stop]
        exchange.finish()
        right.append(summed(buffers, group.size, step))
    exchange.free()
    assert group.gather(right) == [[True] * 3] * group.size


@pytest.mark.both_worlds
def test_ranks_that_fall_behind_are_waited_for(group):
    """Other sums on the same group run between, as batch norm's do, and meet none of the exchange's
    messages.
    """
    spans = layout(LENGTHS)
    buffers = arrays(spans, ["float32"])
    exchange = BucketedAllReduce(group, buffers, spans, "ring", 400)
    right = []
    for step in range(3):
        fill(buffers, group.rank, step)
        for span in reversed(range(len(spans))):
            exchange.ready(span)
            if span % 3 == 0:
                right.append(group.sum_floats([1.0]) == [group.size])
                between = np.ones(50)
                group.all_reduce(between, "ring")
                right.append(bool(np.all(between == group.size)))
        exchange.finish()
        right.append(summed(buffers, group.size, step))
    exchange.free()
    assert group.gather(all(right)) == [True] * group.size


@pytest.mark.simulated
def test_bits_do_not_depend_on_overlap_or_timing(group):
    spans = layout(LENGTHS)
    sums = set()
    for overlap in (True, False, True):
        buffers = [
            np.random.default_rng(group.rank).standard_normal(sum(LENGTHS)).astype(np.float32)
        ]
        exchange = BucketedAllReduce(group, buffers, spans, "ring", 3000, overlap)
        order = list(range(len(spans)))
        random.Random(group.rank).shuffle(order)
        for span in order:
            exchange.ready(span)
        exchange.finish()
        exchange.free()
        sums.add(zlib.crc32(buffers[0].tobytes()))
    every = group.gather(sorted(sums))
    assert every == [every[0]] * group.size
    assert len(every[0]) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["tree", "shared", "auto"])
@EACH_OVERLAP
def test_device_gradients_are_summed_where_they_are(group, overlap, algorithm):
    """A bucket's copies go on while others are on their way; the double gives rubbish to those who
    do not wait.
    """
    xp, spans = load(), layout(LENGTHS, 2)
    device = [
        xp.zeros(buffer.size, buffer.dtype) for buffer in arrays(spans, ["float32", "float64"])
    ]
    assert train(
        group, BucketedAllReduce(group, device, spans, algorithm, 5000, overlap), device, spans, 2
    )


@pytest.mark.simulated
def test_traffic_is_counted_per_step(group):
    spans = layout(LENGTHS)
    exchange = BucketedAllReduce(group, arrays(spans, ["float64"]), spans, "auto", 10_000)
    seen, world = [], group.comm.world
    for _ in range(2):
        world.traffic = Traffic()
        exchange.ready(3)
        exchange.finish()
        seen.append([world.traffic.bytes, world.traffic.calls, 0 <= world.collective_s < 60])
    exchange.free()
    item = [8 * sum(LENGTHS), len(exchange.buckets), True] if group.size > 1 else [0, 0, True]
    assert group.gather(seen) == [[item, item]] * group.size


@pytest.mark.both_worlds
@EACH_OVERLAP
def test_buffers_in_shared_memory_are_summed_there(group, overlap):
    spans = layout(LENGTHS)
    buffers = [
        group.memory().allocate(buffer.size, buffer.dtype) for buffer in arrays(spans, ["float32"])
    ]
    exchange = BucketedAllReduce(group, buffers, spans, "auto", 10_000, overlap)
    names = [choice.algorithm for choice in exchange.choices]
    assert train(group, exchange, buffers, spans, 3)
    assert group.size == 1 or "shared" in names


@pytest.mark.mpi
def test_time_under_way_is_hidden_only_while_the_rank_computes(group):
    spans = layout([1000, 1000])
    exchange = BucketedAllReduce(
        group, arrays(spans, ["float32"]), spans, "ring", bucket_bytes=4000, overlap=True
    )
    hidden, world = [], group.comm.world
    for pause_s in (0.0, 0.2):
        exchange.ready(1)  # its bucket is launched
        time.sleep(pause_s)
        exchange.ready(0)
        exchange.finish()
        hidden.append(world.traffic.hidden_s)
    unknown = math.isnan(world.traffic.predicted_s)
    exchange.free()
    group.barrier()
    if group.size == 1:
        assert hidden == [0.0, 0.0]
    elif group.rank == 0:  # the others may find it finished when they come
        assert hidden[1] - hidden[0] >= max(0.2, hidden[0])
    assert unknown == (group.size > 1)


@pytest.mark.mpi
def test_auto_chooses_for_each_bucket_and_says_why(group):
    spans = layout([10, 4 * 2**20])
    exchange = BucketedAllReduce(group, arrays(spans, ["float32"]), spans, "auto", 1000)
    long, short = exchange.choices
    exchange.free()
    assert short.algorithm == "native"
    assert long.algorithm == ("ring" if group.size > 1 else "native")
    assert "bytes" in long.reason or group.size == 1


@pytest.mark.simulated
@pytest.mark.parametrize("nodes", [1, 2])
def test_overlap_and_buckets_that_suit_the_nodes(group, nodes):
    """One message for each buffer at the end within a node, buckets on their way between nodes."""
    world = group.duplicate()
    world._nodes = [rank * nodes // world.size for rank in range(world.size)]
    spans = layout([2**20, 2**20, 2**20])
    several = nodes > 1 and world.size > 1
    for asked in (None, True, False):
        exchange = BucketedAllReduce(
            world, arrays(spans, ["float32"]), spans, "ring", overlap=asked
        )
        overlap = several if asked is None else asked
        assert (exchange.overlap, len(exchange.buckets)) == (overlap, 3 if overlap else 1)
        exchange.free()
    world.free()


def raised(make):
    try:
        make()
    except (CommError, UsageError, DtypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.simulated
def test_ranks_with_other_gradients_are_found_at_once(group):
    last = group.size - 1
    n = 9 if group.rank == last and last else 8
    result = raised(lambda: BucketedAllReduce(group, [np.zeros(n)], [(0, 0, n)]).free())
    others = "rank 0 has" if last == 1 else f"ranks 0-{last - 1} have"
    expected = (
        f"CommError: the ranks would sum different gradients: {others} a bucket of 8 float64; "
        f"rank {last} has a bucket of 9 float64; build the same model on every rank"
    )
    assert group.gather(result) == [expected if last else ""] * group.size


# How gradients are grouped: pictures of buckets.


# four parameters in one buffer: 10, 2, 6 and 4 elements of 4 bytes
SPANS = [(0, 0, 10), (0, 10, 12), (0, 12, 18), (0, 18, 22)]


def drawn(spans, itemsizes, limit):
    return [
        f"{b.buffer}[{b.start}:{b.stop}] of {list(b.spans)}"
        for b in plan_buckets(spans, itemsizes, limit)
    ]


MIXED = [(0, 0, 4), (1, 0, 3), (0, 4, 8), (1, 3, 5), (0, 8, 9)]
GAP = [(0, 0, 3), (0, 8, 10)]


@pytest.mark.parametrize(
    "spans, limit, buckets",
    [
        ([], 100, []),
        (SPANS, 10**9, ["0[0:22] of [0, 1, 2, 3]"]),
        (SPANS, 48, ["0[10:22] of [1, 2, 3]", "0[0:10] of [0]"]),
        (SPANS, 40, ["0[12:22] of [2, 3]", "0[10:12] of [1]", "0[0:10] of [0]"]),
        (SPANS, 1, ["0[18:22] of [3]", "0[12:18] of [2]", "0[10:12] of [1]", "0[0:10] of [0]"]),
        (MIXED, 10**9, ["1[0:5] of [1, 3]", "0[0:9] of [0, 2, 4]"]),
        (MIXED, 24, ["1[3:5] of [3]", "0[4:9] of [2, 4]", "1[0:3] of [1]", "0[0:4] of [0]"]),
        (GAP, 10**9, ["0[0:10] of [0, 1]"]),
        (GAP, 8, ["0[8:10] of [1]", "0[0:3] of [0]"]),
    ],
)
def test_buckets_fill_from_the_end_of_each_buffer(spans, limit, buckets):
    assert drawn(spans, [4, 8], limit) == buckets


@pytest.mark.simulated
def test_a_gradient_reported_twice_is_refused(group):
    exchange = BucketedAllReduce(group, [np.ones(8)], [(0, 0, 4), (0, 4, 8)], overlap=False)
    exchange.ready(1)
    refuses(CommError, "gradient 1 was reported final twice", exchange.ready, 1)
    exchange.finish()
    exchange.ready(1)  # a new step
    exchange.finish()
    exchange.free()


@pytest.mark.parametrize("spans", [[(0, 0, 4), (0, 3, 5)], [(0, 4, 8), (0, 0, 4)], [(0, 4, 2)]])
def test_spans_out_of_order_are_refused(spans):
    usage_error("must begin at or after", plan_buckets, spans, [4], 100)


def test_an_empty_bucket_is_refused():
    usage_error("bucket_bytes is 0", plan_buckets, SPANS, [4], 0)


@pytest.mark.parametrize(
    "algorithm, busiest, total",
    [
        ("ring", 14 / 8, 14),
        ("halving-doubling", 14 / 8, 14),
        ("tree", 3, 14),
        ("star", 7, 14),
        ("native", None, None),
    ],
)
def test_what_ranks_send(algorithm, busiest, total):
    """In gradients' worth of bytes, on 8 ranks: the server's rank sends the sum to all others."""

    def volume(group):
        buffers = [np.zeros(1000), np.zeros(64, "float32")]
        exchange = BucketedAllReduce(group, buffers, [(0, 0, 1000), (1, 0, 64)], algorithm)
        result = exchange.sent_bytes()
        exchange.free()
        return result

    assert buffers_sent(find_collective("broadcast", "tree"), 6) == [3, 0, 1, 0, 1, 0]
    nbytes = 8 * 1000 + 4 * 64
    assert (
        simulate(volume, 8) == [None if total is None else (busiest * nbytes, total * nbytes)] * 8
    )
