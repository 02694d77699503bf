"""The course's table: its formulas word for word, and where the steps agree with it."""

from math import ceil, log2

import pytest

from nnmpi.comm import cost
from nnmpi.comm.algorithms.registry import COLLECTIVES
from nnmpi.comm.machine import Link, Machine, blocks
from nnmpi.comm.simulate import price

ALPHA, BETA, GAMMA = 2e-5, 3e-10, 7e-11
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
def test_the_exact_forms_are_the_price_of_the_steps(N: int) -> None:
    M = 4 * 27720 * 32  # divided by every N here but 33
    M -= M % (4 * N)
    costs = N, M, ALPHA, BETA, GAMMA
    assert cost.exact_parameter_server(*costs) == exactly("all-reduce", "ps", N, M)
    assert cost.exact_ring_all_reduce(*costs) == exactly("all-reduce", "ring", N, M)
    assert cost.exact_tree_all_reduce(*costs) == exactly("all-reduce", "tree", N, M)
    assert cost.exact_ring_all_gather(N, M, ALPHA, BETA) == exactly("all-gather", "ring", N, N * M)
    if N in POWERS:
        assert cost.exact_halving_doubling(*costs) == exactly("all-reduce", "halving-doubling", N, M)
        assert cost.exact_ring_broadcast(N, M, ALPHA, BETA) == exactly("broadcast", "ring", N, M)


@pytest.mark.parametrize("N", RANKS)
def test_where_the_course_agrees_with_the_steps(N: int) -> None:
    M = 4 * 60 * N
    assert cost.ring_all_reduce(N, M, ALPHA, BETA) == exactly("all-reduce", "ring", N, M, PLAIN)
    assert cost.tree_all_reduce(N, M, ALPHA, BETA) == exactly("all-reduce", "tree", N, M, PLAIN)
    assert cost.broadcast(N, M, ALPHA, BETA) == exactly("broadcast", "tree", N, M)
    assert cost.all_gather(N, M, ALPHA, BETA) == exactly("all-gather", "tree", N, N * M)


def test_the_parameter_server_is_where_it_does_not() -> None:
    course = cost.parameter_server(16, 0, ALPHA, BETA)
    assert cost.exact_parameter_server(16, 0, ALPHA, BETA) == pytest.approx(15 * course)


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
