"""Simulations: the closed forms where they apply, both ways to work a phase off, and who waits for a shared link."""

import time
from dataclasses import replace
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi.comm import cost
from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES, find_algorithm
from nnmpi.comm.collective import BROADCAST, Collective, Phase
from nnmpi.comm.machine import Link, Machine, blocks
from nnmpi.comm.simulate import CollectiveTimes, price, simulate_collective
from nnmpi.comm.step_simulation.links import Links
from nnmpi.comm.step_simulation.rounds import in_rounds
from nnmpi.comm.steps import Step
from nnmpi.errors import ScheduleError, UsageError
from tests.comm.machines import machines
from tests.harness.slow import LARGE, once_more

ALPHA, BETA, GAMMA = 2e-5, 3e-10, 7e-11
UNIFORM = Machine.uniform(ALPHA, BETA, GAMMA)
SYMMETRIC = sorted(name for name, c in COLLECTIVES.items() if any(phase.symmetric for phase in c.phases))


def by_messages(collective: Collective) -> Collective:
    """The same collective, with nothing said about symmetry."""
    return replace(collective, phases=tuple(replace(phase, symmetric=False) for phase in collective.phases))


# alphas, parts of M sent, parts of M added; for N ranks that divide the buffer (a power of two for the halving ones)
CLOSED = {
    ("all-reduce", "ring"): lambda n: (2 * (n - 1), 2 * (n - 1) / n, (n - 1) / n),
    ("all-reduce", "tree"): lambda n: (2 * log2(n), 2 * log2(n), log2(n)),
    ("all-reduce", "ps"): lambda n: (2 * (n - 1), 2 * (n - 1), n - 1),
    ("all-reduce", "halving-doubling"): lambda n: (2 * log2(n), 2 * (n - 1) / n, (n - 1) / n),
    ("reduce-scatter", "ring"): lambda n: (n - 1, (n - 1) / n, (n - 1) / n),
    ("reduce-scatter", "tree"): lambda n: (log2(n), (n - 1) / n, (n - 1) / n),
    ("all-gather", "ring"): lambda n: (n - 1, (n - 1) / n, 0),
    ("all-gather", "tree"): lambda n: (log2(n), (n - 1) / n, 0),
    ("broadcast", "tree"): lambda n: (log2(n), log2(n), 0),
    ("broadcast", "ring"): lambda n: (log2(n) + n - 1, 2 * (n - 1) / n, 0),
    ("neighbour-average", "gossip"): lambda n: (2, 2, 2),
}


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("size", [4, 16, 256])
def test_it_equals_the_closed_form(name: tuple[str, str], size: int) -> None:
    nbytes = 2**20
    alphas, sent, added = CLOSED[name](size)
    expected = alphas * ALPHA + sent * nbytes * BETA + added * nbytes * GAMMA
    assert simulate_collective(COLLECTIVES[name], size, nbytes, UNIFORM).seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("size", "ranks_per_node"), [(16, 4), (64, 8)])
def test_two_levels_equal_their_closed_form(size: int, ranks_per_node: int) -> None:
    nodes = blocks(size, ranks_per_node)
    machine = Machine(Link.line(ALPHA, BETA), Link.line(10 * ALPHA, 20 * BETA), nodes, UNIFORM.add)
    count, depth, nbytes = size // ranks_per_node, log2(ranks_per_node), 2**20
    expected = 2 * depth * (ALPHA + nbytes * BETA) + (depth + (count - 1) / count) * nbytes * GAMMA
    expected += 2 * (count - 1) * 10 * ALPHA + 2 * (count - 1) / count * nbytes * 20 * BETA
    found = simulate_collective(find_algorithm("hierarchical", nodes), size, nbytes, machine)
    assert found.seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_a_symmetric_phase_is_one(name: tuple[str, str], size: int) -> None:
    def shifted(step: Step, rank: int) -> tuple[object, ...]:
        def around(chunks: tuple[int, ...] | range) -> tuple[int, ...]:
            return tuple((chunk + rank) % size for chunk in chunks)

        assert step.to is not None and step.from_ is not None
        to, from_ = (step.to + rank) % size, (step.from_ + rank) % size
        return to, around(step.send), from_, around(step.recv), step.reduce

    for phase in (phase for phase in COLLECTIVES[name].phases if phase.symmetric):
        assert in_rounds(phase.steps(0, size), size)
        for rank in range(size):
            steps = [(s.to, tuple(s.send), s.from_, tuple(s.recv), s.reduce) for s in phase.steps(rank, size)]
            assert steps == [shifted(step, rank) for step in phase.steps(0, size)]


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(SYMMETRIC), st.integers(2, 12), st.integers(0, 400), st.booleans())
def test_rounds_and_messages_give_the_same_times(
    data: st.DataObject, name: tuple[str, str], size: int, nbytes: int, shared_links: bool
) -> None:
    machine = data.draw(machines(size, shared_links))
    fast = simulate_collective(COLLECTIVES[name], size, nbytes, machine)
    slow = simulate_collective(by_messages(COLLECTIVES[name]), size, nbytes, machine)
    assert fast.messages == slow.messages
    assert slow.out_of_turn == 0
    if fast.out_of_turn == 0:
        np.testing.assert_allclose(fast.finish_s, slow.finish_s, rtol=1e-12)
        assert fast.waited_s == pytest.approx(slow.waited_s, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("size", [3, 5, 9])
def test_rounds_with_chunks_all_alike_still_differ_by_distance(name: tuple[str, str], size: int) -> None:
    nodes = (0, 1) + (0,) * (size - 2)
    machine = Machine(Link.line(1.0, 0.01), Link.line(7.0, 0.05), nodes, slow_ranks={2: 3.0}, slow_nodes={1: 2.0})
    fast = simulate_collective(COLLECTIVES[name], size, 40 * size, machine)
    slow = simulate_collective(by_messages(COLLECTIVES[name]), size, 40 * size, machine)
    np.testing.assert_allclose(fast.finish_s, slow.finish_s, rtol=1e-12)


@pytest.mark.parametrize("name", [("all-reduce", "ring"), ("all-gather", "tree")])
@pytest.mark.parametrize("placed", ["in blocks", "in turn", "at random"])
@pytest.mark.parametrize("late_s", [0.0, 1e-3])
def test_shared_links_in_rounds_are_near_the_exact_order(name: tuple[str, str], placed: str, late_s: float) -> None:
    size, count, draw = 64, 8, np.random.default_rng(7)
    nodes = {
        "in blocks": blocks(size, size // count),
        "in turn": tuple(rank % count for rank in range(size)),
        "at random": tuple(draw.permutation(size) % count),
    }[placed]
    late = {rank: late_s * draw.random() for rank in range(size)}
    machine = Machine(Link.line(5e-7, 1e-10), Link.line(2e-6, 8e-11), nodes, UNIFORM.add, {3: 3.0}, late=late)
    fast = simulate_collective(COLLECTIVES[name], size, 2**20, machine)
    exact = simulate_collective(by_messages(COLLECTIVES[name]), size, 2**20, machine)
    if placed == "in blocks":
        assert fast.out_of_turn == 0
    assert fast.seconds == pytest.approx(exact.seconds, rel=1e-12 if fast.out_of_turn == 0 else 0.15)


def _crossing(rank: int, size: int) -> tuple[Step, ...]:
    """Send everything from ranks 0 and 1 to ranks 2 and 3."""
    return (Step(to=rank + 2, send=(0, 1, 2, 3)) if rank < 2 else Step(from_=rank - 2, recv=(0, 1, 2, 3)),)


def _on_two_nodes(nodes: tuple[int, ...], late: dict[int, float]) -> CollectiveTimes:
    machine = Machine(Link.line(1.0, 1.0), Link.line(10.0, 1.0), nodes, late=late)
    return simulate_collective(Collective("crossing", BROADCAST, (Phase(_crossing),)), 4, 100, machine)


def test_messages_queue_for_a_nodes_link_in_the_order_in_which_they_are_ready() -> None:
    both_leave_node_0 = _on_two_nodes((0, 0, 1, 1), {})
    assert both_leave_node_0.finish_s.tolist() == [110, 210, 110, 210]  # the bytes queue, the latencies do not
    assert both_leave_node_0.waited_s == 100
    assert _on_two_nodes((0, 0, 1, 2), {}).finish_s.tolist() == [110, 210, 110, 210]
    assert _on_two_nodes((0, 2, 1, 1), {}).finish_s.tolist() == [110, 210, 110, 210]  # they meet on the way in
    assert _on_two_nodes((0, 2, 1, 3), {}).finish_s.tolist() == [110, 110, 110, 110]
    assert _on_two_nodes((0, 1, 1, 0), {}).finish_s.tolist() == [110, 110, 110, 110]  # one out, one in
    assert _on_two_nodes((0, 0, 1, 1), {0: 5.0}).finish_s.tolist() == [210, 110, 210, 110]
    assert _on_two_nodes((0, 0, 0, 0), {}).waited_s == 0


@pytest.mark.parametrize("ready", [[0.0, 0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, 0.0, 9.0], [0.0, 0.0, 5.0, 5.0, 1.0]])
def test_a_round_of_messages_queues_as_one_after_another(ready: list[float]) -> None:
    source, target, wire = [0, 0, 1, 1, 0], [2, 3, 2, 3, 2], [4.0, 1.0, 2.0, 3.0, 2.5]
    together, singly = Links(4), Links(4)
    begin = together.send_round(np.array(source), np.array(target), np.array(ready), np.array(wire))
    order = sorted(range(5), key=lambda message: (ready[message], message))
    expected = {m: singly.send(source[m], target[m], ready[m], wire[m]) for m in order}
    assert begin.tolist() == pytest.approx([expected[message] for message in range(5)], rel=1e-12)
    assert together.waited_s == pytest.approx(singly.waited_s)


def test_late_and_slow_ranks_hold_the_others_up() -> None:
    ring, nbytes = ALGORITHMS["ring"], 2**20
    base = simulate_collective(ring, 16, nbytes, UNIFORM).seconds
    late = simulate_collective(ring, 16, nbytes, replace(UNIFORM, late={5: 0.25}))
    assert late.seconds == pytest.approx(base + 0.25, rel=1e-12)
    assert late.finish_s.min() > 0.25  # nobody has the sum without its part
    slow = simulate_collective(ring, 16, 64, replace(UNIFORM, slow_ranks={5: 3.0}))
    assert 2.5 < slow.seconds / simulate_collective(ring, 16, 64, UNIFORM).seconds < 3
    nodes = Machine(UNIFORM.inside, nodes=tuple(range(16)), slow_nodes={3: 2.0})
    assert simulate_collective(ring, 16, 2**30, nodes).seconds == pytest.approx(2 * 30 / 16 * 2**30 * BETA, rel=1e-2)


def test_more_ranks_than_elements() -> None:
    found = simulate_collective(ALGORITHMS["ring"], 8, 4, UNIFORM)
    assert found.messages == 2 * 7
    assert simulate_collective(ALGORITHMS["tree"], 8, 0, UNIFORM).seconds == 0


@pytest.mark.parametrize("name", [once_more(name, number % 4 > 0, LARGE) for number, name in enumerate(COLLECTIVES)])
def test_4096_ranks_take_seconds(name: tuple[str, str]) -> None:
    machine = Machine(Link.line(5e-7, 1e-10), Link.line(2e-6, 8e-11), blocks(4096, 8), UNIFORM.add, {77: 1.5})
    begin = time.process_time()
    assert simulate_collective(COLLECTIVES[name], 4096, 2**20, machine).seconds > 0
    assert time.process_time() - begin < 30


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(UsageError, match="0 ranks"):
        simulate_collective(ALGORITHMS["ring"], 0, 4, UNIFORM)
    with pytest.raises(UsageError, match="places 2 ranks"):
        simulate_collective(ALGORITHMS["ring"], 3, 4, replace(UNIFORM, nodes=(0, 1)))
    waiting = Collective("waiting", BROADCAST, (Phase(lambda rank, size: (Step(from_=1 - rank, recv=(0,)),)),))
    with pytest.raises(ScheduleError, match="rank 0 waits for ever in its step 0"):
        simulate_collective(waiting, 2, 8, UNIFORM)


# The course's table: its formulas word for word, and where the steps agree with it.


PLAIN, ADDING = Machine.uniform(ALPHA, BETA), Machine.uniform(ALPHA, BETA, GAMMA)
POWERS, RANKS = [1, 2, 4, 8, 32], [1, 2, 3, 4, 5, 7, 8, 12, 32, 33]


def exactly(operation: str, algorithm: str, ranks: int, nbytes: int, machine: Machine = ADDING) -> object:
    """The price of what runs here, for a comparison."""
    return pytest.approx(price(COLLECTIVES[operation, algorithm], ranks, nbytes, machine).seconds, rel=1e-12)


@pytest.mark.parametrize("N", RANKS)
def test_the_formulas_are_those_of_the_course(N: int) -> None:
    M, alpha, beta, log = 4096.0, 3.0, 0.25, ceil(log2(N))
    assert cost.parameter_server(N, M, alpha, beta) == 2 * alpha + 2 * (N - 1) * M * beta
    assert cost.ring_all_reduce(N, M, alpha, beta) == 2 * (N - 1) * alpha + 2 * (N - 1) / N * M * beta
    assert cost.tree_all_reduce(N, M, alpha, beta) == 2 * alpha * log + 2 * log * M * beta
    assert cost.broadcast(N, M, alpha, beta) == alpha * log + log * M * beta
    assert cost.all_gather(N, M, alpha, beta) == alpha * log + (N - 1) * M * beta


@pytest.mark.parametrize("N", RANKS)
def test_the_right_side_of_the_table_is_the_price_of_the_steps(N: int) -> None:
    """And so are the usual forms of what the table does not have."""
    M = 4 * 27720 * 32  # divided by every N here but 33
    M -= M % (4 * N)
    log, once = ceil(log2(N)), (N - 1) / N * M
    assert exactly("all-reduce", "ps", N, M) == 2 * (N - 1) * (ALPHA + M * BETA) + (N - 1) * M * GAMMA
    assert exactly("all-reduce", "ring", N, M) == 2 * (N - 1) * ALPHA + 2 * once * BETA + once * GAMMA
    assert exactly("all-reduce", "tree", N, M) == 2 * log * (ALPHA + M * BETA) + log * M * GAMMA
    assert exactly("all-gather", "ring", N, N * M) == (N - 1) * (ALPHA + M * BETA)
    if N in POWERS:
        assert exactly("all-reduce", "halving-doubling", N, M) == 2 * log * ALPHA + 2 * once * BETA + once * GAMMA
        assert exactly("broadcast", "ring", N, M) == cost.ring_broadcast(N, M, ALPHA, BETA)


@pytest.mark.parametrize("N", RANKS)
def test_where_the_course_agrees_with_the_steps(N: int) -> None:
    M = 4 * 60 * N
    assert cost.ring_all_reduce(N, M, ALPHA, BETA) == exactly("all-reduce", "ring", N, M, PLAIN)
    assert cost.tree_all_reduce(N, M, ALPHA, BETA) == exactly("all-reduce", "tree", N, M, PLAIN)
    assert cost.broadcast(N, M, ALPHA, BETA) == exactly("broadcast", "tree", N, M)
    assert cost.all_gather(N, M, ALPHA, BETA) == exactly("all-gather", "tree", N, N * M)


def test_the_parameter_server_is_where_it_does_not() -> None:
    """Where only latency counts, the steps of 16 ranks take 15 times as long."""
    latency = Machine.uniform(ALPHA, 0.0)
    assert exactly("all-reduce", "ps", 16, 64, latency) == 15 * cost.parameter_server(16, 64, ALPHA, 0.0)


def test_the_table() -> None:
    rows = {row.name: row for row in cost.table(8, 2**20, PLAIN)}
    assert list(rows)[:5] == ["parameter server", "ring all-reduce", "tree all-reduce", "broadcast", "all-gather"]
    assert len(rows) == len(COLLECTIVES)
    for name in list(rows)[1:5]:
        assert rows[name].course_s == pytest.approx(rows[name].exact_s, rel=1e-12)
        assert rows[name].differs == ""
    assert rows["parameter server"].differs == "one server receives one message after another: 2 (N-1) alpha"
    assert cost.table(8, 2**20, ADDING)[1].differs == "the time to add (gamma)"
    assert cost.table(7, 2**20, PLAIN)[1].differs == "chunks of unequal length"
    assert rows["parameter server"].exact_s - (rows["parameter server"].course_s or 0) == pytest.approx(12 * ALPHA)
    assert rows["all-reduce by halving-doubling"].course_s is None


def test_the_table_of_several_nodes_takes_the_link_between_them() -> None:
    machine = Machine(Link.line(1e-6, 1e-10), Link.line(ALPHA, BETA), blocks(8, 4))
    rows = {row.name: row for row in cost.table(8, 2**20, machine)}
    assert rows["tree all-reduce"].course_s == pytest.approx(cost.tree_all_reduce(8, 2**20, ALPHA, BETA), rel=1e-9)
    assert rows["tree all-reduce"].differs == "links and ranks that are not all alike"
    assert rows["tree all-reduce"].exact_s < rows["tree all-reduce"].course_s
    assert rows["all-reduce by hierarchical"].exact_s < rows["tree all-reduce"].exact_s
