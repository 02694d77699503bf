"""A parameter server on rank 0: workers push gradients and pull weights, point to point.

    worker  compute | push ----.                   .---> pull | compute ...
    server                      `-> wait ... one update -'
    worker  compute ..... | push -->'              `---> pull

The server waits, under BSP and SSP, until a worker may continue; under ASP it does not wait.

BSP, SSP and ASP are one implementation (Li et al., "Scaling distributed machine learning with the
parameter server", 2014; Ho et al., 2013, see `asynchronous.consistency`): gradients wait until some
worker may continue; then all waiting gradients make one update, in the order of their tasks, and
every worker that may continue gets the weights. So no worker sees half an update.

A worker computes the gradient of (sum of the losses of its labels) / (labels of the global batch),
so that the gradients of all parts of a batch add up to the batch's gradient. Its share is q_i = its
labels / the batch's labels. An update from gradients g_i has the share q = sum of q_i, and uses

    gradient   (sum of g_i) / q        a mean over labels, of the right size for Adam
    rate       lr * q                  so plain SGD subtracts lr * (sum of g_i)

For a full batch, q = 1, this is bit for bit an optimizer's step on the all-reduced sum. One
gradient of N workers under ASP has q = 1/N, so it uses 1/N of the rate; many papers use the full
rate for each worker's gradient.

Plain SGD gives the same weights with one update per gradient, since no worker reads the weights in
between. Momentum and Adam do not: they decay, and count their steps, per update, and ASP makes N
updates for each one of BSP. Staleness is counted in updates: gradients that waited together, all
computed on the newest weights, have staleness 0, however far ahead their workers were. Counting
each gradient as an update would give them up to N - 1.

`ParameterServer` decides what happens with gradients and which worker continues when; it sends no
messages. `PushPull` is a rank's part, with the messages and their layout:

    worker    receive posted | push >--.           wait ... | weights | compute | receive posted ...
                                        \\                  /
    rank 0     take, take, update       take, update, reply >--        take ...

    segment   open: the server replies to all workers   push, pull ...   finish: weights broadcast

Between `open` and `finish` no rank waits for all the others. Rank 0 is the server and a worker, and
sends itself no messages. It posts the receive for a worker's next gradient before it sends the
reply that lets the worker compute it, so every push finds its receive posted.

In a segment of T steps with N workers in step there are T (N-1) pushes and (T+1) (N-1) replies,
since every worker gets the weights once at the beginning: 2 (N-1) messages per step. (The broadcast
at the end of a segment is not counted.) Li et al. 2014 shard the weights over several servers. That
was tried and dropped: asp took 21.2 ms a step with 1, 2 and 4 servers, and for synchronous steps an
all-reduce is better.

A message is a header and the values of the flat arrays. All messages of a kind have the same
length, so that a receive can be posted before the message's content is decided.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

import nnmpi.base.timeline as timeline
from nnmpi.asynchronous.consistency import ConsistencyController, Task
from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.base.errors import CommError
from nnmpi.comm.execution import MessageRequest
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import Messages
from nnmpi.comm.synchrony.sync import Bound
from nnmpi.compose.stats import Staleness
from nnmpi.optim.optimizer import Arrays, Optimizer
from nnmpi.tensor.parameter import FlatStorage


@dataclass(frozen=True, kw_only=True)
class Push:
    """The header of a gradient.

    Attributes:
        batch, part: the task of the gradient.
        samples, targets: the task's rows, and its labels that count; either may be 0.
        global_targets: the labels that count in the full batch.
        lr: the learning rate of that batch.
        loss_sum, score_sum: over the targets.
        grad_norm: the norm of the gradient of the task's mean loss, before clipping.
        compute_s, sync_s, input_s: seconds of computing, waiting for the weights, and waiting for
            the batch.
        signal: the number of a signal that the worker got, 0 for none. After a signal no new batch
            begins.
        broken: whether the gradient is unusable; the segment ends at once.
        version: of the weights on which the gradient was computed; `PushPull` sets it.
    """

    batch: int
    part: int
    samples: int
    targets: int
    global_targets: int
    lr: float
    loss_sum: float = 0.0
    score_sum: float = 0.0
    grad_norm: float = 0.0
    compute_s: float = 0.0
    sync_s: float = 0.0
    input_s: float = 0.0
    signal: int = 0
    broken: bool = False
    version: int = 0

    @property
    def share(self) -> float:
        """The fraction of its batch's targets that the gradient covers."""
        return self.targets / max(1, self.global_targets)


class ParameterServer:
    """The weights, the optimizer's state, and the updates. It sends no messages.

        server.open(first, stop, bound)
        send(server.release())                          all workers get the weights and begin
        while not server.controller.is_over:
            server.push(worker, push, gradient)         one or several arrived gradients
            send(server.release())
        server.close()

    Args:
        storage: the model's; `open` reads its values and `close` writes them back. They may change
            in between.
        optimizer: of the storage's buffers; its state is updated in place.
        workers: the number of workers.

    Attributes:
        controller: decides which worker may continue, and assigns its task.
        master: the weights, one array per flat buffer.
        version: of the weights: the number of updates since the server was made.
        staleness: of the gradients used since `open`.
    """

    def __init__(self, storage: FlatStorage, optimizer: Optimizer, workers: int) -> None:
        self.controller = ConsistencyController(workers)
        self._storage = storage
        self._model_optimizer = optimizer
        self.master, self._sums = (
            [namespace(array).zeros(array.shape, array.dtype) for array in storage.data]
            for _ in range(2)
        )
        self.optimizer = optimizer.over(Arrays(self.master, self._sums, storage.groups))
        self._blocks = self.optimizer.cut()
        self.version = 0
        self.staleness = Staleness(workers)
        self._pending: dict[int, tuple[Push, Sequence[Array]]] = {}

    def open(self, first: int, stop: int, bound: Bound | None) -> None:
        """Begin a segment of batches first..stop-1 with the weights now in the storage."""
        for weights, values in zip(self.master, self._storage.data, strict=True):
            weights[...] = values
        self.optimizer.steps = self._model_optimizer.steps
        self.staleness = Staleness(len(self.controller.clocks.steps))
        self.controller.open(first, stop, bound)

    def push(self, worker: int, push: Push, grads: Sequence[Array]) -> None:
        """Take a worker's gradient. A signal stops new batches, a broken gradient new tasks.

        Args:
            worker: the sender.
            push: the gradient's header.
            grads: one array per flat buffer, which must not change until `release` lets a worker
                continue.
        """
        self.controller.add_gradient(worker)
        if push.broken:
            self.controller.close(at_once=True)
        else:
            self._pending[worker] = (push, grads)
        if push.signal:
            self.controller.close()

    def release(self) -> dict[int, Task | None]:
        """Return the workers that may continue; first make one update of all waiting gradients."""
        released = self.controller.release()
        if released:
            self._take()
        return released

    def close(self) -> None:
        """End a segment: write weights to the storage and the step count to the optimizer."""
        for weights, values in zip(self.master, self._storage.data, strict=True):
            values[...] = weights
        self._model_optimizer.steps = self.optimizer.steps

    def _take(self) -> None:
        """Make one update of all waiting gradients, in the order of their tasks.

        The order of arrival would differ from run to run, and with it the bits of the sum.
        """
        for worker, (push, _) in self._pending.items():
            self.staleness.add(worker, self.version - push.version)
        pushes = sorted(self._pending.values(), key=lambda item: (item[0].batch, item[0].part))
        pushes = [(push, grads) for push, grads in pushes if push.targets]
        self._pending.clear()
        if not pushes:
            return
        for total, first, *others in zip(self._sums, *(grads for _, grads in pushes), strict=True):
            total[...] = first
            for array in others:
                total += array
        targets = Counter[int]()  # integers, whose sum is exact
        for push, _ in pushes:
            targets[push.global_targets] += push.targets
        share = sum(count / max(1, full) for full, count in targets.items())
        rates = {push.lr for push, _ in pushes}
        # The weighted mean of equal rates could round; a single rate stays as it is, bit for bit.
        lr = (
            rates.pop()
            if len(rates) == 1
            else sum(push.lr * push.share for push, _ in pushes) / share
        )
        if share != 1.0:
            for total in self._sums:
                total /= share
        self.optimizer.lr = lr * share
        with timeline.span("update of the server", "update", timeline.REDUCE):
            self.optimizer.update(self._blocks, self._storage.frozen())
        self.version += 1


TAG = 0  # pushes go to rank 0 and replies come from it, so one tag is enough


@dataclass(frozen=True)
class Reply:
    """The header of pulled weights: the worker's next task, or -1, -1 at the segment's end."""

    batch: int
    part: int
    version: int


class MessageBuffer:
    """One message in a buffer for sending or receiving: a header and the flat arrays' values.

    Args:
        kind: of message.
        arrays: the flat arrays; only their sizes and dtypes matter.
        backend: of the arrays.
    """

    def __init__(self, kind: type[Push | Reply], arrays: Sequence[Array], backend: Backend) -> None:
        self._kind, self._fields, self._backend = kind, fields(kind), backend
        # float64 is exact for the header's integers, which are below 2**53
        header = ("header", "f8", (len(self._fields),))
        layout = np.dtype(
            [header, *((f"{i}", str(array.dtype), array.shape) for i, array in enumerate(arrays))]
        )
        self.buffer = np.zeros(layout.itemsize, np.uint8)
        self._header, *self._values = (
            self.buffer.view(layout)[name][0] for name in layout.names or ()
        )

    def write(self, message: Push | Reply, arrays: Sequence[Array]) -> None:
        """Copy a message and its arrays into the buffer."""
        # no tuples of a generator's values: Python keeps 2,000 of each length when they are freed
        self._header[:] = [*vars(message).values()]
        for value, array in zip(self._values, arrays, strict=True):
            value[...] = self._backend.to_host(array)

    def read(self) -> tuple[Any, list[Array]]:
        """Return the message and its arrays on the backend; NumPy's are views of the buffer."""
        pairs: Any = zip(self._fields, self._header.tolist(), strict=True)
        numbers = {item.name: item.type(number) for item, number in pairs}
        return self._kind(**numbers), [self._backend.asarray(value) for value in self._values]


class PushPull:
    """A rank's part in training through a parameter server. Making one is collective.

    A worker calls `open`, then `pull` and `push` in turn until `pull` has no task, then `finish`.

    Args:
        group: all ranks.
        storage: of the model; `data` receives pulled weights, `grads` is pushed.
        server: on rank 0, the server; None on the other ranks.
        on_push: called on rank 0 with (worker, push) for every gradient, after the server took it
            and before any worker continues: if it closes the controller, no further task is
            assigned.
        backend: of the model's arrays; NumPy by default.
    """

    def __init__(
        self,
        group: Group,
        storage: FlatStorage,
        server: ParameterServer | None,
        on_push: Callable[[int, Push], None] | None = None,
        backend: Backend | None = None,
    ) -> None:
        self._group, self._storage, self._server, self._on_push = group, storage, server, on_push
        self._wait_until = group.comm.world.wait_until
        self._messages = Messages(group)
        peers = (0,) if server is None else range(1, group.size)
        received, sent = (Reply, Push) if server is None else (Push, Reply)
        backend = numpy_backend() if backend is None else backend
        self._received = {p: MessageBuffer(received, storage.data, backend) for p in peers}
        self._sent = {p: MessageBuffer(sent, storage.data, backend) for p in peers}
        self._receives: dict[int, MessageRequest] = {}  # receives by peer
        self._sends: dict[int, MessageRequest] = {}  # the last send by peer
        self._version = 0  # of the weights that this worker has
        self._reply: Reply | None = None
        self._is_over = True

    @property
    def messages(self) -> int:
        """The messages that this rank has sent since `open`."""
        return self._messages.sent

    @property
    def bytes(self) -> int:
        """The bytes of these messages."""
        return self._messages.sent_bytes

    def open(self, first: int, stop: int, bound: Bound | None) -> None:
        """Begin a segment: the server replies to all workers that may continue.

        All ranks call it, not necessarily at the same time. The weights, `storage.data`, must be
        equal on all ranks.

        Args:
            first, stop: the batches of the segment.
            bound: see `ConsistencyController`.

        Raises:
            CommError: when an error ended the last segment on this rank.
        """
        if not self._is_over:
            raise CommError(
                "an error ended the last segment on this rank, and other ranks may still be in it;"
                " make a new AsynchronousWorker on all ranks"
            )
        self._is_over = False
        self._messages.sent = self._messages.sent_bytes = 0
        if self._server is None:
            self._expect(0)
        else:
            self._server.open(first, stop, bound)
            self._answer(self._server)

    def pull(self) -> Task | None:
        """Wait for the server's weights in `storage.data`; return the next task, or None."""
        while self._reply is None:
            self._wait_until(self.poll)
        reply, self._reply = self._reply, None
        return None if reply.batch < 0 else Task(reply.batch, reply.part)

    def push(self, push: Push) -> None:
        """Send the gradient in `storage.grads`; do not change it until the next `pull` returns.

        Args:
            push: the gradient's header. The values of a broken gradient are ignored.
        """
        push = replace(push, version=self._version)
        if self._server is None:
            self._expect(0)
            self._send(0, push, self._storage.grads)
        else:
            self._take(self._server, 0, push, self._storage.grads)

    def poll(self) -> bool:
        """Receive arrived messages, and reply on the server; return whether any arrived. Never
        blocks.
        """
        moved = False
        for peer in sorted(self._receives):
            if self._receives[peer].poll():
                del self._receives[peer]
                message, arrays = self._received[peer].read()
                if self._server is None:
                    self._accept(message, arrays)
                else:
                    self._take(self._server, peer, message, arrays)
                moved = True
        self._messages.progress()
        return moved

    def serve_until(self, until_s: float) -> None:
        """Poll until this time of `nnmpi.base.clock`."""
        self._wait_until(lambda: self.poll() and False, until_s)

    def finish(self) -> None:
        """End the segment: serve until it is over, then broadcast the weights. Collective."""
        while self._server is not None and not self._server.controller.is_over:
            self._wait_until(self.poll)
        self._wait_until(self._all_sent)
        if self._server is not None:
            self._server.close()
        self.broadcast(self._storage.data)
        self._is_over = True

    def broadcast(self, arrays: Sequence[Array]) -> None:
        """Give all ranks the server's arrays. Collective."""
        for array in arrays:
            self._group.broadcast(array, check=False)

    def free(self) -> None:
        """Free the communicator, between two segments. Collective."""
        self._messages.free()

    def _take(
        self, server: ParameterServer, worker: int, push: Push, grads: Sequence[Array]
    ) -> None:
        """Give a gradient to the server, and reply to all workers that may continue now."""
        server.push(worker, push, grads)
        if self._on_push is not None:
            self._on_push(worker, push)
        self._answer(server)

    def _answer(self, server: ParameterServer) -> None:
        released = server.release()
        # Send the messages first: they travel while the reply to rank 0's own worker is copied.
        for worker in sorted(released, key=lambda worker: worker == 0):
            task = released[worker]
            batch, part = (-1, -1) if task is None else (task.batch, task.part)
            reply = Reply(batch, part, server.version)
            if worker == 0:
                self._accept(reply, server.master)
                continue
            if task is not None:
                self._expect(worker)
            self._send(worker, reply, server.master)

    def _accept(self, reply: Reply, weights: Sequence[Array]) -> None:
        self._reply, self._version = reply, reply.version
        for target, values in zip(self._storage.data, weights, strict=True):
            target[...] = values

    def _expect(self, peer: int) -> None:
        self._receives[peer] = self._messages.receive(self._received[peer].buffer, peer, TAG)

    def _send(self, peer: int, message: Push | Reply, arrays: Sequence[Array]) -> None:
        if peer in self._sends:
            self._sends[peer].wait()  # the peer has replied since, so this hardly ever waits
        self._sent[peer].write(message, arrays)
        self._sends[peer] = self._messages.send(self._sent[peer].buffer, peer, TAG)

    def _all_sent(self) -> bool:
        self._messages.progress()
        return self._messages.leaving == 0
