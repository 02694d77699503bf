"""Simulations: the closed forms where they apply, all ranks in lock step, and who waits for a
shared link.
"""

from dataclasses import replace
from math import log2

import numpy as np
import pytest

from nnmpi.comm import duration
from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES, find_collective
from nnmpi.comm.collective import BROADCAST, Collective, Step
from nnmpi.comm.duration import price, simulate_collective
from nnmpi.comm.machine import Curve, Link, Machine, blocks
from nnmpi.errors import ScheduleError, UsageError

ALPHA, BETA, GAMMA = 2e-5, 3e-10, 7e-11
UNIFORM = Machine.uniform(ALPHA, BETA, GAMMA)
POWERS = [("all-reduce", "halving-doubling"), ("broadcast", "ring")]  # exact for powers of two
FORMS = [name for name in COLLECTIVES if "hierarchical" not in name]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 12, 32, 33, 256])
def test_it_equals_the_closed_form(name: tuple[str, str], size: int) -> None:
    if name in POWERS and size & size - 1:
        pytest.skip("exact for powers of two")
    nbytes, result = 4 * 60 * size, COLLECTIVES[name]
    assert price(result, size, nbytes, UNIFORM) == pytest.approx(
        result.seconds(size, nbytes, ALPHA, BETA, GAMMA)
    )


def test_the_formulas_are_those_that_are_taught() -> None:
    N, M, a, b, g = 8, 4096.0, 3.0, 0.25, 0.125
    taught = {
        "ring": 14 * a + 14 / 8 * M * b + 7 / 8 * M * g,
        "tree": 6 * a + 6 * M * b + 3 * M * g,
        "ps": 14 * a + 14 * M * b + 7 * M * g,
        "halving-doubling": 6 * a + 14 / 8 * M * b + 7 / 8 * M * g,
    }
    for name, seconds in taught.items():
        assert ALGORITHMS[name].seconds(N, M, a, b, g) == pytest.approx(seconds)


@pytest.mark.parametrize(("size", "ranks_per_node"), [(16, 4), (64, 8)])
def test_two_levels_equal_their_closed_form(size: int, ranks_per_node: int) -> None:
    nodes = blocks(size, ranks_per_node)
    machine = Machine(Link.line(ALPHA, BETA), Link.line(10 * ALPHA, 20 * BETA), nodes, UNIFORM.add)
    count, depth, nbytes = size // ranks_per_node, log2(ranks_per_node), 2**20
    expected = 2 * depth * (ALPHA + nbytes * BETA) + (depth + (count - 1) / count) * nbytes * GAMMA
    expected += 2 * (count - 1) * 10 * ALPHA + 2 * (count - 1) / count * nbytes * 20 * BETA
    result = simulate_collective(
        find_collective("all-reduce", "hierarchical", nodes), size, nbytes, machine
    )
    assert max(result) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("nodes", [(0,) * 24, tuple(range(24))])
def test_equal_ranks_in_lock_step_take_what_messages_take(
    name: tuple[str, str], nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = Curve(((0, 1e-6), (400, 2e-6), (401, 5e-6), (10_000, 9e-6)))
    machine = Machine(
        Link(curve, Curve.line(2e-6, 3e-9)), Link.line(1e-5, 1e-9), nodes, Curve.line(0, 2e-10)
    )
    at_once = simulate_collective(COLLECTIVES[name], 24, 24 * 1000, machine)
    monkeypatch.setattr(duration, "_steps_of_all", lambda phase, size: None)
    one_by_one = simulate_collective(COLLECTIVES[name], 24, 24 * 1000, machine)
    if name == ("broadcast", "ring"):  # a tree before it: ranks begin at different times
        at_once, one_by_one = [max(at_once)], [max(one_by_one)]
    # chunks that go over the end are two messages
    np.testing.assert_allclose(at_once, one_by_one, rtol=0.02)


@pytest.mark.parametrize("name", [("all-reduce", "ring"), ("all-gather", "tree")])
@pytest.mark.parametrize("placed", ["in blocks", "in turn"])
def test_shared_links_in_lock_step_are_near_the_exact_order(
    name: tuple[str, str], placed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = blocks(64, 8) if placed == "in blocks" else tuple(rank % 8 for rank in range(64))
    machine = Machine(Link.line(5e-7, 1e-10), Link.line(2e-6, 8e-11), nodes, UNIFORM.add)
    exact_s = price(COLLECTIVES[name], 64, 2**20, machine)
    monkeypatch.setattr(duration, "EXACT_RANKS", 8)
    assert price(COLLECTIVES[name], 64, 2**20, machine) == pytest.approx(exact_s, rel=0.15)


def test_thousands_of_ranks() -> None:
    machine = Machine(Link.line(5e-7, 1e-10), Link.line(2e-6, 8e-11), blocks(4096, 8), UNIFORM.add)
    assert price(ALGORITHMS["ring"], 4096, 2**20, machine) == pytest.approx(
        8190 * (2e-6 + 256 * 8e-11), rel=0.01
    )


def _crossing(rank: int, size: int) -> tuple[Step, ...]:
    """Send everything from ranks 0 and 1 to ranks 2 and 3."""
    return (
        Step(to=rank + 2, send=(0, 1, 2, 3))
        if rank < 2
        else Step(from_=rank - 2, recv=(0, 1, 2, 3)),
    )


def _on_two_nodes(nodes: tuple[int, ...]) -> list[float]:
    machine = Machine(Link.line(1.0, 1.0), Link.line(10.0, 1.0), nodes)
    return simulate_collective(Collective("crossing", BROADCAST, (_crossing,)), 4, 100, machine)


def test_messages_queue_for_a_nodes_link_in_the_order_in_which_they_are_ready() -> None:
    both_leave_node_0 = _on_two_nodes((0, 0, 1, 1))
    assert both_leave_node_0 == [110, 210, 110, 210]  # the bytes queue, the latencies do not
    assert _on_two_nodes((0, 0, 1, 2)) == [110, 210, 110, 210]
    assert _on_two_nodes((0, 2, 1, 1)) == [110, 210, 110, 210]  # they meet on the way in
    assert _on_two_nodes((0, 2, 1, 3)) == [110, 110, 110, 110]
    assert _on_two_nodes((0, 1, 1, 0)) == [110, 110, 110, 110]  # one out, one in


def test_more_ranks_than_elements() -> None:
    assert price(ALGORITHMS["ring"], 8, 4, UNIFORM) == pytest.approx(
        14 * (ALPHA + 4 * BETA) + 7 * 4 * GAMMA
    )


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(UsageError, match="size is 0"):
        price(ALGORITHMS["ring"], 0, 4, UNIFORM)
    with pytest.raises(UsageError, match="places 2 ranks"):
        price(ALGORITHMS["ring"], 3, 4, replace(UNIFORM, nodes=(0, 1)))
    waiting = Collective(
        "waiting", BROADCAST, (lambda rank, size: (Step(from_=1 - rank, recv=(0,)),),)
    )
    with pytest.raises(ScheduleError, match="rank 0 waits for ever in its step 0"):
        price(waiting, 2, 8, UNIFORM)
