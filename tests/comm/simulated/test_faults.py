"""Mistakes in communication: each is named, with its ranks and lines, at once and for every seed; none hangs."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.errors import CommError
from nnmpi.schedule.lower import add_transfers, fuse
from nnmpi.schedule.schedule import SENDS, TRANSFERS, Kind, Schedule, parts
from nnmpi.schedule.schedules import make

LONG = 100_000  # bytes: more than what leaves at once
HERE = Path(__file__).name


def wrong_tag(comm: Any) -> None:
    buffer = np.zeros(4)
    comm.wait_all(
        [comm.isend(buffer, 1, 7)] if comm.rank == 0 else [comm.irecv(buffer, 0, 8)] if comm.rank == 1 else []
    )


def wrong_partner(comm: Any) -> None:
    buffer = np.zeros(4)
    comm.wait_all(
        [comm.isend(buffer, 1, 7)] if comm.rank == 0 else [comm.irecv(buffer, 2, 7)] if comm.rank == 1 else []
    )


def other_length(comm: Any) -> None:
    comm.wait_all([comm.isend(np.zeros(4), 1, 7)] if comm.rank == 0 else [])
    comm.wait_all([comm.irecv(np.zeros(3), 0, 7)] if comm.rank == 1 else [])


def other_length_of_a_long_message(comm: Any) -> None:
    comm.wait_all([comm.isend(np.zeros(LONG), 1, 7)] if comm.rank == 0 else [])
    comm.wait_all([comm.irecv(np.zeros(LONG + 1), 0, 7)] if comm.rank == 1 else [])


def missing_receive(comm: Any) -> None:
    comm.wait_all([comm.isend(np.zeros(4), 1, 7)] if comm.rank == 0 else [])


def missing_send(comm: Any) -> None:
    comm.wait_all([comm.irecv(np.zeros(4), 0, 7)] if comm.rank == 1 else [])


def missing_wait_of_a_send(comm: Any) -> None:
    if comm.rank == 0:
        comm.isend(np.zeros(4), 1, 7)
    comm.wait_all([comm.irecv(np.zeros(4), 0, 7)] if comm.rank == 1 else [])


def missing_wait_of_a_receive(comm: Any) -> None:
    comm.wait_all([comm.isend(np.zeros(4), 1, 7)] if comm.rank == 0 else [])
    if comm.rank == 1:
        comm.irecv(np.zeros(4), 0, 7)


def missing_wait_of_a_collective(comm: Any) -> None:
    comm.iallreduce(np.zeros(4))


def a_receive_into_a_buffer_in_use(comm: Any) -> None:
    buffer = np.zeros(8)
    if comm.rank == 0:
        comm.wait_all([comm.irecv(buffer[:5], 1, 1), comm.irecv(buffer[4:], 1, 2)])


def a_receive_into_what_is_sent(comm: Any) -> None:
    buffer = np.zeros(8)
    if comm.rank == 0:
        comm.wait_all([comm.isend(buffer, 1, 1), comm.irecv(buffer[4:], 1, 2)])


def a_change_of_what_is_sent(comm: Any) -> None:
    buffer = np.zeros(LONG)
    if comm.rank == 0:
        request = comm.isend(buffer, 1, 1)
        buffer[LONG // 2] = 1
        comm.wait_all([request])
    if comm.rank == 1:
        comm.wait_all([comm.irecv(buffer, 0, 1)])


def a_sum_of_other_lengths(comm: Any) -> None:
    comm.allreduce(np.zeros(4 + (comm.rank == 2)))


def a_sum_of_other_numbers(comm: Any) -> None:
    comm.allreduce(np.zeros(4, np.float32 if comm.rank == 1 else np.float64))


def another_order_of_collectives(comm: Any) -> None:
    if comm.rank == 0:
        comm.barrier()
        comm.allreduce(np.zeros(4))
    else:
        comm.allreduce(np.zeros(4))
        comm.barrier()


def another_root(comm: Any) -> None:
    comm.broadcast(np.zeros(4), comm.rank // 2)


def a_started_collective_that_others_wait_in(comm: Any) -> None:
    if comm.rank == 0:
        comm.wait_all([comm.iallreduce(np.zeros(4))])
    else:
        comm.allreduce(np.zeros(4))


def a_rank_that_leaves_early(comm: Any) -> None:
    comm.barrier()
    if comm.rank != 1:
        comm.barrier()


def other_counts(comm: Any) -> None:
    counts = [1, 2, 3] if comm.rank else [1, 2, 4]
    comm.allgatherv(np.zeros(counts[comm.rank]), np.zeros(sum(counts)), counts)


def counts_that_are_not_ones_own(comm: Any) -> None:
    comm.allgatherv(np.zeros(5), np.zeros(6), [1, 2, 3])


def all_to_all_without_agreement(comm: Any) -> None:
    came = [1, 1, 2 if comm.rank == 0 else 1]
    comm.alltoallv(np.zeros(3, np.uint8), [1, 1, 1], np.zeros(sum(came), np.uint8), came)


def sends_that_wait_for_one_another(comm: Any) -> None:
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer = np.zeros(LONG)
    comm.wait_all([comm.isend(buffer, ahead, 0)])
    comm.wait_all([comm.irecv(buffer, behind, 0)])


def receives_that_wait_for_one_another(comm: Any) -> None:
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.wait_all([comm.irecv(np.zeros(4), behind, 0)])
    comm.wait_all([comm.isend(np.zeros(4), ahead, 0)])


def a_loop_that_looks_for_ever(comm: Any) -> None:
    if comm.rank == 0:
        request = comm.irecv(np.zeros(4), 1, 0)
        while not comm.test_all([request]):
            pass


def a_wait_for_what_never_happens(comm: Any) -> None:
    if comm.rank == 0:
        comm.world.wait_until(lambda: False)


LENGTHS = r"rank 0 sends \d+ bytes .* rank 1 receives into \d+ "
DIFFERENT = r"the ranks are in different collectives: rank \d in .*, rank \d in "
FAULTS: dict[Callable[[Any], None], str] = {
    wrong_tag: r"deadlock|nobody received rank 0's send to rank 1 with tag 7",
    wrong_partner: r"deadlock: .*rank 1 waits for receive from rank 2 with tag 7",
    other_length: LENGTHS,
    other_length_of_a_long_message: LENGTHS,
    missing_receive: r"nobody received rank 0's send to rank 1 with tag 7|deadlock: .*rank 0 waits for send to rank 1",
    missing_send: r"deadlock: .*rank 1 waits for receive from rank 0 with tag 7, .*ended: rank 0, rank 2",
    missing_wait_of_a_send: r"rank 0 never waited for its send to rank 1 with tag 7",
    missing_wait_of_a_receive: r"rank 1 never waited for its receive from rank 0 with tag 7",
    missing_wait_of_a_collective: r"rank 2 never waited for its iallreduce",
    a_receive_into_a_buffer_in_use: r"rank 0 gives its receive .* memory .* that its receive .* still writes",
    a_receive_into_what_is_sent: r"rank 0 gives its receive .* memory .* that its send .* still reads",
    a_change_of_what_is_sent: r"rank 0 changed an array while its send to rank 1 with tag 1 read it",
    a_sum_of_other_lengths: DIFFERENT + r"allreduce\([45], float64\)",
    a_sum_of_other_numbers: DIFFERENT + r"allreduce\(4, float\d\d\)",
    another_order_of_collectives: DIFFERENT,
    another_root: DIFFERENT + r"broadcast\(32, root \d\)",
    a_started_collective_that_others_wait_in: DIFFERENT,
    a_rank_that_leaves_early: r"deadlock: .*rank 0 waits for barrier .*ended: rank 1",
    other_counts: DIFFERENT + r"allgatherv\(\(1, 2, [34]\), float64\)",
    counts_that_are_not_ones_own: r"rank \d brings 5 elements to allgatherv, but its count there is \d",
    all_to_all_without_agreement: r"alltoallv: rank 2 of the communicator sends 1 elements to 0, which expects 2",
    sends_that_wait_for_one_another: r"deadlock: .*rank 0 -> rank 1 -> rank 2 -> rank 0 wait for one another",
    receives_that_wait_for_one_another: r"deadlock: .*rank 0 -> rank 2 -> rank 1 -> rank 0 wait for one another",
    a_loop_that_looks_for_ever: r"deadlock: .*rank 0 waits for a loop that looks for messages",
    a_wait_for_what_never_happens: r"deadlock: .*rank 0 waits for something to become complete",
}


@pytest.mark.parametrize("cpu_factor", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_named(fault: Callable[[Any], None], cpu_factor: float) -> None:
    """Whatever the seed, and with the line of this file in which it was made."""
    for seed in range(3):
        with pytest.raises(CommError) as raised:
            simulate(lambda group: fault(group.comm), ranks=3, seed=seed, cpu_factor=cpu_factor)
        text = str(raised.value)
        assert re.search(FAULTS[fault], text, re.DOTALL), text
        if fault is not all_to_all_without_agreement:  # seen when all have come, by nobody in particular
            assert re.search(rf"{HERE}:\d+", text), text


def test_a_deadlock_says_in_which_step_of_training_each_rank_is() -> None:
    def main(group: Group) -> None:
        group.comm.world.step = 40 + group.rank
        if group.rank:
            group.barrier()

    with pytest.raises(CommError, match=r"rank 1 waits for barrier .* and step 41\n") as raised:
        simulate(main, ranks=3)
    assert "ended: rank 0" in str(raised.value)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_1f1b_with_plain_blocking_sends_waits_in_a_circle(ranks: int) -> None:
    """Neighbours send to each other before either receives; with a send and a receive as one, all goes through."""
    alone = add_transfers(make("1f1b", ranks, 2 * ranks))

    def play(schedule: Schedule, group: Group) -> None:
        data = np.zeros(LONG)
        for item in schedule.programs[group.rank]:
            requests = []
            for one in parts(item):
                if one.kind in TRANSFERS:
                    to = one.stage + (1 if one.kind in (Kind.SEND_ACT, Kind.RECV_GRAD) else -1)
                    tag = int(one.kind in (Kind.SEND_GRAD, Kind.RECV_GRAD))
                    start = group.comm.isend if one.kind in SENDS else group.comm.irecv
                    requests.append(start(data.copy(), to, tag))
            group.comm.wait_all(requests)

    simulate(partial(play, fuse(alone)), ranks)
    with pytest.raises(
        CommError, match=r"rank (\d+) -> rank (\d+) -> rank \1 wait for one another in a circle"
    ) as raised:
        simulate(partial(play, alone), ranks)
    assert re.search(rf"rank \d waits for send to rank \d with tag [01].*\n +at .*{HERE}:\d+", str(raised.value))


def test_what_a_rank_raises_comes_out_with_its_rank() -> None:
    """With its own traceback, while the others are broken off where they wait."""

    def main(group: Group) -> None:
        if group.rank == 2:
            raise ValueError("boom")
        group.barrier()

    with pytest.raises(ValueError, match="boom") as raised:
        simulate(main, ranks=4, seed=3)
    assert raised.value.__notes__ == ["(on rank 2 of 4 simulated ones, with seed 3)"]
    assert raised.traceback[-1].frame.code.name == "main"
