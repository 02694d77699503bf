"""Training through servers on a small network, with workers that are slow at random, for the tests of messages."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from nnmpi import models, ops, optim
from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.comm.group import Group
from nnmpi.errors import UsageError
from nnmpi.nn.module import Module
from nnmpi.parallel.server.parameter_server import ParameterServer, Push
from nnmpi.parallel.server.push_pull import PullResult, PushPull
from nnmpi.parallel.server.shards import cut_shards
from nnmpi.shard import part
from nnmpi.synchrony.consistency import ConsistencyController, Task
from nnmpi.synchrony.sync import Sync
from nnmpi.tensor import Tensor

Segment = tuple[int, int]
Delay = Callable[[int, int], float]


def no_delay(rank: int, step: int) -> float:
    """Return how long a step takes besides its computing."""
    return 0.0


def random_delay(seed: int, mean_s: float = 0.002) -> Delay:
    """Return delays that depend on nothing but seed, rank and step: half of them none, some long."""

    def delay(rank: int, step: int) -> float:
        draw = np.random.default_rng((seed, rank, step))
        return float(draw.exponential(mean_s)) if draw.random() < 0.5 else 0.0

    return delay


def new_model(backend: Backend | None = None, hidden: int = 7) -> Module:
    """Return a small network, the same each time."""
    return models.mlp((5,), 3, hidden=(hidden,)).initialize(seed=0, dtype="float64", backend=backend)


def new_optimizer(model: Module) -> optim.Optimizer:
    """Return one that has state."""
    return optim.SGD(model.storage, lr=0.1, momentum=0.9)


def rows_of(batch: int) -> int:
    """Return the size of a batch: the parts differ, and on many ranks some are empty."""
    return 13 if batch % 3 else 5


def batch_of(batch: int) -> tuple[Array, Array]:
    """Return a global batch."""
    draw = np.random.default_rng(batch)
    return draw.standard_normal((rows_of(batch), 5)), draw.integers(0, 3, rows_of(batch))


def gradient_of(model: Module, task: Task, parts: int, backend: Backend) -> tuple[int, float]:
    """Let `storage.grads` be the gradient of a task; return its rows and the sum of their losses."""
    x, y = batch_of(task.batch)
    mine = part(len(y), parts, task.part)
    rows = slice(mine.start, mine.stop)
    model.zero_grad()
    loss = None
    if mine:
        logits = model(Tensor(backend.asarray(x[rows])))
        loss = ops.cross_entropy(logits, backend.asarray(y[rows]), reduction="sum")
        loss.backward(np.full((), 1 / len(y)))
    model.storage.finish_gradients()
    return len(mine), 0.0 if loss is None else float(loss.item())


def serial_weights(batches: int, hidden: int = 7) -> list[Array]:
    """Return the weights after so many updates, each with a whole batch's gradient."""
    model = new_model(hidden=hidden)
    optimizer = new_optimizer(model)
    for batch in range(batches):
        gradient_of(model, Task(batch, 0), 1, numpy_backend())
        optimizer.lr = rate_of(batch)
        optimizer.step()
    return [array.copy() for array in model.storage.data]


def rate_of(batch: int) -> float:
    """Return the learning rate, another for each batch."""
    return 0.1 / (1 + batch)


@dataclass
class Trained:
    """What a run did, as one rank saw it.

    Attributes:
        weights: the flat arrays at the end, on the host.
        arrivals: (worker, task) of every gradient in the order in which server 0 got them, by segment; there only.
        pulls: what this rank's worker was told, by segment.
        waiting_s: the processor time that it took to be told.
        traffic: (messages, bytes) that this rank sent, by segment.
        updates, dropped: of this rank's server in each segment.
    """

    weights: list[Array] = field(default_factory=list)
    arrivals: list[list[tuple[int, Task]]] = field(default_factory=list)
    pulls: list[list[PullResult]] = field(default_factory=list)
    traffic: list[tuple[int, int]] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    waiting_s: float = 0.0

    @property
    def digest(self) -> str:
        """A hash of the weights."""
        return hashlib.blake2b(b"".join(array.tobytes() for array in self.weights)).hexdigest()

    @property
    def leads(self) -> list[int]:
        """How far ahead of the slowest each gradient's step was at the least when it was begun, over all segments."""
        arrived = [worker for segment in self.arrivals for worker, _ in segment]
        steps = dict.fromkeys(arrived, 0)
        leads = []
        for worker in arrived:
            leads.append(steps[worker] - min(steps.values()))
            steps[worker] += 1
        return leads


def skip_unless_fitting(group: Group, sync: Sync) -> None:
    """Skip the test if so many ranks cannot have it."""
    try:
        sync.check(group.size)
    except UsageError as error:
        pytest.skip(str(error))


def make(
    group: Group,
    sync: Sync,
    model: Module,
    on_push: Callable[[int, Push], None] | None = None,
    server_class: type[ParameterServer] = ParameterServer,
    **options: Any,
) -> tuple[PushPull, ParameterServer | None]:
    """Return this rank's part in the messages, and its server."""
    servers, workers = sync.server_ranks(group.size), len(sync.worker_ranks(group.size))
    shards = cut_shards(model.storage, len(servers))
    server = None
    if group.rank in servers:
        number = servers.index(group.rank)
        controller = ConsistencyController(workers, sync.backup, assigns=number == 0)
        server = server_class(shards[number], model.storage, new_optimizer(model), controller, workers, sync.adapt)
    return PushPull(group, sync, model.storage, shards, server, on_push, **options), server


def train(
    group: Group,
    sync: Sync,
    segments: Sequence[Segment] = ((0, 5),),
    delay: Delay = no_delay,
    backend: Backend | None = None,
    signal_at: int | None = None,
    break_at: int | None = None,
    synchronous_sends: bool = False,
    hidden: int = 7,
) -> Trained:
    """Train on the batches of the segments, and return what happened.

    Args:
        signal_at: before which step, of those of all segments, the group's last rank gets a signal.
        break_at: in which step its gradient is broken.
        hidden: the size of the model.
    """
    backend = numpy_backend() if backend is None else backend
    model = new_model(backend, hidden)
    result = Trained()
    talk, server = make(
        group,
        sync,
        model,
        lambda worker, push: result.arrivals[-1].append((worker, push.task)),
        backend=backend,
        synchronous_sends=synchronous_sends,
    )
    workers, step = sync.worker_ranks(group.size), 0
    for span in model.storage.spans:
        span.parameter.hook = lambda parameter: talk.serve()
    for first, stop in segments:
        result.arrivals.append([])
        result.pulls.append([])
        talk.open(first, stop, sync.bound)
        while group.rank in workers:
            begin = time.process_time()
            pulled = talk.pull()
            result.waiting_s += time.process_time() - begin
            result.pulls[-1].append(pulled)
            if pulled.over or pulled.task is None:
                break
            rows, loss_sum = gradient_of(model, pulled.task, len(workers), backend)
            linger(delay(group.rank, step), talk)
            is_last, batch = group.rank == group.size - 1, pulled.task.batch
            signal, broken = int(is_last and step == signal_at), is_last and step == break_at
            about = (rows, rows, rows_of(batch), rate_of(batch), 0, loss_sum, 0.0, 1.0, 0.0, 0.0)
            talk.push(Push(pulled.task, *about, signal=signal, broken=broken))
            step += 1
        talk.finish()
        result.traffic.append((talk.messages, talk.bytes))
        if server is not None:
            result.updates.append(server.version - sum(result.updates))
            result.dropped.append(server.controller.dropped)
    talk.free()
    result.weights = [np.array(backend.to_host(array)) for array in model.storage.data]
    return result


def linger(seconds: float, talk: PushPull) -> None:
    """Be slow, and serve meanwhile."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(0.0005)
        talk.serve()


def all_equal(group: Group, trained: Trained) -> bool:
    """Return whether all ranks have the same weights, bit for bit."""
    return len(set(group.gather(trained.digest))) == 1


def tasks(segment: Segment, parts: int) -> list[Task]:
    """Return all parts of all batches of a segment."""
    return [Task(batch, number) for batch in range(*segment) for number in range(parts)]
