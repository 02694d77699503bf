"""Prices: exact counts, the closed forms where they apply, and the simulation's time on any machine."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES
from nnmpi.comm.collective import Collective
from nnmpi.comm.machine import Link, Machine
from nnmpi.comm.prove import prove
from nnmpi.comm.simulate import Price, price, simulate_collective
from nnmpi.errors import UsageError
from tests.comm.machines import machines

UNIFORM = Machine.uniform(1e-5, 1e-9, 1e-10)


def test_counts_of_the_parameter_server() -> None:
    assert price(ALGORITHMS["ps"], 4, 800, Machine.uniform(1.0, 0.01, 0.001)) == Price(
        pytest.approx(6 + 6 * 8 + 3 * 0.8), rounds=6, sent_bytes=4800, added_bytes=2400, messages=6
    )


def test_the_longest_chunk_is_on_the_path() -> None:
    assert price(ALGORITHMS["ring"], 2, 4 * 7, UNIFORM).sent_bytes == 2 * 4 * 4
    assert price(ALGORITHMS["ring"], 3, 4, UNIFORM) == Price(
        pytest.approx(4e-5 + 16e-9 + 8e-10), rounds=4, sent_bytes=16, added_bytes=8, messages=4
    )  # one element: it travels through all ranks and around again, while the two empty chunks cost nothing


def test_what_the_two_ends_do_decides_between_the_curves() -> None:
    one_way, both_ways = Link.line(1.0, 0.0).one_way, Link.line(10.0, 0.0).one_way
    machine = Machine(Link(one_way, both_ways))
    assert price(COLLECTIVES["broadcast", "tree"], 2, 8, machine).seconds == 1
    assert price(ALGORITHMS["ring"], 2, 8, machine).seconds == 20
    assert price(ALGORITHMS["ring"], 2, 4, machine).seconds == 2  # one chunk is empty: nobody does both at once


def test_nodes_and_what_is_slow() -> None:
    across = Machine(Link.line(1.0, 1.0), Link.line(10.0, 2.0), (0, 0, 1), add=Machine.uniform(0.0, 0.0, 0.5).add)
    inside = price(COLLECTIVES["broadcast", "tree"], 3, 8, across)
    assert inside.seconds == (10 + 16) + (1 + 8)  # to rank 2 on the other node first, then to rank 1
    slow = Machine(across.inside, across.across, across.nodes, across.add, {1: 3.0}, {1: 2.0}, {2: 100.0})
    assert price(COLLECTIVES["broadcast", "tree"], 3, 8, slow).seconds == 100 + (10 + 2 * 16) + (3 + 8)
    assert price(ALGORITHMS["tree"], 2, 8, Machine.uniform(1.0, 1.0, 0.5)).seconds == 9 + 4 + 9
    assert price(ALGORITHMS["tree"], 2, 8, Machine(across.inside, add=across.add, slow_ranks={0: 2.0})).seconds == (
        (2 + 8) + 2 * 4 + (2 + 8)
    )


@pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=lambda c: f"{c.contract.name}-{c.name}")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_a_machine_of_latencies_counts_the_proofs_rounds(collective: Collective, size: int) -> None:
    proof = prove(collective, size)
    found = price(collective, size, 4 * size, Machine.uniform(1.0, 0.0))
    assert (found.seconds, found.rounds, found.messages) == (proof.rounds, proof.rounds, proof.messages)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(COLLECTIVES)), st.integers(1, 12), st.integers(0, 400))
def test_the_price_is_the_simulated_time(data: st.DataObject, name: tuple[str, str], size: int, nbytes: int) -> None:
    machine = data.draw(machines(size, shared_links=False))
    collective = COLLECTIVES[name]
    found, simulated = price(collective, size, nbytes, machine), simulate_collective(collective, size, nbytes, machine)
    assert found.seconds == pytest.approx(simulated.seconds, rel=1e-12)
    assert found.messages == simulated.messages


def test_what_has_no_price() -> None:
    with pytest.raises(UsageError, match="0 ranks"):
        price(ALGORITHMS["ring"], 0, 4, UNIFORM)
    with pytest.raises(UsageError, match="places 2 ranks"):
        price(ALGORITHMS["ring"], 3, 4, Machine(UNIFORM.inside, nodes=(0, 1)))
