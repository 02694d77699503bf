"""A server's end of the messages by itself, where tests decide when what arrives."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nnmpi.backend.array import Array
from nnmpi.backend.backend import numpy_backend
from nnmpi.errors import CommError
from nnmpi.parallel.server.parameter_server import ParameterServer, Push
from nnmpi.parallel.server.server_endpoint import PUSH_TAG, TOTAL_TAG, Roles, ServerEndpoint
from nnmpi.parallel.server.shards import cut_shards
from nnmpi.parallel.server.wire_format import HEADER_BYTES, MessageId, read_reply, write_push
from nnmpi.synchrony.consistency import ConsistencyController, Task
from tests.parallel.server.rounds import new_model, new_optimizer


class Fake:
    """Messages that come when a test says so, and the replies that were sent: (rank, whether it is over)."""

    def __init__(self) -> None:
        self.posted: dict[tuple[int, int], FakeArrival] = {}
        self.replies: list[tuple[int, bool]] = []

    def receive(self, array: Array, source: int, tag: int) -> Any:
        assert (source, tag) not in self.posted or self.posted[source, tag].there, "posted twice"
        self.posted[source, tag] = FakeArrival(array)
        return self.posted[source, tag]

    def send(self, array: Array, to: int, tag: int) -> Any:
        _, reply = read_reply(array[:HEADER_BYTES].view(np.float64))
        self.replies.append((to, reply.over))
        return self

    def wait(self) -> None:
        """Have left."""

    def progress(self) -> None:
        """Move on."""

    def push(self, rank: int, message_id: MessageId, batch: int) -> None:
        """Let a worker's gradient come."""
        arrival = self.posted[rank, PUSH_TAG]
        push = Push(Task(batch, rank - 2), 5, 5, 10, 0.1, 0, 1.0, 0.0, 1.0, 0.0, 0.0)
        write_push(arrival.array[:HEADER_BYTES].view(np.float64), message_id, push)
        arrival.there = True

    def total(self, segment: int, count: int) -> None:
        """Let server 0's word come."""
        arrival = self.posted[0, TOTAL_TAG]
        arrival.array[...] = segment, count
        arrival.there = True


@dataclass
class FakeArrival:
    """A receive that is posted."""

    array: Array
    there: bool = False

    def poll(self) -> bool:
        """Return whether the test has let it come."""
        return self.there


def second_of_two() -> tuple[ServerEndpoint, Fake]:
    """Return the dedicated server 1 of two, on rank 1, with workers on ranks 2 and 3."""
    model = new_model()
    shard = cut_shards(model.storage, 2)[1]
    server = ParameterServer(shard, model.storage, new_optimizer(model), ConsistencyController(2, assigns=False), 2)
    fake: Any = Fake()
    roles = Roles.of(1, range(2), range(2, 4))
    serving = ServerEndpoint(server, roles, fake, model.storage, numpy_backend(), lambda *_: None, lambda *_: None)
    return serving, fake


def test_a_worker_that_is_held_learns_the_end_with_the_total() -> None:
    """It is one step ahead of a worker that gets no more to do, and its gradient came before server 0's word."""
    serving, fake = second_of_two()
    serving.open(1, 0, 9, bound=0)
    fake.push(2, MessageId(1, 1, 1), batch=0)
    assert serving.poll() and not serving.poll()
    assert fake.replies == [(2, False), (3, False)] and not serving.over
    fake.total(1, 1)
    assert serving.poll()
    assert fake.replies[2:] == [(2, True)] and serving.over


def test_a_worker_let_go_before_the_end_was_known_begins_the_next_segment() -> None:
    """The receive that was posted for it serves the next segment, and is not posted twice."""
    serving, fake = second_of_two()
    serving.open(1, 0, 1, bound=None)
    fake.push(2, MessageId(1, 1, 1), batch=0)
    serving.poll()
    fake.push(3, MessageId(1, 1, 1), batch=0)
    serving.poll()
    fake.total(1, 2)
    assert serving.poll() and serving.over
    assert [over for _, over in fake.replies] == [False] * 4
    serving.open(2, 1, 2, bound=None)
    assert not serving.over
    with pytest.raises(CommError, match="gradient of version 0 of shard 1, but got version 2 last"):
        fake.push(2, MessageId(2, 2, 1), batch=1)
        serving.poll()


@pytest.mark.parametrize("message_id", [MessageId(2, 1, 1), MessageId(1, 2, 1), MessageId(1, 1, 0)])
def test_a_gradient_that_must_not_come_now_is_refused(message_id: MessageId) -> None:
    """Of another segment, one that was left out, or for another server."""
    serving, fake = second_of_two()
    serving.open(1, 0, 9, bound=0)
    fake.push(2, message_id, batch=0)
    with pytest.raises(CommError, match="a gradient of worker 0 has segment"):
        serving.poll()


def test_the_end_of_another_segment_is_refused() -> None:
    """Server 0 and this one must be in the same."""
    serving, fake = second_of_two()
    serving.open(1, 0, 9, bound=0)
    fake.total(2, 4)
    with pytest.raises(CommError, match="server 0 has ended segment 2 while server 1 is in segment 1"):
        serving.poll()
