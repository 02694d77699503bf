"""Headers come back as they were written, and a message is as long as its header and shard."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.backend.backend import numpy_backend
from nnmpi.errors import CommError
from nnmpi.parallel.server.parameter_server import Push, Reply
from nnmpi.parallel.server.shards import Shard
from nnmpi.parallel.server.wire_format import (
    HEADER,
    HEADER_BYTES,
    MessageBuffer,
    MessageId,
    read_push,
    read_reply,
    write_push,
    write_reply,
)
from nnmpi.synchrony.consistency import Task
from tests.device.library import device_backend, is_device_array

whole = st.integers(0, 2**53)
number = st.floats(allow_nan=False, width=64)
message_ids = st.builds(MessageId, whole, whole, whole)
tasks = st.builds(Task, whole, whole)
pushes = st.builds(
    Push,
    tasks,
    whole,
    whole,
    whole,
    number,
    whole,
    number,
    number,
    number,
    number,
    number,
    st.integers(0, 64),
    st.booleans(),
)
replies = st.builds(Reply, whole, st.none() | tasks, st.booleans(), whole, whole, whole)


@given(message_ids, pushes)
def test_a_push_comes_back(message_id: MessageId, push: Push) -> None:
    """Every field, whatever was in the header before."""
    header = np.full(HEADER, np.nan)
    write_push(header, message_id, push)
    assert read_push(header) == (message_id, push)


@given(message_ids, replies)
def test_a_reply_comes_back(message_id: MessageId, reply: Reply) -> None:
    """Also one without a task."""
    header = np.full(HEADER, np.nan)
    write_reply(header, message_id, reply)
    assert read_reply(header) == (message_id, reply)


def test_a_push_with_a_loss_that_is_not_finite_comes_back() -> None:
    header = np.zeros(HEADER)
    push = Push(Task(3, 1), 4, 4, 13, 0.1, 7, float("nan"), 0.0, float("inf"), 0.5, 0.25, 0.125, 15, True)
    write_push(header, MessageId(1, 2, 0), push)
    _, found = read_push(header)
    assert np.isnan(found.loss_sum) and found.norm == np.inf
    assert (found.task, found.signal, found.broken) == (push.task, 15, True)


@pytest.mark.parametrize("other", [MessageId(2, 5, 0), MessageId(1, 4, 0), MessageId(1, 5, 1)])
def test_a_wrong_message_id_is_refused(other: MessageId) -> None:
    MessageId(1, 5, 0).check(MessageId(1, 5, 0), "a reply")
    with pytest.raises(CommError, match="a reply has segment 1, gradient 5, shard 0, but segment"):
        MessageId(1, 5, 0).check(other, "a reply")


def test_values_lie_in_one_buffer_behind_the_header() -> None:
    """What is put into one message is in another that has the same bytes; an empty part takes no room."""
    arrays = [np.arange(10, dtype=np.float32), np.arange(4, dtype=np.float32), np.arange(6, dtype=np.float32)]
    shard = Shard(0, (slice(3, 10), slice(4, 4), slice(0, 5)))
    one, two = MessageBuffer(shard, arrays), MessageBuffer(shard, arrays)
    assert one.buffer.nbytes == HEADER_BYTES + 12 * 4 and one.header.shape == (HEADER,)
    one.put(shard.views(arrays), numpy_backend())
    write_reply(one.header, MessageId(1, 2, 0), Reply(0, None, True, 3, 4))
    two.buffer[...] = one.buffer
    assert [value.tolist() for value in two.values] == [[3, 4, 5, 6, 7, 8, 9], [], [0, 1, 2, 3, 4]]
    assert read_reply(two.header)[1].version == 3
    np.testing.assert_array_equal(two.on_device(numpy_backend())[0], two.values[0])


@pytest.mark.host_only("that nothing is copied on the host")
def test_values_on_the_host_are_not_copied() -> None:
    message = MessageBuffer(Shard(0, (slice(0, 2),)), [np.arange(3, dtype=np.float32)])
    assert message.on_device(numpy_backend())[0] is message.values[0]


def test_device_arrays_are_copied_through_the_host() -> None:
    backend = device_backend()
    arrays = [backend.asarray(np.arange(10.0))]
    shard = Shard(0, (slice(2, 6),))
    message = MessageBuffer(shard, arrays)
    message.put(shard.views(arrays), backend)
    assert message.values[0].tolist() == [2, 3, 4, 5]
    (found,) = message.on_device(backend)
    assert is_device_array(found) and found.get().tolist() == [2, 3, 4, 5]
