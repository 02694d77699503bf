"""Pairwise sums: proved for any matching, run on MPI with sends that wait for their receives, and cut where long."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from nnmpi.comm.algorithms.pairwise import pairwise
from nnmpi.comm.collective import Contract, part
from nnmpi.comm.execution import Execution
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.world import wrap
from nnmpi.comm.prove import prove_steps


class Synchronous(MPI.Intracomm):
    """A communicator whose messages leave only when their receives have been posted."""

    Isend = MPI.Intracomm.Issend
    Send_init = MPI.Intracomm.Ssend_init


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
@pytest.mark.parametrize("n", [0, 1, 5, 2**16 + 3])
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
