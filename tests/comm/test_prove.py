"""Every collective is proved against its contract for many sizes, and the proof finds each kind of planted fault."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

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
from nnmpi.errors import ScheduleError, UsageError

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 32, 33)


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
    assert rounds["all-reduce", "ring"] == rounds["all-reduce", "ps"] == 2 * (size - 1)
    assert rounds["all-reduce", "tree"] == 2 * depth(size)
    assert rounds["neighbour-average", "gossip"] == min(size - 1, 2)
    power = 1 << size.bit_length() - 1
    assert rounds["all-reduce", "halving-doubling"] == 2 * depth(power) + (2 if size > power else 0)


@pytest.mark.parametrize(
    "nodes", [[0] * 6, [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 1], [2, 0, 1, 0, 2, 2], [0, 1, 0, 1, 0, 1]]
)
def test_hierarchical_is_proved_on_any_nodes(nodes: list[int]) -> None:
    assert prove(find_collective("all-reduce", "hierarchical", nodes), 6).size == 6


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


# What a proof finds.


def test_tree_of_eight_is_the_picture() -> None:
    parents = {
        rank: step.to for rank in range(1, 8) for step in tree(rank, 8) if step.to is not None and step.to < rank
    }
    assert parents == {1: 0, 2: 0, 3: 2, 4: 0, 5: 4, 6: 4, 7: 6}


def test_ring_of_three_is_the_picture() -> None:
    sent = [[step.send[0] for step in ring(rank, 3)] for rank in range(3)]
    assert [list(column) for column in zip(*sent, strict=True)] == [[2, 0, 1], [1, 2, 0], [0, 1, 2], [2, 0, 1]]


def test_neighbouring_chunks_are_one_message() -> None:
    assert runs((3, 0, 1)) == (range(3, 4), range(2))
    assert runs((1, 0)) == (range(1, 2), range(1))
    assert runs(()) == ()


def test_an_unknown_algorithm_is_refused_with_the_names() -> None:
    with pytest.raises(UsageError, match="'rings'.*ring, tree, ps.*auto, native, shared"):
        find_collective("all-reduce", "rings")


# ---- planted faults: each one spoils a right algorithm in one place ----

Plan = list[list[Step]]


def plan(of: Callable[[int, int], tuple[Step, ...]], size: int) -> Plan:
    return [list(of(rank, size)) for rank in range(size)]


def test_a_dropped_step_is_an_unmatched_message() -> None:
    steps = plan(star, 4)
    del steps[2][0]  # worker 2 never sends its part
    with pytest.raises(
        ScheduleError, match=r"unmatched message: rank 0, step 1 waits for chunks \[0, 1, 2, 3\] from rank 2"
    ):
        prove_steps(steps)


def test_a_message_that_nobody_receives_is_named() -> None:
    steps = plan(star, 3)
    del steps[0][-1]  # the server does not answer rank 2
    with pytest.raises(ScheduleError, match=r"unmatched message: rank 2, step 1 waits for chunks .* from rank 0"):
        prove_steps(steps)
    steps = plan(star, 3)
    del steps[2][-1]  # rank 2 does not listen to the answer
    with pytest.raises(ScheduleError, match=r"unmatched message: rank 0, step 3 waits to send chunks .* to rank 2"):
        prove_steps(steps)


def test_a_step_dropped_on_both_sides_leaves_a_part_out() -> None:
    steps = plan(star, 3)
    del steps[0][0], steps[1][0]  # worker 1 is not asked
    with pytest.raises(
        ScheduleError, match=r"rank 0 ends without the part of rank 1 in chunk 0 \(last written in step 0\)"
    ):
        prove_steps(steps)
    with pytest.raises(ScheduleError, match=r"rank 0 ends without the part of rank 1 in chunk 0 \(never written\)"):
        prove_steps([[], []])


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("key", COLLECTIVES, ids=" ".join)
def test_no_single_change_goes_unnoticed(key: tuple[str, str], size: int) -> None:
    """Every step of every rank is left out, its sum and its partners and chunks are changed, one at a time."""
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


def test_a_doubled_reduction_names_rank_step_chunk() -> None:
    size = 3
    steps = plan(star, size)
    steps[0].insert(1, steps[0][0])  # worker 1 is asked twice
    steps[1].insert(0, steps[1][0])
    with pytest.raises(ScheduleError, match="rank 0, step 1 adds chunk 0 from rank 1 and counts rank 1 twice"):
        prove_steps(steps)


@pytest.mark.parametrize(
    ("of", "size", "rank", "index", "change", "sentence"),
    [
        (ring, 4, 0, 0, {"to": 2}, "unmatched message: rank 0, step 0 waits to send chunks [3] to rank 2"),
        (tree, 2, 1, 1, {"reduce": True}, "rank 1, step 1 adds chunk 0 from rank 0 and counts rank 1 twice"),
        (ring, 3, 1, 0, {"reduce": False}, "rank 0 ends without the part of rank 1 in chunk 2"),
        (ring, 4, 1, 2, {"send": (0,)}, "rank 1, step 2 sends chunks [0] to rank 2, step 2, which expects chunks [2]"),
    ],
    ids=["swapped receiver", "adding for replacing", "replacing for adding", "wrong chunk"],
)
def test_a_changed_step_is_named(of: Any, size: int, rank: int, index: int, change: Any, sentence: str) -> None:
    steps = plan(of, size)
    steps[rank][index] = replace(steps[rank][index], **change)
    with pytest.raises(ScheduleError, match=re.escape(sentence)):
        prove_steps(steps)


def test_ranks_that_all_send_before_they_receive_are_a_deadlock() -> None:
    """It goes well as long as MPI buffers the messages, that is, in every small test, and hangs with long ones."""

    def blocking(rank: int, size: int) -> tuple[Step, ...]:
        halves = []
        for step in ring(rank, size):
            halves.append(Step(to=step.to, send=step.send))
            halves.append(Step(from_=step.from_, recv=step.recv, reduce=step.reduce))
        return tuple(halves)

    expected = (
        r"deadlock: rank 0, step 0 waits to send chunks \[2\] to rank 1, "
        r"rank 1, step 0 waits to send chunks \[0\] to rank 2, rank 2, step 0 waits to send chunks \[1\] to rank 0"
    )
    with pytest.raises(ScheduleError, match=expected):
        prove(blocking, 3)


def test_waiting_in_a_circle_for_receives_is_a_deadlock() -> None:
    first = [Step(from_=1, recv=(0, 1), reduce=True), Step(to=1, send=(0, 1))]
    second = [Step(from_=0, recv=(0, 1), reduce=True), Step(to=0, send=(0, 1))]
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0, step 0 waits for chunks \[0, 1\] from rank 1, rank 1"):
        prove_steps([first, second])


def test_a_chunk_overwritten_while_it_is_sent_is_refused() -> None:
    swap = [[Step(to=1 - rank, send=(0, 1), from_=1 - rank, recv=(0, 1))] for rank in range(2)]
    with pytest.raises(ScheduleError, match="rank 0, step 0 sends chunk 0 to rank 1 while rank 1 overwrites it"):
        prove_steps(swap)


def test_adding_to_a_chunk_that_is_sent_is_allowed() -> None:
    """What is to be added waits in scratch until the send is over: two ranks can exchange and add in one step."""
    both = [[Step(to=1 - rank, send=(0, 1), from_=1 - rank, recv=(0, 1), reduce=True)] for rank in range(2)]
    assert prove_steps(both).rounds == 1


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (Step(to=2, send=(0,)), "rank 0, step 0 talks to rank 2, which is not another one of the 2 ranks"),
        (Step(from_=0, recv=(0,)), "rank 0, step 0 talks to rank 0, which is not another one"),
        (Step(to=1, send=(2,)), r"rank 0, step 0 names chunk 2, but 2 ranks have the chunks 0\.\.1"),
    ],
)
def test_partners_and_chunks_that_do_not_exist_are_refused(step: Step, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        prove_steps([[step], []])


def test_a_step_without_meaning_cannot_be_made() -> None:
    with pytest.raises(ScheduleError, match="send has 1 and"):
        Step(to=1)
    with pytest.raises(ScheduleError, match=r"recv has None and \(0,\)"):
        Step(recv=(0,))
    with pytest.raises(ScheduleError, match="names a chunk twice"):
        Step(to=1, send=(0, 0))


def test_no_ranks_at_all_cannot_be_proved() -> None:
    with pytest.raises(ScheduleError, match="0 ranks"):
        prove(ring, 0)
