"""Every collective is proved against its contract for 1 to 33 ranks, and planted faults are found."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from nnmpi.comm.algorithms.bruck import bruck_reduce_scatter
from nnmpi.comm.algorithms.gossip import pairwise
from nnmpi.comm.algorithms.halving import halving_doubling
from nnmpi.comm.algorithms.registry import COLLECTIVES, find_algorithm
from nnmpi.comm.algorithms.ring import ring_all_gather
from nnmpi.comm.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, NEIGHBOUR_AVERAGE, REDUCE_SCATTER, Contract, part
from nnmpi.comm.execution import Execution
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.mpi_world import wrap
from nnmpi.comm.prove import prove, prove_steps
from nnmpi.comm.steps import Step
from nnmpi.errors import ScheduleError

SIZES = range(1, 34)


def depth(size: int) -> int:
    """Return ceil(log2(size))."""
    return (size - 1).bit_length()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", COLLECTIVES, ids=" ".join)
def test_every_collective_is_proved(key: tuple[str, str], size: int) -> None:
    assert prove(COLLECTIVES[key], size).size == size


@pytest.mark.parametrize("size", SIZES)
def test_rounds_are_those_of_the_formulas(size: int) -> None:
    rounds = {key: prove(collective, size).rounds for key, collective in COLLECTIVES.items()}
    assert rounds["reduce-scatter", "ring"] == rounds["all-gather", "ring"] == size - 1
    assert rounds["reduce-scatter", "tree"] == rounds["all-gather", "tree"] == depth(size)
    assert rounds["broadcast", "tree"] == depth(size)
    assert rounds["neighbour-average", "gossip"] == min(size - 1, 2)
    power = 1 << size.bit_length() - 1
    assert rounds["all-reduce", "halving-doubling"] == 2 * depth(power) + (2 if size > power else 0)


@pytest.mark.parametrize(
    "nodes", [[0] * 6, [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 1], [2, 0, 1, 0, 2, 2], [0, 1, 0, 1, 0, 1]]
)
def test_hierarchical_is_proved_on_any_nodes(nodes: list[int]) -> None:
    assert prove(find_algorithm("hierarchical", nodes), 6).size == 6


def test_halving_of_eight_is_the_picture() -> None:
    steps = [(step.to, tuple(step.send), tuple(step.recv)) for step in halving_doubling(0, 8)]
    assert steps[:3] == [(1, (4, 5, 6, 7), (0, 1, 2, 3)), (2, (2, 3), (0, 1)), (4, (1,), (0,))]
    assert steps[3:] == [(4, (0,), (1,)), (2, (0, 1), (2, 3)), (1, (0, 1, 2, 3), (4, 5, 6, 7))]


def test_a_broadcast_of_nothing_is_found() -> None:
    steps = [(), (Step(to=2, send=range(3)),), (Step(from_=1, recv=range(3)),)]
    with pytest.raises(ScheduleError, match="rank 1, step 0 sends chunk 0 to rank 2 before anything is in it"):
        prove_steps(steps, BROADCAST)


def test_an_all_gather_that_adds_is_found() -> None:
    steps = [[replace(step, reduce=True) for step in ring_all_gather(rank, 3)] for rank in range(3)]
    with pytest.raises(ScheduleError, match="adds chunk 0 from rank 0 to nothing"):
        prove_steps(steps, ALL_GATHER)


def test_a_reduce_scatter_with_a_round_left_out_is_found() -> None:
    steps = [bruck_reduce_scatter(rank, 4)[1:] for rank in range(4)]
    with pytest.raises(ScheduleError, match="rank 0 ends without the part of ranks 1-2 in chunk 0"):
        prove_steps(steps, REDUCE_SCATTER)


def test_a_chunk_with_too_many_parts_is_found() -> None:
    one_way = COLLECTIVES["neighbour-average", "gossip"]
    steps = [one_way(rank, 5) * 2 for rank in range(5)]
    with pytest.raises(ScheduleError, match="more than 2 times"):
        prove_steps(steps, NEIGHBOUR_AVERAGE)
    pairs = [(Step(to=1 - rank, send=(0, 1), from_=1 - rank, recv=(0, 1), reduce=True),) for rank in range(2)]
    with pytest.raises(ScheduleError, match="with the part of rank 1 too often in chunk 0"):
        prove_steps(pairs, replace(ALL_REDUCE, ends=lambda rank, chunk, size: 1))


# Pairwise sums: proved for any matching, run on MPI with sends that wait for their receives, and cut where long.


class Synchronous(MPI.Intracomm):
    """A communicator whose messages leave only when their receives have been posted."""

    Isend = MPI.Intracomm.Issend


def partners_of(size: int, shift: int) -> list[int]:
    """Return a matching that pairs neighbours, or neighbours but one, and leaves some out."""
    partners = list(range(size))
    for rank in range(shift % 2, size - 1, 2):
        partners[rank], partners[rank + 1] = rank + 1, rank
    return partners


def pair_sum(partners: list[int], rank: int, chunk: int, size: int) -> int:
    """Return the parts that a rank ends with."""
    return part(rank) + (part(partners[rank]) if partners[rank] != rank else 0)


@given(st.permutations(range(9)), st.integers(1, 9), st.integers(0, 4))
def test_pairs_are_proved(order: list[int], size: int, pairs: int) -> None:
    """Any matching of any number of ranks; it takes one round."""
    ranks, partners = [rank for rank in order if rank < size], list(range(size))
    for one, other in list(zip(ranks[::2], ranks[1::2], strict=False))[:pairs]:
        partners[one], partners[other] = other, one
    contract = Contract("pair", lambda rank, chunk, size: part(rank), partial(pair_sum, partners))
    proof = prove_steps([pairwise(rank, size, partners[rank]) for rank in range(size)], contract)
    paired = sum(partner != rank for rank, partner in enumerate(partners))
    assert proof.messages == paired
    assert proof.rounds == min(paired, 1)


@pytest.mark.mpi
@pytest.mark.parametrize("n", [0, 5, 2**16 + 3])
@pytest.mark.parametrize("limit", [100, 2**30])
def test_pairs_are_summed(group: Group, n: int, limit: int) -> None:
    """Step after step with other partners, nobody waiting for those who are not concerned; the same bits in a pair."""
    comm = wrap(Synchronous(group.comm.mpi))
    right = []
    for step in range(3 if n < 10**4 or limit > 100 else 1):
        partner = partners_of(group.size, step)[group.rank]
        values = [np.random.default_rng([step, rank]).standard_normal(n) for rank in range(group.size)]
        array = values[group.rank].copy()
        Execution(pairwise(group.rank, group.size, partner), array, comm, 7, max_message_bytes=limit).run()
        wanted = values[group.rank] if partner == group.rank else values[group.rank] + values[partner]
        right.append(bool(np.array_equal(array, wanted)))
    assert group.gather(right) == [[True] * len(right)] * group.size
