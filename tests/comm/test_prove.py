"""Every collective is proved against its contract for many sizes, and the proof finds each kind of
planted fault.
"""

import re
from dataclasses import replace

import numpy as np
import pytest

from nnmpi.base.errors import ScheduleError
from nnmpi.comm.algorithms.bruck import bruck_reduce_scatter
from nnmpi.comm.algorithms.halving import halving_doubling
from nnmpi.comm.algorithms.registry import COLLECTIVES, find_collective
from nnmpi.comm.algorithms.ring import ring, ring_all_gather
from nnmpi.comm.algorithms.tree import star, tree
from nnmpi.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    NEIGHBOUR_AVERAGE,
    REDUCE_SCATTER,
    Step,
    runs,
)
from nnmpi.comm.prove import prove, prove_steps
from tests.harness.refusals import refuses, usage_error

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 32, 33)


EACH_KEY = pytest.mark.parametrize("key", COLLECTIVES, ids=" ".join)


@pytest.mark.parametrize("size", SIZES)
@EACH_KEY
def test_every_collective_is_proved_and_takes_the_rounds_of_its_formula(key, size):
    """Which is missing for some numbers of ranks alone."""
    proof, cost = prove(COLLECTIVES[key], size), COLLECTIVES[key].formula(size)
    assert proof.size == size
    assert cost is None or proof.rounds == cost[0]


@pytest.mark.parametrize(
    "nodes",
    [[0] * 6, [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 1], [2, 0, 1, 0, 2, 2], [0, 1, 0, 1, 0, 1]],
)
def test_hierarchical_is_proved_on_any_nodes(nodes):
    assert prove(find_collective("all-reduce", "hierarchical", nodes), 6).size == 6


def test_halving_of_eight_is_the_picture():
    steps = [(step.to, tuple(step.send), tuple(step.recv)) for step in halving_doubling(0, 8)]
    assert steps[:3] == [(1, (4, 5, 6, 7), (0, 1, 2, 3)), (2, (2, 3), (0, 1)), (4, (1,), (0,))]
    assert steps[3:] == [(4, (0,), (1,)), (2, (0, 1), (2, 3)), (1, (0, 1, 2, 3), (4, 5, 6, 7))]


# What a proof finds.


def test_tree_of_eight_is_the_picture():
    parents = {
        rank: step.to
        for rank in range(1, 8)
        for step in tree(rank, 8)
        if step.to is not None and step.to < rank
    }
    assert parents == {1: 0, 2: 0, 3: 2, 4: 0, 5: 4, 6: 4, 7: 6}


def test_ring_of_three_is_the_picture():
    sent = [[step.send[0] for step in ring(rank, 3)] for rank in range(3)]
    assert [list(column) for column in zip(*sent, strict=True)] == [
        [2, 0, 1],
        [1, 2, 0],
        [0, 1, 2],
        [2, 0, 1],
    ]


def test_neighbouring_chunks_are_one_message():
    assert runs((3, 0, 1)) == (range(3, 4), range(2))
    assert runs((1, 0)) == (range(1, 2), range(1))
    assert runs(()) == ()


def test_an_unknown_algorithm_is_refused_with_the_names():
    usage_error(
        "'rings'.*ring, tree, star.*auto, native, shared", find_collective, "all-reduce", "rings"
    )


# ---- planted faults: each one spoils a right algorithm in one place ----


def plan(of, size):
    return [list(of(rank, size)) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@EACH_KEY
def test_no_single_change_goes_unnoticed(key, size):
    """Every step of every rank is left out, its sum and its partners and chunks are changed, one at
    a time.
    """
    collective = COLLECTIVES[key]
    for rank in range(size):
        for index, step in enumerate(collective(rank, size)):
            changed = [[], [step, step]]
            if step.from_ is not None:
                changed.append([replace(step, reduce=not step.reduce)])
                changed.append([replace(step, from_=(step.from_ + 1) % size)])
                changed.append([replace(step, recv=(*step.recv[1:], (step.recv[-1] + 1) % size))])
            if step.to is not None:
                changed.append([replace(step, to=(step.to + 1) % size)])
            for instead in changed:
                steps = plan(collective, size)
                steps[rank][index : index + 1] = instead
                with pytest.raises(ScheduleError):
                    prove_steps(steps, collective.contract)


def without(steps, *places):
    """Return the steps without those of (rank, index)."""
    return [
        [step for index, step in enumerate(local) if (rank, index) not in places]
        for rank, local in enumerate(steps)
    ]


def changed(steps, rank, index, **change):
    steps[rank][index] = replace(steps[rank][index], **change)
    return steps


def doubled(steps, *places):
    for rank, index in places:
        steps[rank].insert(index, steps[rank][index])
    return steps


def blocking(rank, size):
    """It goes well as long as MPI buffers the messages, that is, in every small test, and hangs
    with long ones.
    """
    halves = []
    for step in ring(rank, size):
        halves.append(Step(to=step.to, send=step.send))
        halves.append(Step(from_=step.from_, recv=step.recv, reduce=step.reduce))
    return halves


def both(reduce):
    return [
        [Step(to=1 - r, send=(0, 1), from_=1 - r, recv=(0, 1), reduce=reduce)] for r in range(2)
    ]


GOSSIP = COLLECTIVES["neighbour-average", "gossip"]
ADDING = [[replace(step, reduce=True) for step in ring_all_gather(rank, 3)] for rank in range(3)]
CIRCLE = [
    [Step(from_=1 - r, recv=(0, 1), reduce=True), Step(to=1 - r, send=(0, 1))] for r in range(2)
]
HANDED_ON = [[], [Step(to=2, send=range(3))], [Step(from_=1, recv=range(3))]]
LEFT_OUT = "rank 0 ends without the part of rank 1 in chunk 0"
BOTH_WAIT = "deadlock: rank 0, step 0 waits for chunks [0, 1] from rank 1, rank 1"
ALL_SEND = (
    "deadlock: rank 0, step 0 waits to send chunks [2] to rank 1, rank 1, step 0 waits to send"
    " chunks [0] to rank 2, rank 2, step 0 waits to send chunks [1] to rank 0"
)


@pytest.mark.parametrize(
    "steps, contract, sentence",
    [
        (HANDED_ON, BROADCAST, "rank 1, step 0 sends chunk 0 to rank 2 before it has any data"),
        (ADDING, ALL_GATHER, "adds chunk 0 from rank 0, but has no data in it yet"),
        (
            [local[1:] for local in plan(bruck_reduce_scatter, 4)],
            REDUCE_SCATTER,
            "rank 0 ends without the part of ranks 1-2 in chunk 0",
        ),
        (
            [[Step(from_=1, recv=(0, 1), reduce=True)], [Step(to=0, send=(0, 1))]],
            ALL_REDUCE,
            "rank 1 ends without the part of rank 0 in chunk 0",
        ),
        ([local * 2 for local in plan(GOSSIP, 5)], NEIGHBOUR_AVERAGE, "more than 2 times"),
        (
            both(reduce=True),
            replace(ALL_REDUCE, ends=lambda rank, chunk, size: 1),
            "with the part of rank 1 too often in chunk 0",
        ),
        (  # worker 2 never sends its part
            without(plan(star, 4), (2, 0)),
            ALL_REDUCE,
            "unmatched message: rank 0, step 1 waits for chunks [0, 1, 2, 3] from rank 2",
        ),
        (  # the server does not answer rank 2
            without(plan(star, 3), (0, 3)),
            ALL_REDUCE,
            "unmatched message: rank 2, step 1 waits for chunks [0, 1, 2] from rank 0",
        ),
        (  # rank 2 does not listen to the answer
            without(plan(star, 3), (2, 1)),
            ALL_REDUCE,
            "unmatched message: rank 0, step 3 waits to send chunks [0, 1, 2] to rank 2",
        ),
        # worker 1 is not asked
        (
            without(plan(star, 3), (0, 0), (1, 0)),
            ALL_REDUCE,
            f"{LEFT_OUT} (last written in step 0)",
        ),
        ([[], []], ALL_REDUCE, f"{LEFT_OUT} (never written)"),
        (  # worker 1 is asked twice
            doubled(plan(star, 3), (0, 0), (1, 0)),
            ALL_REDUCE,
            "rank 0, step 1 adds chunk 0 from rank 1 and counts rank 1 twice",
        ),
        (
            changed(plan(ring, 4), 0, 0, to=2),
            ALL_REDUCE,
            "unmatched message: rank 0, step 0 waits to send chunks [3] to rank 2",
        ),
        (
            changed(plan(tree, 2), 1, 1, reduce=True),
            ALL_REDUCE,
            "rank 1, step 1 adds chunk 0 from rank 0 and counts rank 1 twice",
        ),
        (
            changed(plan(ring, 3), 1, 0, reduce=False),
            ALL_REDUCE,
            "rank 0 ends without the part of rank 1 in chunk 2",
        ),
        (
            changed(plan(ring, 4), 1, 2, send=(0,)),
            ALL_REDUCE,
            "rank 1, step 2 sends chunks [0] to rank 2, step 2, which expects chunks [2]",
        ),
        (  # Python's numbers, though NumPy's were given
            changed(plan(ring, 4), 1, 2, send=np.arange(1)),
            ALL_REDUCE,
            "rank 1, step 2 sends chunks [0] to rank 2, step 2, which expects chunks [2]",
        ),
        (plan(blocking, 3), ALL_REDUCE, ALL_SEND),
        (CIRCLE, ALL_REDUCE, BOTH_WAIT),
        (
            both(reduce=False),
            ALL_REDUCE,
            "rank 1, step 0 sends chunk 0 to rank 0 while rank 0 overwrites it",
        ),
        (
            [[Step(to=2, send=(0,))], []],
            ALL_REDUCE,
            "rank 0, step 0 talks to rank 2, but the ranks are 0..1",
        ),
        ([[Step(from_=0, recv=(0,))], []], ALL_REDUCE, "rank 0, step 0 talks to itself"),
        (
            [[Step(to=1, send=(2,))], []],
            ALL_REDUCE,
            "rank 0, step 0 names chunk 2, but 2 ranks have the chunks 0..1",
        ),
    ],
)
def test_a_fault_is_named(steps, contract, sentence):
    refuses(ScheduleError, re.escape(sentence), prove_steps, steps, contract)


def test_adding_to_a_chunk_that_is_sent_is_allowed():
    """What is to be added waits in scratch until the send is over: two ranks can exchange and add
    in one step.
    """
    assert prove_steps(both(reduce=True)).rounds == 1


def test_a_step_without_meaning_cannot_be_made():
    refuses(ScheduleError, "send has 1 and", Step, to=1)
    refuses(ScheduleError, r"recv has None and \(0,\)", Step, recv=(0,))
    refuses(ScheduleError, "names a chunk twice", Step, to=1, send=(0, 0))
    for chunks in ((0.0,), ("01",), 1.5, (None,)):
        refuses(ScheduleError, "give one rank, and a list of chunks", Step, to=1, send=chunks)


def test_no_ranks_at_all_cannot_be_proved():
    refuses(ScheduleError, "0 ranks", prove, ring, 0)
