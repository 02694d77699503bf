"""Parameter servers and workers of any speeds played in one process, in an order that a random generator chooses.

What travels between a worker and a server is on its way for as long as the generator likes, but between two of them
nothing overtakes. Gradients are those of a small real model, in float64.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from nnmpi import nn, ops
from nnmpi.backend.array import Array
from nnmpi.optim.adam import Adam, AdamW
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.sgd import SGD
from nnmpi.parallel.server.parameter_server import ParameterServer, Push, Reply
from nnmpi.parallel.server.shards import cut_shards
from nnmpi.shard import part
from nnmpi.synchrony.consistency import ConsistencyController, Task
from nnmpi.synchrony.staleness import Staleness
from nnmpi.tensor import Tensor
from nnmpi.tensor.flat import FlatStorage

MakeOptimizer = Callable[[FlatStorage], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda storage: SGD(storage, 0.1),
    "sgd-decay": lambda storage: SGD(storage, 0.1, weight_decay={"weights": 0.01}),
    "momentum": lambda storage: SGD(storage, 0.1, momentum=0.9),
    "nesterov-decay": lambda storage: SGD(storage, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda storage: Adam(storage, 0.01),
    "adam-decay": lambda storage: Adam(storage, 0.01, weight_decay=0.01),
    "adamw": lambda storage: AdamW(storage, 0.01, weight_decay={"weights": 0.1, "biases": 0.2}),
}


class Problem:
    """A model, its optimizer, and batches of 7 rows, of which the last one has 3.

    Args:
        optimizer: makes one.
        frozen: the numbers of parameters that need no gradient.
        rate: batch -> learning rate.
    """

    def __init__(
        self,
        optimizer: MakeOptimizer = OPTIMIZERS["sgd"],
        frozen: Sequence[int] = (),
        batches: int = 4,
        rate: Callable[[int], float] = lambda batch: 0.1,
    ) -> None:
        self.model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.model.initialize(0, "float64", group=lambda name, _: "weights" if "weight" in name else "biases")
        self.storage, self.rate, self.batches = self.model.storage, rate, batches
        self.optimizer = optimizer(self.storage)
        for number in frozen:
            self.storage.spans[number].parameter.requires_grad = False
        generator = np.random.default_rng(1)
        rows = 7 * (batches - 1) + 3
        self.x, self.y = generator.standard_normal((rows, 5)), generator.integers(0, 3, rows)

    def rows(self, task: Task, parts: int) -> tuple[range, int]:
        """Return the rows of a task, and the number of its batch's rows."""
        start = 7 * task.batch
        count = min(7, len(self.y) - start)
        mine = part(count, parts, task.part)
        return range(start + mine.start, start + mine.stop), count

    def gradient(self, task: Task, parts: int) -> tuple[list[Array], int, int]:
        """Return the gradient of a task at the storage's weights, its rows and its batch's."""
        rows, count = self.rows(task, parts)
        self.model.zero_grad()
        if rows:
            taken = slice(rows.start, rows.stop)
            loss = ops.cross_entropy(self.model(Tensor(self.x[taken])), self.y[taken], reduction="sum")
            loss.backward(np.full(loss.shape, 1 / count))
        self.storage.finish_gradients()
        return [grad.copy() for grad in self.storage.grads], len(rows), count

    def sequence(self, first: int = 0, stop: int | None = None) -> list[Array]:
        """Train on whole batches, one after the other; return the weights."""
        for batch in range(first, self.batches if stop is None else stop):
            self.gradient(Task(batch, 0), 1)
            self.optimizer.lr = self.rate(batch)
            self.optimizer.step()
        return self.weights()

    def weights(self) -> list[Array]:
        """Return a copy of the weights."""
        return [data.copy() for data in self.storage.data]

    def fill(self, weights: Sequence[Array]) -> None:
        """Let the storage hold these weights."""
        for mine, theirs in zip(self.storage.data, weights, strict=True):
            mine[...] = theirs


@dataclass
class Worker:
    """A worker: what the servers have told it since its last push, and what it computes."""

    weights: list[Array]
    replies: dict[int, Reply] = field(default_factory=dict)
    task: Task | None = None
    versions: list[int] = field(default_factory=list)
    steps: int = 0
    told: int = 0  # how often it was told that a segment is over

    def is_ready(self, servers: int) -> bool:
        """Return whether all servers have answered, and the first one with work."""
        return len(self.replies) == servers and not self.replies[0].over


class Play:
    """Workers, servers, and what is on its way between them.

    Args:
        seed: of the order of everything, and of the workers' speeds.

    Attributes:
        tasks: every task with its worker, in the order in which they were begun.
        pushed: the gradients by task.
        leads: how far workers were ahead of the slowest when they began a step.
        early: (worker, push) -> the push that is sent instead: for signals and divergence.
    """

    def __init__(
        self, problem: Problem, workers: int, servers: int = 1, backup: int = 0, adapt: bool = False, seed: int = 0
    ) -> None:
        self.problem, self.chance = problem, random.Random(seed)
        self.shards = cut_shards(problem.storage, servers)
        self.servers = [
            ParameterServer(
                shard,
                problem.storage,
                problem.optimizer,
                ConsistencyController(workers, backup, shard.number == 0),
                workers,
                adapt,
            )
            for shard in self.shards
        ]
        self.workers = [Worker(problem.weights()) for _ in range(workers)]
        self.speeds = [self.chance.choice((1, 2, 3, 10, 50)) for _ in range(workers)]
        self.tasks: list[tuple[int, Task]] = []
        self.pushed: dict[Task, list[Array]] = {}
        self.leads: list[int] = []
        self.early: Callable[[int, Push], Push] = lambda worker, push: push
        self._ways: dict[tuple[str, int, int], list[Callable[[], None]]] = {}
        self._opened: set[int] = set()

    def segment(self, first: int, stop: int, bound: int | None) -> None:
        """Play one segment to its end; the storage has the weights then."""
        start, self._total = self.problem.weights(), False
        self._opened.clear()
        for number, server in enumerate(self.servers):
            self._send("open", number, 0, partial(self._open, number, server, start, first, stop, bound))
        while actions := self._actions():
            kinds, weights = zip(*actions, strict=True)
            self.chance.choices(kinds, weights)[0]()
        assert all(server.controller.over for server in self.servers), "somebody waits for ever"
        for server in self.servers:
            server.close()
        for worker in self.workers:
            worker.replies.clear()
            worker.task = None

    @property
    def staleness(self) -> Staleness:
        """Of the first server's gradients."""
        return self.servers[0].staleness

    def _open(
        self, number: int, server: ParameterServer, start: list[Array], first: int, stop: int, bound: int | None
    ) -> None:
        self.problem.fill(start)
        server.open(first, stop, bound)
        self._opened.add(number)
        self._answer(number)

    def _actions(self) -> list[tuple[Callable[[], None], int]]:
        """Return what may happen next, with how likely it is."""
        found: list[tuple[Callable[[], None], int]] = []
        for key, way in self._ways.items():
            if way and (key[0] in ("open", "reply") or key[2] in self._opened):
                found.append((partial(_go, way), 20))
        for number, worker in enumerate(self.workers):
            if worker.task is not None:
                found.append((partial(self._push, number), self.speeds[number]))
            elif worker.is_ready(len(self.servers)):
                found.append((partial(self._begin, number), 20))
        return found

    def _send(self, kind: str, sender: int, to: int, act: Callable[[], None]) -> None:
        self._ways.setdefault((kind, sender, to), []).append(act)

    def _begin(self, number: int) -> None:
        """Let a worker begin the step that it may."""
        worker = self.workers[number]
        worker.task = worker.replies[0].task
        worker.versions = [worker.replies[server].version for server in range(len(self.servers))]
        assert worker.task is not None
        self.tasks.append((number, worker.task))
        self.leads.append(worker.steps - min(other.steps for other in self.workers))
        worker.replies.clear()

    def _push(self, number: int) -> None:
        """Let a worker end its step."""
        worker = self.workers[number]
        task = worker.task
        assert task is not None
        self.problem.fill(worker.weights)
        grads, rows, count = self.problem.gradient(task, len(self.workers))
        self.pushed[task] = grads
        worker.task, worker.steps = None, worker.steps + 1
        push = Push(task, rows, rows, count, self.problem.rate(task.batch), 0, 0.0, 0.0, 0.0, 0.0, 0.0)
        push = self.early(number, push)
        for server, shard in enumerate(self.shards):
            mine = replace(push, version=worker.versions[server])
            self._send("push", number, server, partial(self._take, server, number, mine, shard.views(grads)))

    def _take(self, server: int, worker: int, push: Push, grads: list[Array]) -> None:
        self.servers[server].push(worker, push, None if push.broken else grads)
        if self.chance.random() < 0.7 or not any(self._ways.values()):
            self._answer(server)
        else:  # several gradients are often there at a time
            self._send("later", server, server, partial(self._answer, server))

    def _answer(self, number: int) -> None:
        server = self.servers[number]
        for reply in server.release():
            weights = [array.copy() for array in server.master]
            self._send("reply", number, reply.worker, partial(self._hear, number, reply, weights))
        queue = server.controller.queue
        if queue is not None and queue.exhausted and not self._total:
            self._total = True
            for other in range(1, len(self.servers)):
                self._send("total", 0, other, partial(self._end, other, queue.assigned))

    def _end(self, number: int, total: int) -> None:
        self.servers[number].controller.end(total)
        self._answer(number)

    def _hear(self, server: int, reply: Reply, weights: list[Array]) -> None:
        worker = self.workers[reply.worker]
        assert server not in worker.replies, "two replies to one push"
        worker.replies[server] = reply
        worker.told += reply.over and server == 0
        for mine, theirs in zip(self.shards[server].views(worker.weights), weights, strict=True):
            mine[...] = theirs


def _go(way: list[Callable[[], None]]) -> None:
    """Let what is first on a way arrive."""
    way.pop(0)()
