"""Point-to-point messages: nothing depends on MPI's buffering, order is kept, long ones are cut."""

import numpy as np
import pytest

from nnmpi.comm import messages as messages_module
from nnmpi.comm.group import Group
from nnmpi.comm.messages import Messages
from nnmpi.errors import ShapeError


@pytest.mark.mpi
@pytest.mark.parametrize("synchronous", [False, True])
def test_everybody_sends_before_anybody_receives(group: Group, synchronous: bool) -> None:
    """Around a ring, several messages with one tag, with sends that wait for their receives."""
    messages = Messages(group, synchronous)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for number in range(3):
        messages.send(np.full((2, 3), 10 * group.rank + number, np.float32), after, tag=7)
    arrivals = [messages.receive(np.empty((2, 3), np.float32), before, tag=7) for _ in range(3)]
    found = [float(arrival.wait()[1, 2]) for arrival in arrivals]
    messages.drain()
    left = messages.leaving
    messages.free()
    assert all(group.gather(found == [10 * before + number for number in range(3)] and left == 0))


@pytest.mark.mpi
def test_a_synchronous_send_stays_until_its_receive_is_posted(group: Group) -> None:
    """So that a test with synchronous sends really runs without MPI's buffers."""
    messages = Messages(group, synchronous=True)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    messages.send(np.ones(1), after, tag=1)
    for _ in range(100):
        messages.progress()
    waiting = messages.leaving
    group.barrier()
    messages.receive(np.empty(1), before, tag=1).wait()
    messages.drain()
    messages.free()
    assert all(group.gather(waiting == 1))


@pytest.mark.mpi
def test_long_messages_are_cut(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_module, "MAX_MESSAGE_BYTES", 100)
    messages = Messages(group)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    arrival = messages.receive(np.empty(333), before, tag=0)
    messages.send(np.arange(333.0) + group.rank, after, tag=0)
    pieces = messages.leaving
    right = bool(np.array_equal(arrival.wait(), np.arange(333.0) + before))
    messages.drain()
    messages.free()
    assert all(group.gather(right and pieces == 27))  # 2664 bytes


@pytest.mark.mpi
def test_an_empty_message_arrives(group: Group) -> None:
    """A replica without rows has activations without elements."""
    messages = Messages(group, synchronous=True)
    messages.send(np.empty((0, 4)), (group.rank + 1) % group.size, tag=0)
    found = messages.receive(np.empty((0, 4)), (group.rank - 1) % group.size, tag=0).wait()
    messages.drain()
    messages.free()
    assert all(group.gather(found.shape == (0, 4)))


def test_an_array_with_gaps_is_refused() -> None:
    with pytest.raises(ShapeError, match="gaps"):
        Messages.receive(Messages.__new__(Messages), np.empty((4, 4))[:, ::2], 0, 0)
