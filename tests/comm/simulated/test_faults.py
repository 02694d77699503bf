"""Mistakes in communication: each is named, with its ranks and lines, at once and for every seed;
none hangs.
"""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from nnmpi import simulate
from nnmpi.base.errors import CommError
from nnmpi.comm.simulated import scheduler
from nnmpi.schedule.lower import add_transfers, fuse
from nnmpi.schedule.schedule import SENDS, TRANSFERS, Kind, parts
from nnmpi.schedule.schedules import make

LONG = 100_000  # bytes: more than what leaves at once
HERE = Path(__file__).name


SHORT, LENGTHS = 4, r"rank 0 sends \d+ bytes .* rank 1 receives into a buffer of \d+ "
DIFFERENT = r"the ranks are in different collectives: rank \d in .*, rank \d in "


def two(first, second):
    """Return what ranks 0 and 1 start, each for itself, and wait for."""

    def fault(comm):
        local = {0: first, 1: second}.get(comm.rank)
        comm.wait_all([local(comm)] if local is not None else [])

    return fault


def send(length=SHORT, tag=7):
    return lambda comm: comm.isend(np.zeros(length), 1, tag)


def receive(length=SHORT, tag=7, source=0):
    return lambda comm: comm.irecv(np.zeros(length), source, tag)


def missing_wait_of_a_send(comm):
    if comm.rank == 0:
        comm.isend(np.zeros(4), 1, 7)
    comm.wait_all([comm.irecv(np.zeros(4), 0, 7)] if comm.rank == 1 else [])


def missing_wait_of_a_receive(comm):
    comm.wait_all([comm.isend(np.zeros(4), 1, 7)] if comm.rank == 0 else [])
    if comm.rank == 1:
        comm.irecv(np.zeros(4), 0, 7)


def a_receive_into_a_buffer_in_use(comm):
    buffer = np.zeros(8)
    if comm.rank == 0:
        comm.wait_all([comm.irecv(buffer[:5], 1, 1), comm.irecv(buffer[4:], 1, 2)])


def a_receive_into_what_is_sent(comm):
    buffer = np.zeros(8)
    if comm.rank == 0:
        comm.wait_all([comm.isend(buffer, 1, 1), comm.irecv(buffer[4:], 1, 2)])


def a_send_of_what_is_received(comm):
    buffer = np.zeros(8)
    if comm.rank == 0:
        comm.wait_all([comm.irecv(buffer, 1, 2), comm.isend(buffer[4:], 1, 1)])


def a_change_of_what_is_sent(comm):
    buffer = np.zeros(LONG)
    if comm.rank == 0:
        request = comm.isend(buffer, 1, 1)
        buffer[LONG // 2] = 1
        comm.wait_all([request])
    if comm.rank == 1:
        comm.wait_all([comm.irecv(buffer, 0, 1)])


def another_order_of_collectives(comm):
    calls = [comm.barrier, lambda: comm.allreduce(np.zeros(4))]
    for call in calls if comm.rank == 0 else reversed(calls):
        call()


def a_started_collective_that_others_wait_in(comm):
    if comm.rank == 0:
        comm.wait_all([comm.iallreduce(np.zeros(4))])
    else:
        comm.allreduce(np.zeros(4))


def a_rank_that_leaves_early(comm):
    comm.barrier()
    if comm.rank != 1:
        comm.barrier()


def other_counts(comm):
    counts = [1, 2, 3] if comm.rank else [1, 2, 4]
    comm.allgatherv(np.zeros(counts[comm.rank]), np.zeros(sum(counts)), counts)


def around(sends_first, length):
    """Return what waits in a circle: each rank for the other end of its first message."""

    def fault(comm):
        ahead, behind, buffer = (
            (comm.rank + 1) % comm.size,
            (comm.rank - 1) % comm.size,
            np.zeros(length),
        )
        calls = [lambda: comm.isend(buffer, ahead, 0), lambda: comm.irecv(buffer, behind, 0)]
        for call in calls if sends_first else reversed(calls):
            comm.wait_all([call()])

    return fault


def a_loop_that_looks_for_ever(comm):
    if comm.rank == 0:
        request = comm.irecv(np.zeros(4), 1, 0)
        while not comm.test_all([request]):
            pass


def loops_that_look_for_one_another(comm):
    request = comm.irecv(np.zeros(4), (comm.rank + 1) % comm.size, 0)
    while not comm.test_all([request]):
        pass


FAULTS = {
    "wrong tag": (
        two(send(), receive(tag=8)),
        r"deadlock|nobody received rank 0's send to rank 1 with tag 7",
    ),
    "wrong partner": (
        two(send(), receive(source=2)),
        r"deadlock: .*rank 1 waits for receive from rank 2 with tag 7",
    ),
    "other length": (two(send(), receive(SHORT - 1)), LENGTHS),
    "other length of a long message": (two(send(LONG), receive(LONG + 1)), LENGTHS),
    "missing receive": (
        two(send(), None),
        (
            r"nobody received rank 0's send to rank 1 with tag 7|deadlock: .*rank 0 waits for send"
            r" to rank 1"
        ),
    ),
    "missing send": (
        two(None, receive()),
        r"deadlock: .*rank 1 waits for receive from rank 0 with tag 7, .*ended: ranks 0, 2",
    ),
    "missing wait of a send": (
        missing_wait_of_a_send,
        r"rank 0 never waited for its send to rank 1 with tag 7",
    ),
    "missing wait of a receive": (
        missing_wait_of_a_receive,
        r"rank 1 never waited for its receive from rank 0 with tag 7",
    ),
    "missing wait of a collective": (
        lambda comm: comm.iallreduce(np.zeros(4)),
        r"rank 2 never waited for its iallreduce",
    ),
    "a receive into a buffer in use": (
        a_receive_into_a_buffer_in_use,
        r"rank 0 gives its receive .* memory .* that its receive .* still writes",
    ),
    "a receive into what is sent": (
        a_receive_into_what_is_sent,
        r"rank 0 gives its receive .* memory .* that its send .* still reads",
    ),
    "a send of what is received": (
        a_send_of_what_is_received,
        r"rank 0 gives its send .* memory .* that its receive .* still writes",
    ),
    "a change of what is sent": (
        a_change_of_what_is_sent,
        r"rank 0 changed an array while its send to rank 1 with tag 1 read it",
    ),
    "a sum of other lengths": (
        lambda comm: comm.allreduce(np.zeros(4 + (comm.rank == 2))),
        DIFFERENT + r"allreduce\([45], float64\)",
    ),
    "a sum of other numbers": (
        lambda comm: comm.allreduce(np.zeros(4, np.float32 if comm.rank == 1 else np.float64)),
        DIFFERENT + r"allreduce\(4, float\d\d\)",
    ),
    "another order of collectives": (another_order_of_collectives, DIFFERENT),
    "another root": (
        lambda comm: comm.broadcast(np.zeros(4), comm.rank // 2),
        DIFFERENT + r"broadcast\(32, root \d\)",
    ),
    "a started collective that others wait in": (
        a_started_collective_that_others_wait_in,
        DIFFERENT,
    ),
    "a rank that leaves early": (
        a_rank_that_leaves_early,
        r"deadlock: .*rank 0 waits for barrier .collective 2 of the communicator of all ranks"
        r".*ended: rank 1",
    ),
    "other counts": (other_counts, DIFFERENT + r"allgatherv\(\(1, 2, [34]\), float64\)"),
    "counts that are not one's own": (
        lambda comm: comm.allgatherv(np.zeros(5), np.zeros(6), [1, 2, 3]),
        r"rank \d passes 5 elements to allgatherv, but its count there is \d",
    ),
    "sends that wait for one another": (
        around(True, LONG),
        r"deadlock: .*rank 0 -> rank 1 -> rank 2 -> rank 0 wait for one another",
    ),
    "receives that wait for one another": (
        around(False, SHORT),
        r"deadlock: .*rank 0 -> rank 2 -> rank 1 -> rank 0 wait for one another",
    ),
    "a loop that looks for ever": (
        a_loop_that_looks_for_ever,
        r"deadlock: .*rank 0 waits for receive from rank 1 with tag 0, polling",
    ),
    "loops that look for one another": (
        loops_that_look_for_one_another,
        r"deadlock: .*(rank \d -> ){3}.*rank 0 waits for receive from rank 1 with tag 0, polling",
    ),
    "a wait for what never happens": (
        lambda comm: comm.rank or comm.world.wait_until(lambda: False),
        r"deadlock: .*rank 0 waits for something to become complete",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_named(fault, monkeypatch):
    """Whatever the seed, by time or drawn, and with the line of this file in which it was made."""
    monkeypatch.setattr(scheduler, "FRUITLESS_POLLS", 2000)
    work, words = FAULTS[fault]
    for seed in range(4):
        with pytest.raises(CommError) as raised:
            simulate(lambda group: work(group.comm), ranks=3, seed=seed, cpu_factor=seed % 2)
        text = str(raised.value)
        assert re.search(words, text, re.DOTALL), text
        assert re.search(rf"{HERE}:\d+", text), text


@pytest.mark.parametrize("waits", [True, False])
def test_what_fails_when_all_have_come_ends_the_simulation(waits):
    """Even where no rank waits for it any more: then nobody else would end."""

    def main(group):
        request = group.comm.ireduce_scatter(np.zeros(6), np.zeros(3), [2, 2, 2])
        group.comm.wait_all([request] if waits else [])

    with pytest.raises(ValueError, match="could not broadcast"):
        simulate(main, 3, check=False)


def test_a_deadlock_says_in_which_step_of_training_each_rank_is():
    def main(group):
        group.comm.world.step = 40 + group.rank
        if group.rank:
            group.barrier()

    with pytest.raises(CommError, match=r"rank 1 waits for barrier .*, in step 41\n") as raised:
        simulate(main, ranks=3)
    assert "ended: rank 0" in str(raised.value)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_1f1b_with_plain_blocking_sends_waits_in_a_circle(ranks):
    """Neighbours send to each other before either receives; with a send and a receive as one, all
    goes through.
    """
    alone = add_transfers(make("1f1b", ranks, 2 * ranks))

    def play(schedule, group):
        data = np.zeros(LONG)
        for item in schedule.programs[group.rank]:
            requests = []
            for element in parts(item):
                if element.kind in TRANSFERS:
                    to = element.stage + (
                        1 if element.kind in (Kind.SEND_ACT, Kind.RECV_GRAD) else -1
                    )
                    tag = int(element.kind in (Kind.SEND_GRAD, Kind.RECV_GRAD))
                    start = group.comm.isend if element.kind in SENDS else group.comm.irecv
                    requests.append(start(data.copy(), to, tag))
            group.comm.wait_all(requests)

    simulate(partial(play, fuse(alone)), ranks)
    with pytest.raises(
        CommError, match=r"rank (\d+) -> rank (\d+) -> rank \1 wait for one another in a circle"
    ) as raised:
        simulate(partial(play, alone), ranks)
    assert re.search(
        rf"rank \d waits for send to rank \d with tag [01].*\n +at .*{HERE}:\d+", str(raised.value)
    )


def test_what_a_rank_raises_comes_out_with_its_rank():
    """With its own traceback, while the others are broken off where they wait."""

    def main(group):
        if group.rank == 2:
            raise ValueError("boom")
        group.barrier()

    with pytest.raises(ValueError, match="boom") as raised:
        simulate(main, ranks=4, seed=3)
    assert raised.value.__notes__ == ["(on rank 2 of 4 simulated ones, with seed 3)"]
    assert raised.traceback[-1].frame.code.name == "main"
