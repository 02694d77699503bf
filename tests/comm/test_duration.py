"""Simulations: the closed forms where they apply, all ranks in lock step, and who waits for a
shared link.
"""

from dataclasses import replace

import numpy as np
import pytest

import nnmpi.base.clock as clock
from nnmpi import simulate
from nnmpi.base.errors import ScheduleError
from nnmpi.comm import duration
from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES, find_collective
from nnmpi.comm.collective import BROADCAST, Collective, Step
from nnmpi.comm.duration import coefficients, price, simulate_collective
from nnmpi.comm.machine import Curve, Link, Links, Machine, blocks
from tests.harness.refusals import refuses, usage_error

ALPHA, BETA, GAMMA = 2e-5, 3e-10, 7e-11
UNIFORM = Machine.uniform(ALPHA, BETA, GAMMA)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 12, 32, 33, 256])
def test_it_equals_the_closed_form(size):
    """On any uniform link, so the sliders of pages may put its numbers into the formula."""
    nbytes = 2**13 * size * size
    for name, collective in COLLECTIVES.items():
        formula = collective.formula(size)
        if formula is None:
            continue
        assert coefficients(collective, size) == pytest.approx(formula), name
        latencies, sent, added = formula
        assert price(collective, size, nbytes, UNIFORM) == pytest.approx(
            latencies * ALPHA + (sent * BETA + added * GAMMA) * nbytes
        )


@pytest.mark.parametrize("name", COLLECTIVES, ids=" ".join)
def test_every_row_has_its_formula(name):
    """Else what an algorithm costs would be compared with nothing."""
    formula = COLLECTIVES[name].formula
    assert formula is not None, f"{' '.join(name)} has no formula; give its row one"
    assert formula(16) is not None, f"the formula of {' '.join(name)} is none for 16 ranks"


def test_rows_have_words_for_the_help():
    assert [name for name, item in ALGORITHMS.items() if not item.help] == []


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("nodes", [(0,) * 24, tuple(range(24))])
def test_equal_ranks_in_lock_step_take_what_messages_take(name, nodes, monkeypatch):
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
def test_shared_links_in_lock_step_are_near_the_exact_order(name, placed, monkeypatch):
    nodes = blocks(64, 8) if placed == "in blocks" else tuple(rank % 8 for rank in range(64))
    machine = Machine(Link.line(5e-7, 1e-10), Link.line(2e-6, 8e-11), nodes, UNIFORM.add)
    exact_s = price(COLLECTIVES[name], 64, 2**20, machine)
    monkeypatch.setattr(duration, "EXACT_RANKS", 8)
    assert price(COLLECTIVES[name], 64, 2**20, machine) == pytest.approx(exact_s, rel=0.15)


def test_thousands_of_ranks():
    machine = Machine(Link.line(5e-7, 1e-10), Link.line(2e-6, 8e-11), blocks(4096, 8), UNIFORM.add)
    assert price(ALGORITHMS["ring"], 4096, 2**20, machine) == pytest.approx(
        8190 * (2e-6 + 256 * 8e-11), rel=0.01
    )


def test_messages_queue_for_a_nodes_link_in_the_order_in_which_they_are_ready():
    def arrivals(*nodes):
        links = Links(Machine(Link.line(1.0, 1.0), Link.line(10.0, 1.0), nodes))
        return [links.carry(rank, rank + 2, 0.0, (100,)) for rank in (0, 1)]

    assert arrivals(0, 0, 1, 1) == [110, 210]  # the bytes queue, the latencies do not
    assert arrivals(0, 0, 1, 2) == [110, 210]  # on the way out
    assert arrivals(0, 2, 1, 1) == [110, 210]  # on the way in
    assert arrivals(0, 2, 1, 3) == [110, 110]
    assert arrivals(0, 1, 1, 0) == [110, 110]  # one out, one in


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name[0] != "all-to-all"])
@pytest.mark.parametrize("groups, per_node", [(1, 1), (1, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("nbytes", [4, 60_000])
def test_it_takes_what_simulated_ranks_take(name, nbytes, groups, per_node):
    """Short messages leave at once. Groups share links, whichever ranks of a node they have.

    The seed decides which of several messages gets a link, if they become ready at once.
    """
    size, (operation, algorithm) = 5, name
    if (algorithm, per_node, groups) == ("hierarchical", 3, 2):
        pytest.skip("one group has 2 leaders, the other one 3")
    ranks = groups * size
    machine = Machine(Link.line(1e-6, 1e-10), Link.line(1e-5, 1e-9), blocks(ranks, per_node))

    def run(group):
        part = group.split(group.rank % groups)
        bound = part.bind(np.zeros(nbytes // 4, "float32"), algorithm, operation=operation)
        group.barrier()
        begin_s = clock.now()
        bound.run()
        return clock.now() - begin_s

    took = [max(simulate(run, ranks, machine, seed, cpu_factor=0.0)) for seed in range(4)]
    parts = machine.parts([range(first, ranks, groups) for first in range(groups)], ranks)
    nodes = None if parts[0].nodes is None else parts[0].nodes[:size]
    item = find_collective(operation, algorithm, nodes)
    predicted_s = max(price(item, size, nbytes, part) for part in parts)
    assert 0.9 * min(took) < predicted_s < 1.15 * max(took)


def test_what_cannot_be_simulated():
    usage_error("size is 0", lambda: price(ALGORITHMS["ring"], 0, 4, UNIFORM))
    usage_error(
        "places 2 ranks", lambda: price(ALGORITHMS["ring"], 3, 4, replace(UNIFORM, nodes=(0, 1)))
    )
    waiting = Collective(
        "waiting", BROADCAST, (lambda rank, size: (Step(from_=1 - rank, recv=(0,)),),)
    )
    refuses(ScheduleError, "rank 0 waits for ever in its step 0", price, waiting, 2, 8, UNIFORM)
