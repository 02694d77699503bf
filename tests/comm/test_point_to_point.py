"""Point-to-point messages: nothing depends on MPI's buffering, order is kept, long ones are cut."""

import time

import numpy as np
import pytest

from nnmpi.base.errors import ShapeError
from nnmpi.comm import buffers
from nnmpi.comm.point_to_point import Messages, rendezvous, send_and_receive

ARRAYS = [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.arange(24, dtype=np.int64).reshape(2, 3, 4)[:, ::2, 1],
    np.asarray(2.5),
    np.zeros((0, 3)),
    np.asarray([True, False, True]),
]


def neighbours(group):
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size


def come(arrival, messages):
    """Return whether a message comes within half a minute, as polling tells."""
    deadline = time.monotonic() + 30
    while not arrival.poll() and time.monotonic() < deadline:
        messages.progress()
    return arrival.poll()


@pytest.mark.both_worlds
@pytest.mark.parametrize("synchronous_sends", [False, True])
def test_everybody_sends_before_anybody_receives(group, synchronous_sends):
    """Around a ring, several messages with one tag, with sends that wait for their receives."""
    messages = Messages(group, synchronous_sends)
    after, before = neighbours(group)
    for number in range(3):
        messages.send(np.full((2, 3), 10 * group.rank + number, np.float32), after, tag=7)
    arrivals = [messages.receive(np.empty((2, 3), np.float32), before, tag=7) for _ in range(3)]
    result = [float(arrival.wait()[1, 2]) for arrival in arrivals]
    messages.drain()
    left = messages.leaving
    messages.free()
    assert all(group.gather(result == [10 * before + number for number in range(3)] and left == 0))


@pytest.mark.both_worlds
def test_ready_says_whether_a_message_is_there_without_waiting(group):
    """No before it is sent, however often it is asked; then yes, and the values may be read."""
    messages = Messages(group, synchronous_sends=True)
    after, before = neighbours(group)
    arrival = messages.receive(np.zeros(40_000), before, tag=3)
    early = any(arrival.poll() for _ in range(100))
    group.barrier()
    messages.send(np.arange(40_000.0) + group.rank, after, tag=3)
    right = come(arrival, messages) and bool(
        np.array_equal(arrival.array, np.arange(40_000.0) + before)
    )
    right = right and arrival.wait() is arrival.array
    messages.drain()
    messages.free()
    assert all(group.gather(right and not early))


@pytest.mark.both_worlds
def test_a_long_message_is_cut_and_there_when_its_last_piece_is(group, monkeypatch):
    monkeypatch.setattr(buffers, "MAX_MESSAGE_BYTES", 80)
    messages = Messages(group)
    after, before = neighbours(group)
    arrival = messages.receive(np.empty(23), before, tag=0)
    first, last = np.split(np.arange(23.0) + group.rank, [10])
    messages.send(first, after, tag=0)
    group.barrier()
    half = arrival.poll()
    group.barrier()
    messages.send(last, after, tag=0)
    leaving = messages.leaving
    full = come(arrival, messages) and bool(
        np.array_equal(arrival.wait(), np.arange(23.0) + before)
    )
    messages.drain()
    messages.free()
    assert all(group.gather(full and not half and leaving == 2))


@pytest.mark.both_worlds
def test_a_send_can_be_waited_for_by_itself(group):
    """One that cannot leave yet does not hold up another; and both were counted, with their
    bytes.
    """
    messages = Messages(group, synchronous_sends=True)
    after, before = neighbours(group)
    messages.send(np.zeros(2), after, tag=1)
    arrival = messages.receive(np.empty(5), before, tag=2)
    departure = messages.send(np.zeros(5), after, tag=2)
    group.barrier()
    departure.wait()
    messages.progress()
    left = messages.leaving
    arrival.wait()
    group.barrier()
    messages.receive(np.empty(2), before, tag=1).wait()
    messages.drain()
    counted = (messages.sent, messages.sent_bytes)
    messages.free()
    assert all(group.gather(left == 1 and counted == (2, 56)))


@pytest.mark.both_worlds
def test_arrays_of_any_kind_arrive(group, monkeypatch):
    monkeypatch.setattr(buffers, "MAX_MESSAGE_BYTES", 20)  # the longer ones travel in pieces
    for array in ARRAYS:
        result = np.full(array.shape, 1, array.dtype)
        with rendezvous(group) as channel:  # from rank to rank, as a bucket is passed on
            sent = channel.receive(result, group.rank - 1) if group.rank else True
            if group.rank < group.size - 1:
                sent = channel.send(array, group.rank + 1) and sent
        assert all(group.gather(sent and (group.rank == 0 or np.array_equal(result, array))))


@pytest.mark.simulated
def test_nothing_moves_unless_both_can(group):
    partner = group.rank ^ 1
    result = np.zeros(2)
    answers = []
    with rendezvous(group) as channel:
        if partner < group.size:
            for sends, takes in ((False, True), (True, False), (False, False)):
                if group.rank % 2:
                    answers.append(channel.receive(result if takes else None, partner))
                else:
                    answers.append(channel.send(np.ones(2) if sends else None, partner))
    assert not any(map(any, group.gather(answers)))
    assert all(group.gather(not result.any()))


@pytest.mark.simulated
def test_a_rendezvous_cannot_receive_into_gaps(group):
    with rendezvous(group) as channel, pytest.raises(ShapeError, match="is not contiguous"):
        channel.receive(np.zeros((4, 4))[:, 1], 0)


@pytest.mark.both_worlds
def test_a_rendezvous_does_not_meet_the_groups_messages(group):
    sums = np.ones(5)
    pending = group.bind(sums, "ring")
    pending.start()
    result = np.zeros(3)
    with rendezvous(group) as channel:
        if group.rank == 1:
            channel.receive(result, 0)
        elif group.rank == 0 and group.size > 1:
            channel.send(np.full(3, 7.0), 1)
    pending.wait()
    assert all(group.gather(bool((sums == group.size).all())))
    assert all(group.gather(group.rank != 1 or bool((result == 7).all())))


@pytest.mark.both_worlds
@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_all_neighbours_at_once(group, size):
    """Every rank sends to both neighbours on a ring and to itself; long messages, too, that MPI
    does not buffer.
    """
    ring = [(group.rank + step) % group.size for step in (1, -1, 0)]
    sends = [
        (rank, np.full((2, size), 10.0 * group.rank + number)) for number, rank in enumerate(ring)
    ]
    places = [np.zeros((2, size)) for _ in ring]
    sources = [(group.rank - step) % group.size for step in (1, -1, 0)]
    send_and_receive(group, sends, list(zip(sources, places, strict=True)))
    right = all(
        (place == 10.0 * rank + number).all()
        for number, (rank, place) in enumerate(zip(sources, places, strict=True))
    )
    assert all(group.gather(bool(right)))
