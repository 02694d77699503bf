"""Segments on a simulated cluster: one process computes the gradients of many workers, in virtual time.

    SimulatedCluster      the model that all workers share, and how long everything takes
    SimulatedAllReduce    synchronous updates: the slowest worker, then a sum on a ring
    SimulatedServers      the very parameter servers that answer messages elsewhere, and a queue of events
    SimulatedAveraging    workers with weights of their own, averaged now and then or with neighbours

SimulatedAllReduce: what all workers compute together is the gradient of the whole batch, and it is computed as one.

    worker 0   |======|..........|-ring-|======|..........|-ring-|
    worker 1   |======|..........|-ring-|======|..........|-ring-|
    worker 2   |=================|-ring-|=================|-ring-|      a straggler

SimulatedServers: an event is that a worker has all its replies and begins, or that a gradient has arrived at a server.
The gradient is computed with the weights that the worker has when it begins, and pushed when its time is over.

    server 0    take A | update, to A |        take B | update, to B |            (asp)
                      ^ `.                           ^ `.
    worker A   |=====/    `|=====|...            ...  /  `|====|...      |===| computes, for its step time and factor
    worker B   |====================================/

SimulatedAveraging: an average over all is priced as an all-reduce on a ring. The meeting at the end costs one for the
weights, unless they have just been averaged. The optimizer's states are averaged there, too; that serves checkpoints
and costs nothing.

    local, every 2     worker 0   |===|===|......|-ring-|===|===|......|-ring-|
                       worker 1   |======|======|-ring-|======|======|-ring-|      all wait for the slowest

    gossip, ring       worker 0   |===|...|x|===|...|x|        a step is over when it and the neighbours' are,
                       worker 1   |======|x|===|x|             and the exchange with them is
                       worker 2   |===|...|x|===|...|x|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.cost import ring_all_reduce
from nnmpi.compose.replicas import Gradient, LocalGradient
from nnmpi.compose.segment import Tally, sum_up
from nnmpi.compose.trainer import Progress, SegmentReport, Throttle, Totals
from nnmpi.data.loader import Batch, Parts
from nnmpi.errors import CommError, DivergenceError
from nnmpi.nn.module import Module
from nnmpi.optim.clip import scale, sum_of_squares
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.storage import Arrays
from nnmpi.parallel.server.parameter_server import ParameterServer, Push, Reply
from nnmpi.parallel.server.shards import cut_shards
from nnmpi.synchrony.consistency import ConsistencyController
from nnmpi.synchrony.event_queue import EventQueue
from nnmpi.synchrony.neighbours import matching, ring
from nnmpi.synchrony.network import LinkSpeed, Network
from nnmpi.synchrony.staleness import Staleness
from nnmpi.synchrony.sync import Sync
from nnmpi.tensor.flat import FlatStorage


class WorkerStatistics:
    """Keeps the model's buffers for every worker.

        begin           model -> everybody
        load, keep      everybody's own, around each gradient
        show            the mean, each worker's weighted by the gradients that it computed -> model

    A model without buffers costs nothing.
    """

    def __init__(self, model: Module, workers: int) -> None:
        self._buffers = [buffer for _, buffer in model.named_buffers()]
        self._own: list[list[Array]] = [[buffer.data.copy() for buffer in self._buffers] for _ in range(workers)]
        self._counts = [0] * workers

    def begin(self) -> None:
        """Give everybody the model's statistics."""
        self._counts = [0] * len(self._counts)
        for own in self._own:
            self._copy(own, [buffer.data for buffer in self._buffers])

    def load(self, worker: int) -> None:
        """Let the model have a worker's."""
        self._copy([buffer.data for buffer in self._buffers], self._own[worker])

    def keep(self, worker: int, rows: int) -> None:
        """Take them back from the model, after a gradient of so many rows; one of none does not count."""
        self._counts[worker] += rows > 0
        self._copy(self._own[worker], [buffer.data for buffer in self._buffers])

    def show(self) -> None:
        """Let the model have the mean; nothing changes where nobody has computed a gradient."""
        total = sum(self._counts)
        if not total:
            return
        for number, buffer in enumerate(self._buffers):
            mean = sum(
                own[number].astype("float64") * (count / total)
                for own, count in zip(self._own, self._counts, strict=True)
            )
            buffer.data[...] = mean

    def _copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target[...] = source


@dataclass(frozen=True)
class SimulatedSegment:
    """What is to be played.

    Attributes:
        parts: of the training data.
        batches: their numbers.
        step: the number of the first one in the whole run.
        lr: the learning rate of a step.
        bsp: whether the workers stay in step.
        progress, poll_signal: see `Trainer.run`.
        observe: called with the virtual time after every update, with the present weights in the model; or None.
        begin_s: the virtual time.
    """

    parts: Parts
    batches: range
    step: int
    lr: Callable[[int], float]
    bsp: bool
    progress: Callable[[Progress], None]
    poll_signal: Callable[[], int]
    observe: Callable[[float], None] | None
    begin_s: float

    def number(self, batch: int) -> int:
        """Return the number of a batch in the whole run."""
        return self.step + batch - self.batches.start


@dataclass(frozen=True)
class SimulatedCluster:
    """The model and the workers who share it.

    Attributes:
        steps: the gradients that each worker has computed in the whole run.
        taken: through servers, the samples that they were of.
        speed: of every link.
    """

    model: Module
    optimizer: Optimizer
    sync: Sync
    workers: int
    gradient: LocalGradient
    throttle: Throttle
    speed: LinkSpeed
    statistics: WorkerStatistics
    seed: int
    steps: list[int]
    taken: list[int]

    @property
    def nbytes(self) -> int:
        """The bytes of the weights, and of a gradient."""
        return sum(int(array.nbytes) for array in self.model.storage.data)

    def compute(self, worker: int, batch: Batch, number: int) -> Gradient:
        """Compute a worker's next gradient, with the weights that are in the model; seconds are virtual ones.

        Args:
            number: of the batch in the whole run.

        Raises:
            DivergenceError: when it is not finite.
        """
        self.statistics.load(worker)
        gradient = self.gradient.run(batch, number)
        self.statistics.keep(worker, gradient.rows)
        self.check(gradient, batch, number, f"worker {worker}")
        return replace(gradient, compute_s=self.take_step(worker))

    def check(self, gradient: Gradient, batch: Batch, number: int, who: str) -> None:
        """Raise DivergenceError for a gradient that is not finite."""
        if not gradient.is_finite:
            raise DivergenceError(self.gradient.explain(gradient, batch, number, who))

    def take_step(self, worker: int) -> float:
        """Count one more step of a worker, and return the virtual seconds that it takes."""
        rank = self.sync.worker_ranks(self.sync.ranks_of(self.workers))[worker]
        seconds = self.throttle.step_seconds(0.0, rank, self.steps[worker])
        self.steps[worker] += 1
        return seconds


class WorkerCopies:
    """A row of weights and an optimizer for every worker. The gradients are computed in the storage, one at a time.

    Parameters that need no gradient are equal everywhere and stay as they are, bit for bit.

    Args:
        storage: the model's.
        optimizer: of that storage; the workers' have its settings.
        workers: how many there are.
    """

    def __init__(self, storage: FlatStorage, optimizer: Optimizer, workers: int) -> None:
        self.storage, self.optimizer, self.workers = storage, optimizer, workers
        self._weights = [namespace(data).zeros((workers, data.size), data.dtype) for data in storage.data]
        whole = [slice(0, data.size) for data in storage.data]
        self._optimizers = [optimizer.over(_CopyArrays(storage, self._row(worker)), whole) for worker in range(workers)]
        for own in self._optimizers:
            own.move(lambda size, dtype: namespace(storage.data[0]).zeros(size, dtype))  # a state of its own

    def begin(self) -> None:
        """Give everybody the model's weights and the optimizer's state."""
        for weights, data in zip(self._weights, self.storage.data, strict=True):
            weights[...] = data
        for own in self._optimizers:
            own.steps = self.optimizer.steps
            for name, arrays in own.slots().items():
                for array, source in zip(arrays, self.optimizer.slots()[name], strict=True):
                    array[...] = source

    def load(self, worker: int) -> None:
        """Let the model have a worker's weights."""
        for data, row in zip(self.storage.data, self._row(worker), strict=True):
            data[...] = row

    def step(self, worker: int, lr: float) -> None:
        """Update a worker's weights with the gradient in the storage."""
        self._optimizers[worker].lr = lr
        self._optimizers[worker].step()

    def skip(self, worker: int) -> None:
        """Count a step of a worker that had no rows."""
        self._optimizers[worker].steps += 1

    def average(self, shares: Sequence[float]) -> None:
        """Give everybody the mean of all weights; the shares add up to 1."""
        for weights in self._weights:
            weights[...] = _mean(weights, shares)

    def mix_ring(self) -> None:
        """Average everybody's weights with the two beside it, by 1/4, 1/2, 1/4 (see `comm.algorithms.gossip`)."""
        if self.workers == 2:
            return self.average((0.5, 0.5))
        for weights in self._weights:
            first, left = weights[0].copy(), weights[-1].copy()
            for worker in range(self.workers):
                own = weights[worker].copy()
                right = weights[worker + 1] if worker + 1 < self.workers else first
                weights[worker] = (left + 2 * own + right) / 4
                left = own
        return None

    def mix_pairs(self, partners: Sequence[int]) -> None:
        """Average everybody's weights with those of its partner, who may be itself."""
        for worker, partner in enumerate(partners):
            if worker < partner:
                for weights in self._weights:
                    weights[worker] = weights[partner] = (weights[worker] + weights[partner]) / 2

    def show(self, shares: Sequence[float]) -> None:
        """Let the model have the mean of all weights."""
        for data, weights in zip(self.storage.data, self._weights, strict=True):
            data[...] = _mean(weights, shares)

    def meet(self, shares: Sequence[float]) -> float:
        """Let the model have the mean of all weights, and the optimizer that of all states.

        Returns:
            The disagreement before; see `parallel.averaging.Averaging.meet`.
        """
        self.show(shares)
        apart = sum(
            sum_of_squares([row - data])
            for weights, data in zip(self._weights, self.storage.data, strict=True)
            for row in weights
        )
        length = sum_of_squares(self.storage.data)
        states = [own.slots() for own in self._optimizers]
        for name, targets in self.optimizer.slots().items():
            for number, target in enumerate(targets):
                rows = [state[name][number] for state in states]
                target[...] = _mean(rows, [1 / self.workers] * self.workers)
        self.optimizer.steps = max(own.steps for own in self._optimizers)
        return sqrt(apart / self.workers / length) if length else 0.0

    def _row(self, worker: int) -> list[Array]:
        return [weights[worker] for weights in self._weights]


class _CopyArrays(Arrays):
    """One worker's weights, with the gradients that the model has computed."""

    def __init__(self, storage: FlatStorage, row: Sequence[Array]) -> None:
        super().__init__(row, storage.grads, storage.groups)
        self._storage = storage

    def frozen(self) -> list[Array]:
        """Return the parts of the parameters that need no gradient now."""
        spans = [span for span in self._storage.spans if not span.parameter.requires_grad]
        return [self.data[span.buffer][span.start : span.stop] for span in spans]


def _mean(rows: Sequence[Array] | Array, shares: Sequence[float]) -> Array:
    """Return the weighted mean; of equal rows, bit for bit, that row."""
    base = rows[0]
    mean = base.copy()
    for row, share in zip(rows, shares, strict=True):
        mean += share * (row - base)
    return mean


class SimulatedAllReduce:
    """Plays segments in which everybody waits for everybody. Nothing stands behind it from one to the next."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def run(self, segment: SimulatedSegment) -> tuple[SegmentReport, float]:
        """Play a segment; return what was done, and the virtual time.

        Progress is told once for each batch, for worker 0, which stands for all.
        """
        cluster, tally, now_s, signal, done = self._cluster, Tally(), segment.begin_s, 0, 0
        workers, nbytes = cluster.workers, cluster.nbytes
        sum_s = ring_all_reduce(workers, nbytes, cluster.speed.alpha_s, cluster.speed.beta_s_per_byte)
        wait_s = 0.0
        for number in segment.batches:
            batch = segment.parts.whole(number, self._cluster.workers)
            gradient = cluster.gradient.run(batch, segment.number(number))
            cluster.check(gradient, batch, segment.number(number), "the workers together")
            cluster.optimizer.lr = segment.lr(segment.number(number))
            cluster.optimizer.step()
            each_s = [cluster.take_step(worker) for worker in range(workers)]
            now_s += max(each_s) + sum_s
            gradient = replace(gradient, compute_s=sum(each_s) / workers)
            tally.add(gradient.totals(gradient.compute_s, max(each_s) + sum_s - gradient.compute_s))
            segment.progress(Progress(number, 0, gradient.totals(gradient.compute_s, wait_s), gradient.norm, now_s))
            wait_s = max(each_s) + sum_s - gradient.compute_s
            done += 1
            if segment.observe is not None:
                segment.observe(now_s)
            signal = segment.poll_signal()
            if signal:
                break
        report = SegmentReport(
            sum_up([tally], done, now_s - segment.begin_s),
            messages=done * 2 * workers * (workers - 1),
            bytes=done * 2 * (workers - 1) * nbytes,
            updates=done,
            signal=signal,
        )
        return report, now_s


class SimulatedServers:
    """Plays segments through servers.

    Attributes:
        servers: they keep their clocks from segment to segment.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        storage, sync = cluster.model.storage, cluster.sync
        self._cluster = cluster
        self.servers = [
            ParameterServer(
                shard,
                storage,
                cluster.optimizer,
                ConsistencyController(cluster.workers, sync.backup, assigns=shard.number == 0),
                cluster.workers,
                adapt=sync.adapt,
            )
            for shard in cut_shards(storage, sync.server_count)
        ]
        # A gradient stays until all servers have used it: its worker gets no reply before.
        self._grads = [[grad.copy() for grad in storage.grads] for _ in range(cluster.workers)]

    def run(self, segment: SimulatedSegment) -> tuple[SegmentReport, float]:
        """Play a segment; return what was done, and the virtual time."""
        return _ServerSegment(self._cluster, self.servers, self._grads, segment).run()


@dataclass
class _WorkerState:
    """One worker in a segment.

    Attributes:
        grads: room for its gradient.
        replies: from servers, with the weights, since its last push.
        free_s: when its last gradient was done.
    """

    grads: list[Array]
    replies: dict[int, tuple[Reply, Sequence[Array]]]
    free_s: float


class _ServerSegment:
    """One segment."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        servers: Sequence[ParameterServer],
        grads: Sequence[list[Array]],
        segment: SimulatedSegment,
    ) -> None:
        self._cluster, self._servers, self._segment = cluster, servers, segment
        self._events = EventQueue(segment.begin_s)
        self._network = Network(len(servers), cluster.speed.alpha_s, cluster.speed.beta_s_per_byte)
        data = cluster.model.storage.data
        self._nbytes = [server.shard.nbytes(data) for server in servers]
        self._states = [_WorkerState(own, {}, segment.begin_s) for own in grads]
        self._over = 0  # workers for whom the segment is over
        self._total: int | None = None  # gradients in the segment, once it is known
        self._tally, self._used = Tally(), Totals()  # of gradients that were computed, and of those that were used
        self._updates = self._seen = servers[0].updates

    def run(self) -> tuple[SegmentReport, float]:
        segment, cluster, events = self._segment, self._cluster, self._events
        cluster.statistics.begin()
        bound = 0 if segment.bsp else cluster.sync.bound
        for server in self._servers:
            server.open(segment.batches.start, segment.batches.stop, bound)
        for number in range(len(self._servers)):
            self._answer(number, opening=True)
        while events.run_next():
            self._observe()
            self._check_signal()
        if self._over != cluster.workers:
            raise CommError(f"{cluster.workers - self._over} of {cluster.workers} virtual workers wait for ever")
        for server in reversed(self._servers):  # the number of updates is the first server's
            server.close()
        cluster.statistics.show()
        return self._report(), events.now_s

    def _answer(self, number: int, opening: bool = False) -> None:
        """Let a server answer all who may go on. In the opening they have the weights, from the last meeting."""
        server, now_s = self._servers[number], self._events.now_s
        replies = server.release()
        if replies:
            weights = [array.copy() for array in server.master]
            remote = [reply for reply in replies if not self._is_local(reply.worker, number)]
            arrival_s = now_s
            if remote and not opening:
                arrival_s = self._network.reply(number, now_s, self._nbytes[number], len(remote))
            for reply in replies:
                at_s = now_s if self._is_local(reply.worker, number) else arrival_s
                self._events.add(at_s, partial(self._receive, number, reply, weights))
        if number == 0:
            self._announce_total()

    def _announce_total(self) -> None:
        """Tell the other servers how many gradients there are, once the last is assigned; this message is free."""
        queue = self._servers[0].controller.queue
        if self._total is None and queue is not None and queue.exhausted:
            self._total = queue.assigned
            for number in range(1, len(self._servers)):
                self._servers[number].controller.end(self._total)
                self._events.add(self._events.now_s, partial(self._answer, number))

    def _receive(self, number: int, reply: Reply, weights: Sequence[Array]) -> None:
        """Let a worker have a server's reply; with the last one it begins."""
        state = self._states[reply.worker]
        state.replies[number] = (reply, weights)
        if len(state.replies) == len(self._servers) or (number == 0 and reply.over):
            self._begin(reply.worker)

    def _begin(self, worker: int) -> None:
        """Let a worker compute what it was told to, or stop."""
        state, segment, now_s = self._states[worker], self._segment, self._events.now_s
        replies, state.replies = state.replies, {}
        task = replies[0][0].task
        if replies[0][0].over or task is None:
            self._over += 1
            return
        for number, (_, weights) in replies.items():
            self._load(number, weights)
        cluster = self._cluster
        batch = segment.parts.assigned(task.batch, task.part, cluster.workers, worker, cluster.taken[worker])
        cluster.taken[worker] += len(batch.y)
        step = segment.number(task.batch)
        gradient = self._cluster.compute(worker, batch, step)
        for mine, computed in zip(state.grads, self._cluster.model.storage.grads, strict=True):
            mine[...] = computed
        wait_s, state.free_s = now_s - state.free_s, now_s + gradient.compute_s
        self._tally.add(gradient.totals(gradient.compute_s, wait_s))
        push = Push(
            task,
            gradient.rows,
            gradient.targets,
            batch.global_targets,
            segment.lr(step),
            0,
            gradient.loss_sum,
            gradient.correct,
            gradient.norm,
            gradient.compute_s,
            wait_s,
        )
        versions = [replies[number][0].version for number in range(len(self._servers))]
        self._events.add(state.free_s, partial(self._send, worker, push, versions))

    def _send(self, worker: int, push: Push, versions: Sequence[int]) -> None:
        """Send a worker's gradient to all servers."""
        now_s = self._events.now_s
        for number, version in enumerate(versions):
            at_s = now_s
            if not self._is_local(worker, number):
                at_s = self._network.push(number, now_s, self._nbytes[number])
            self._events.add(at_s, partial(self._arrive, worker, number, replace(push, version=version)))

    def _arrive(self, worker: int, number: int, push: Push) -> None:
        """Give a gradient to a server, and answer."""
        server = self._servers[number]
        dropped = server.controller.dropped
        server.push(worker, push, server.shard.views(self._states[worker].grads))
        if number == 0 and server.controller.dropped == dropped:
            self._note(worker, push)
        self._answer(number)

    def _note(self, worker: int, push: Push) -> None:
        """Count a gradient that will be used, and tell of it."""
        totals = Totals(1, push.rows, push.targets, push.loss_sum, push.correct, push.compute_s, push.wait_s)
        self._used = self._used.plus(totals)
        self._segment.progress(Progress(push.task.batch, worker, totals, push.norm, self._events.now_s))

    def _is_local(self, worker: int, number: int) -> bool:
        """Return whether a worker and a server are on one rank, and need no message."""
        return not self._cluster.sync.dedicated and worker == number

    def _load(self, number: int, weights: Sequence[Array]) -> None:
        """Put a shard's weights into the model."""
        shard = self._servers[number].shard
        for target, values in zip(shard.views(self._cluster.model.storage.data), weights, strict=True):
            target[...] = values

    def _observe(self) -> None:
        """Show the servers' weights, if the first one has new ones and all of this moment is done."""
        server, now_s = self._servers[0], self._events.now_s
        if self._segment.observe is None or server.updates == self._seen or self._events.next_s == now_s:
            return
        self._seen = server.updates
        for number, each in enumerate(self._servers):
            self._load(number, each.master)
        self._cluster.statistics.show()
        self._segment.observe(now_s)

    def _check_signal(self) -> None:
        """End the segment after the batch that was begun, if somebody asks for it."""
        if not self._tally.signal:
            self._tally.signal = self._segment.poll_signal()
            if self._tally.signal:
                self._servers[0].controller.close()
                self._announce_total()

    def _report(self) -> SegmentReport:
        controller = self._servers[0].controller
        staleness = [server.take_staleness() for server in self._servers]
        seconds = self._events.now_s - self._segment.begin_s
        return SegmentReport(
            sum_up([self._tally], controller.batches_done, seconds, self._used),
            messages=self._network.messages,
            bytes=self._network.bytes,
            updates=self._servers[0].updates - self._updates,
            dropped=controller.dropped,
            unassigned=controller.unassigned,
            staleness=staleness[0],
            lead=controller.longest_lead,
            signal=self._tally.signal,
        )


class SimulatedAveraging:
    """Plays segments of local steps or gossip."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._copies = WorkerCopies(cluster.model.storage, cluster.optimizer, cluster.workers)

    def run(self, segment: SimulatedSegment) -> tuple[SegmentReport, float]:
        """Play a segment; return what was done, and the virtual time. Progress is told of every worker's steps."""
        return _AveragingSegment(self._cluster, self._copies, segment).run()


class _AveragingSegment:
    """One segment."""

    def __init__(self, cluster: SimulatedCluster, copies: WorkerCopies, segment: SimulatedSegment) -> None:
        self._cluster, self._copies, self._segment = cluster, copies, segment
        self._every = 1 if segment.bsp else cluster.sync.local_steps  # a warm-up averages after every step
        self._local = segment.bsp or cluster.sync.mode == "local"
        self._clocks = [segment.begin_s] * cluster.workers
        self._waited = [0.0] * cluster.workers  # since each worker's last step
        self._targets = [0] * cluster.workers  # since the last average
        self._apart = False  # whether somebody has done a step since
        self._tally, self._staleness = Tally(), Staleness(cluster.workers)
        self._messages = self._bytes = self._done = self._age = 0

    def run(self) -> tuple[SegmentReport, float]:
        cluster, segment, tally = self._cluster, self._segment, self._tally
        self._copies.begin()
        cluster.statistics.begin()
        for batch in segment.batches:
            self._step(batch)
            self._done += 1
            if segment.observe is not None:
                self._copies.show(self._shares())
                cluster.statistics.show()
                segment.observe(max(self._clocks))
            tally.signal = segment.poll_signal()
            if tally.signal:
                break
        disagreement = self._meet()
        now_s = max(self._clocks)
        report = SegmentReport(
            sum_up([tally], self._done, now_s - segment.begin_s),
            messages=self._messages,
            bytes=self._bytes,
            updates=self._done,
            staleness=self._staleness if cluster.sync.mode == "local" else None,
            disagreement=disagreement,
            signal=tally.signal,
        )
        return report, now_s

    def _step(self, batch: int) -> None:
        """Let everybody do one step with its part of a batch, and average."""
        number = self._segment.number(batch)
        computed = [self._compute(worker, batch, number) for worker in range(self._cluster.workers)]
        self._apart = True
        self._age += 1
        if not self._local:
            self._gossip(number, computed)
        else:
            self._clocks = computed
            if (number + 1) % self._every == 0:
                self._average()
        self._waited = [after - own for after, own in zip(self._clocks, computed, strict=True)]
        self._tally.wait(sum(self._waited))

    def _compute(self, worker: int, number: int, step: int) -> float:
        """Let one worker do its step; return when it is done."""
        cluster, segment = self._cluster, self._segment
        batch = segment.parts(number, worker, cluster.workers)
        self._copies.load(worker)
        gradient = cluster.compute(worker, batch, step)
        if gradient.targets:
            # of the mean loss over its own targets, and not a part of the whole batch's
            scale(cluster.model.storage.grads, batch.global_targets / gradient.targets)
            self._copies.step(worker, segment.lr(step))
        else:
            self._copies.skip(worker)
        self._targets[worker] += gradient.targets
        self._tally.add(gradient.totals(gradient.compute_s))
        self._staleness.add(worker, self._age)
        done_s = self._clocks[worker] + gradient.compute_s
        totals = gradient.totals(gradient.compute_s, self._waited[worker])
        segment.progress(Progress(number, worker, totals, gradient.norm, done_s))
        return done_s

    def _shares(self) -> list[float]:
        """Return each worker's share in the mean: by its targets since the last average; gossip counts all alike."""
        total, workers = sum(self._targets), self._cluster.workers
        if not self._local or not total:
            return [1 / workers] * workers
        return [own / total for own in self._targets]

    def _average(self) -> None:
        """Give everybody the mean, when the slowest has come and the sum has gone round."""
        self._copies.average(self._shares())
        self._ring()

    def _ring(self) -> None:
        """Let an all-reduce of the weights pass."""
        workers, speed, nbytes = self._cluster.workers, self._cluster.speed, self._cluster.nbytes
        end_s = max(self._clocks) + ring_all_reduce(workers, nbytes, speed.alpha_s, speed.beta_s_per_byte)
        self._clocks = [end_s] * workers
        self._messages += 2 * workers * (workers - 1)
        self._bytes += 2 * (workers - 1) * nbytes
        self._targets = [0] * workers
        self._apart, self._age = False, 0

    def _gossip(self, number: int, computed: list[float]) -> None:
        """Average with this step's neighbours, when they have come."""
        cluster = self._cluster
        workers = cluster.workers
        if cluster.sync.neighbours == "ring":
            self._copies.mix_ring()
            partners_of = [ring(worker, workers) for worker in range(workers)]
        else:
            partners = matching(workers, cluster.seed, number)
            self._copies.mix_pairs(partners)
            partners_of = [() if partner == worker else (partner,) for worker, partner in enumerate(partners)]
        message_s = cluster.speed.seconds(cluster.nbytes)
        self._clocks = [
            max([computed[worker], *(computed[other] for other in others)]) + len(others) * message_s
            for worker, others in enumerate(partners_of)
        ]
        self._apart = workers > 2
        messages = sum(len(others) for others in partners_of)
        self._messages += messages
        self._bytes += messages * cluster.nbytes

    def _meet(self) -> float:
        """Let the model have the mean of all; return how far they were apart."""
        disagreement = self._copies.meet(self._shares())
        if self._apart:
            self._ring()
        self._cluster.statistics.show()
        return disagreement
