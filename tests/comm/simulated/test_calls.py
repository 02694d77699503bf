"""The calls of a simulated communicator: their values, whatever the seed, and their times."""

import numpy as np
import pytest

from nnmpi import simulate, use_precision
from nnmpi.backend import kernels as lookup
from nnmpi.backend import precision as precisions
from nnmpi.backend.precision import precision
from nnmpi.base import clock
from nnmpi.base.errors import UsageError
from nnmpi.comm.algorithms.registry import native_algorithms
from nnmpi.comm.duration import price
from nnmpi.comm.machine import Link, Machine
from nnmpi.comm.simulated.simulated_world import COMPUTING

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 33]
LATENCY_S, BYTE_S = 1e-4, 1e-8
MACHINE = Machine.uniform(LATENCY_S, BYTE_S)


@pytest.mark.parametrize("cpu_factor", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_values_of_all_calls(size, cpu_factor):
    """Every call on one communicator, for several seeds."""

    def main(group):
        comm, rank = group.comm, group.rank
        counts = [1 + item % 3 for item in range(size)]
        values, triangle = np.arange(sum(counts), dtype=np.int64), size * (size - 1) // 2
        local = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        numbers = np.repeat(np.arange(size), counts)
        for start in ("", "i"):
            summed, text, full = values * (rank + 1), values + rank, values * rank
            part, into, known = (
                np.zeros(counts[rank], np.int64),
                np.zeros_like(values),
                np.zeros_like(values),
            )
            known[local] = rank
            for name, arguments, result, expected in (
                ("allreduce", (summed,), summed, values * (triangle + size)),
                ("broadcast", (text, size - 1), text, values + size - 1),
                ("allgatherv", (np.full(counts[rank], rank), into, counts), into, numbers),
                ("allgatherv", (None, known, counts), known, numbers),
                ("reduce_scatter", (full, part, counts), part, (values * triangle)[local]),
            ):
                request = getattr(comm, start + name)(*arguments)
                comm.wait_all([request] if start else [])
                assert (result == expected).all()
            assert (full == values * rank).all()  # it is only read
            comm.barrier()
        everyones = np.zeros((size, 2))
        comm.allgather(np.array([rank, -rank], float), everyones)
        assert (everyones == [[item, -item] for item in range(size)]).all()

    for seed in range(3):
        simulate(main, size, MACHINE, seed, cpu_factor)


@pytest.mark.parametrize("cpu_factor", [0, 1])
@pytest.mark.parametrize("length", [0, 3, 5000])
def test_messages_with_one_tag_do_not_overtake_one_another(length, cpu_factor):
    """Short ones and long ones, in turns with another tag."""

    def main(group):
        comm = group.comm
        numbers = range(12)
        if group.rank == 0:
            arrays = [np.full(length + (number % 2) * 3000 + 1, number) for number in numbers]
            comm.wait_all(
                [
                    comm.isend(array, 1, number % 3)
                    for number, array in zip(numbers, arrays, strict=True)
                ]
            )
            return []
        arrays = [np.zeros(length + (number % 2) * 3000 + 1, int) for number in numbers]
        comm.wait_all(
            [
                comm.irecv(array, 0, number % 3)
                for number, array in zip(numbers, arrays, strict=True)
            ]
        )
        return [int(array[-1]) for array in arrays]

    for seed in range(10):
        assert simulate(main, 2, MACHINE, seed, cpu_factor)[1] == list(range(12))


def test_seeds_give_other_orders_and_the_same_seed_the_same():
    """Who of several senders is seen first is drawn; the same seed draws the same."""

    def main(group):
        comm = group.comm
        if group.rank:
            comm.wait_all([comm.isend(np.zeros(1), 0, 0)])
            return []
        waiting = {rank: comm.irecv(np.zeros(1), rank, 0) for rank in range(1, group.size)}
        order = []

        def look():
            order.extend(
                rank
                for rank in list(waiting)
                if comm.test_all([waiting[rank]]) and waiting.pop(rank)
            )
            return not waiting

        comm.world.wait_until(look)
        return order

    for cpu_factor, least in ((0, 2), (1, 6)):
        orders = [
            tuple(simulate(main, 6, seed=seed, cpu_factor=cpu_factor)[0])
            for seed in [*range(20), *range(20)]
        ]
        assert orders[:20] == orders[20:]
        assert len(set(orders)) >= least


def test_times_are_the_machines():
    """A long message between two ranks, a ring of them, and one link that all of a node's ranks
    share.
    """

    def ring(group):
        comm = group.comm
        clock.sleep(0.5 * (group.rank == 1))
        out, into = np.zeros(10**5), np.zeros(10**5)
        ahead, behind = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        comm.wait_all([comm.irecv(into, behind, 0), comm.isend(out, ahead, 0)])
        return clock.now()

    message_s = LATENCY_S + 8e5 * BYTE_S
    assert simulate(ring, 2, MACHINE, cpu_factor=0) == pytest.approx([0.5 + message_s] * 2)
    # Rank 0's message to 1 begins when 1 has come, and so does 1's to 2; 3's to 0 does not wait for
    # anybody.
    result = simulate(ring, 4, MACHINE, cpu_factor=0)
    assert result == pytest.approx([0.5 + message_s, 0.5 + message_s, 0.5 + message_s, message_s])
    shared = Machine(Link.line(0.0, 0.0), Link.line(LATENCY_S, BYTE_S), nodes=(0, 0, 1, 1))

    def across(group):
        buffer = np.zeros(10**5)
        comm = group.comm
        comm.wait_all(
            [
                comm.isend(buffer, group.rank + 2, 0)
                if group.rank < 2
                else comm.irecv(buffer, group.rank - 2, 0)
            ]
        )

    assert simulate(across, 4, shared, cpu_factor=0).seconds == pytest.approx(
        LATENCY_S + 2 * 8e5 * BYTE_S
    )


@pytest.mark.parametrize("cpu_factor", [0.0, 1.0])
def test_a_wait_ends_at_its_time_or_with_what_it_is_for(cpu_factor):
    """And a rank that has waited in vain may do so again; who waits for ever is still found."""

    def main(group):
        comm, buffer = group.comm, np.zeros(1)
        if group.rank == 0:
            clock.sleep(10.0)
            comm.wait_all([comm.isend(buffer, 1, 0)])
            return []
        request = comm.irecv(buffer, 0, 0)
        result, ends_s = [], []
        for until_s in (3.0, 4.0, 1e9):
            result.append(comm.world.wait_until(lambda: comm.test_all([request]), until_s))
            ends_s.append(clock.now())
        if cpu_factor == 0:
            assert ends_s == pytest.approx([3.0, 4.0, 10.0], abs=1e-3)
        return result

    result = simulate(main, 2, cpu_factor=cpu_factor)[1]
    assert result == [False, False, True] if cpu_factor == 0 else result[-1]


def test_a_short_message_does_not_arrive_before_a_long_one_with_its_tag():
    """They travel one behind the other."""

    def main(group):
        comm, arrays = group.comm, [np.zeros(10**5), np.zeros(1)]
        if group.rank == 0:
            comm.wait_all([comm.isend(array, 1, 0) for array in arrays])
            return 0.0
        long, short = (comm.irecv(array, 0, 0) for array in arrays)
        comm.wait_all([short])
        arrived_s = clock.now()
        comm.wait_all([long])
        return arrived_s

    assert simulate(main, 2, MACHINE, cpu_factor=0)[1] == pytest.approx(LATENCY_S + 800008 * BYTE_S)


def test_nobody_has_a_message_before_it_has_arrived():
    """Whenever the seed lets it be seen, also by a rank that does not have to wait for it any
    more.
    """

    def main(group):
        comm, buffer = group.comm, np.zeros(100)
        if group.rank == 0:
            comm.wait_all([comm.isend(buffer, 1, 0)])
            return 0.0
        request = comm.irecv(buffer, 0, 0)
        for _ in range(100):  # by now it is there
            comm.progress()
        comm.wait_all([request])
        return clock.now()

    for seed in range(10):
        assert simulate(main, 2, MACHINE, seed, cpu_factor=1e-9)[1] >= LATENCY_S + 800 * BYTE_S


def test_who_takes_one_message_at_each_look_is_asked_again():
    """Although nothing has come since: there is more to be found."""

    def main(group):
        comm, count = group.comm, 200
        if group.rank == 0:
            comm.wait_all([comm.isend(np.zeros(1), 1, number) for number in range(count)])
            return 0
        waiting = [comm.irecv(np.zeros(1), 0, number) for number in range(count)]

        def look():
            if comm.test_all(waiting[-1:]):
                waiting.pop()
            return not waiting

        comm.world.wait_until(look)
        return count - len(waiting)

    for cpu_factor in (0, 1):
        assert simulate(main, 2, cpu_factor=cpu_factor)[1] == 200


def test_computing_takes_its_processor_time():
    """Times a factor; without one it takes none."""

    def main(group):
        total = 0
        for number in range(10**5 * 4**group.rank):  # far apart, as a busy machine makes one slower
            total += number
        return clock.now()

    item, twice = (simulate(main, 3, cpu_factor=factor) for factor in (1.0, 2.0))
    assert 0 < item[0] < item[1] < item[2]
    assert 1.2 < sum(twice) / sum(item) < 3.2
    assert simulate(main, 3, cpu_factor=0).seconds == 0


def test_groups_of_nodes():
    """Ranks are on nodes by the machine's table; those of one node share memory."""
    machine = Machine(Link.line(0, 0), nodes=(0, 1, 0, 1, 1))

    def main(group):
        node = group.comm.split_by_node(-group.rank)
        pages = node.share_pages(group.rank)
        pages.parts[node.rank][...] = group.rank
        node.barrier()
        return node.rank, [int(item) for part in pages.parts for item in part[:1]]

    assert simulate(main, 5, machine) == [
        (1, [2]),
        (2, [4, 3, 1]),
        (0, [2]),
        (1, [4, 3, 1]),
        (0, [4, 3, 1]),
    ]


@pytest.mark.parametrize(
    "ranks, cpu_factor", [(0, 1.0), (-1, 1.0), (2, -1.0), (2, float("nan")), (2, float("inf"))]
)
def test_what_cannot_be_simulated_is_refused(ranks, cpu_factor):
    """With a sentence."""
    named = (
        f"ranks is {ranks}; give a whole" if ranks < 1 else f"cpu_factor is {cpu_factor}; give a"
    )
    with pytest.raises(UsageError, match=f"^{named} number"):
        simulate(lambda group: None, ranks, cpu_factor=cpu_factor)


def test_ranks_compute_as_who_simulates_them_does():
    """With the same kernels and precision: what the planner measures on them is what a run would
    take.
    """

    def settings(group):
        return lookup.setting(), precision()

    assert simulate(settings, 2) == [(None, "float32")] * 2
    with lookup.jit(False), use_precision("fp16"):
        assert simulate(settings, 2) == [(False, "fp16")] * 2
    variables = (lookup._enabled, precisions._mode)
    assert {variable.name for variable in variables} == set(COMPUTING)


@pytest.mark.parametrize("groups, each", [(1, 4), (2, 3), (4, 2), (4, 4)])
def test_native_sums_of_groups_on_the_same_nodes_share_their_links(groups, each):
    """A rank of each group on every node: the slowest takes the time that the cost model gives to
    groups on shared links, and not that of one group alone.
    """
    size, count = groups * each, 10**6
    ranks = [range(first, size, groups) for first in range(groups)]
    across, inside = Link.line(5e-5, 8e-10), Link.line(1e-6, 1e-10)
    machine = Machine(inside, across, nodes=tuple(rank // groups for rank in range(size)))

    def main(group):
        comm = group.comm.split(group.rank % groups, group.rank)
        group.comm.barrier()
        begin_s = clock.now()
        comm.allreduce(np.zeros(count, np.float32))
        return clock.now() - begin_s

    took_s = max(simulate(main, size, machine, cpu_factor=0))
    (shared,) = machine.parts(ranks, size)
    expected_s = min(
        price(item, each, 4 * count, shared) for item in native_algorithms("all-reduce")
    )
    assert took_s == pytest.approx(expected_s, rel=0.05)


def test_a_native_sum_within_a_node_waits_for_no_link():
    machine = Machine(MACHINE.inside, MACHINE.inside, nodes=(0, 0, 1, 1))

    def main(group):
        comm = group.comm.split(group.rank // 2, group.rank)
        group.comm.barrier()
        begin_s = clock.now()
        comm.allreduce(np.zeros(10**4, np.float32))
        return clock.now() - begin_s

    apart, alone = (
        simulate(main, size, at, cpu_factor=0) for size, at in ((4, machine), (2, MACHINE))
    )
    assert max(apart) == pytest.approx(max(alone))
