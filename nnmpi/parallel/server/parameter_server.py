"""A parameter server: it holds a shard of the weights and of the optimizer's state, and workers push and pull.

    worker  compute | push ----.                   .---> pull | compute ...
    server                      `-> it waits ... one update -'        (BSP and SSP: when a worker may go on;
    worker  compute ..... | push -->'              `---> pull           ASP: at once)

BSP, SSP and ASP are one implementation (Li et al., "Scaling distributed machine learning with the parameter server",
2014; Ho et al., 2013, see `synchrony.consistency`): gradients wait until some worker may go on; then all that wait make
one update, in the order of their tasks, and every worker that may go on gets the weights. So no worker sees half an
update.

A worker's gradient is that of (sum of the losses of its rows) / (rows of the whole global batch), so that the gradients
of all parts of a batch add up to the batch's. It stands for the share q_i = its rows / the batch's rows. An update from
gradients g_i stands for q = sum of q_i, and is done with

    gradient   (sum of g_i) / q        a mean over rows, of the right size for Adam
    rate       lr * q                  for SGD together: lr * (sum of g_i)

For a whole batch, q = 1, this is bit for bit what an optimizer does with the all-reduced sum. With backup workers the
first gradients stand for the whole batch: the same mean, with the full rate. (So ASP with N workers has an N-th of the
rate in an update, where many papers give each worker's gradient the full one.)

For plain SGD it makes no difference that gradients which wait become one update, as nobody reads the weights meanwhile.
With momentum and Adam it does: they forget, and count their steps, by update, of which ASP does N for one of BSP. And
staleness is counted in updates: gradients that waited together, all computed on the newest weights, have staleness 0,
however far ahead their workers were; those who count every gradient as an update have up to N - 1 there. Under a bound
above 0 several servers may see gradients come in different orders, and so do slightly different numbers of updates.

Staleness-aware rate: Zhang et al. ("Staleness-aware async-SGD for distributed deep learning", 2016) divide the rate of
a gradient of staleness tau by tau. Here a gradient has a share of about 1/N already, which fits the usual staleness
N - 1. So only the excess is punished: gradient and share are multiplied by f = min(1, (N - 1) / tau).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nnmpi import timeline
from nnmpi.backend.array import Array, namespace
from nnmpi.errors import CommError
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.storage import Arrays
from nnmpi.parallel.server.shards import Shard
from nnmpi.synchrony.consistency import ConsistencyController, Grant, Task
from nnmpi.synchrony.staleness import Staleness
from nnmpi.tensor.flat import FlatStorage


@dataclass(frozen=True)
class Push:
    """What comes with a gradient.

    Attributes:
        task: what it was computed on.
        rows: of the task, maybe 0.
        targets: how many of its labels count, maybe 0; global_targets: of the whole batch.
        lr: the learning rate of that batch.
        version: of this server's weights that it was computed on.
        loss_sum: the sum of the targets' losses; score_sum: how many of them were predicted, or
            how well.
        norm: the gradient's length, scaled to the whole batch's size or not, as the worker reports it.
        compute_s, wait_s, input_s: how long the worker computed, and waited before for the weights and for the batch.
        signal: the number of the signal that the worker got, 0 for none: the segment ends with whole batches.
        broken: whether the gradient is of no use; the segment ends at once.
    """

    task: Task
    rows: int
    targets: int
    global_targets: int
    lr: float
    version: int
    loss_sum: float
    score_sum: float
    norm: float
    compute_s: float
    wait_s: float
    input_s: float = 0.0
    signal: int = 0
    broken: bool = False


@dataclass(frozen=True)
class Reply:
    """What comes with the weights when a worker may go on; the weights are those in `ParameterServer.master` then.

    Attributes:
        worker: the worker that gets it.
        task: its next task, from the server that assigns tasks; None from the others, and at the end.
        over: whether the segment is over for it.
        version: of the weights.
        slowest: the steps that the slowest worker has done.
        signal: the number of the signal that this server's rank got, 0 for none. The worker passes it on to all servers
            with its next gradient.
    """

    worker: int
    task: Task | None
    over: bool
    version: int
    slowest: int
    signal: int = 0


class ParameterServer:
    """The weights and the optimizer's state of one shard, and what becomes of gradients. It sends no messages.

        server.open(first, stop, bound)
        send(server.release())                          all workers get the weights and begin
        while not server.controller.over:
            server.push(worker, push, gradient)         one or several that have arrived
            send(server.release())
        server.close()

    Args:
        shard: what it holds.
        storage: the model's; its values are taken in `open` and given back in `close`, and may change meanwhile.
        optimizer: of the storage's buffers; its state of the shard is updated in place.
        controller: decides which worker may go on, and gives it its task.
        workers: how many there are.
        adapt: whether stale gradients count less (the staleness-aware rate above).

    Attributes:
        master: the weights, one array per flat buffer, maybe empty.
        version: of the weights: the number of updates since the server was made.
        staleness: of the gradients that were used since the last `take_staleness`.
        signal: returns the number of the signal (SIGTERM ...) that this rank got, 0 for none.
    """

    def __init__(
        self,
        shard: Shard,
        storage: FlatStorage,
        optimizer: Optimizer,
        controller: ConsistencyController,
        workers: int,
        adapt: bool = False,
    ) -> None:
        self.shard, self.storage, self.controller, self.workers, self.adapt = shard, storage, controller, workers, adapt
        self.master = _zeros(shard.views(storage.data))
        self._sums = _zeros(self.master)
        self._scaled = _zeros(self.master) if adapt else []
        self._model_optimizer = optimizer
        self.optimizer = optimizer.over(Arrays(self.master, self._sums, storage.groups), shard.parts)
        self._blocks = self.optimizer.cut()
        self.version = 0
        self.staleness = Staleness(workers)
        self.signal: Callable[[], int] = lambda: 0
        self._pending: dict[int, tuple[Push, Sequence[Array]]] = {}
        self._used = Counter[int]()  # gradients by worker
        self._unseen = [0] * workers  # how many of the others' were used when the worker read the weights

    @property
    def updates(self) -> int:
        """The number of updates since the server was made."""
        return self.version

    def take_staleness(self) -> Staleness:
        """Return how stale gradients were, and count anew from now on."""
        found, self.staleness = self.staleness, Staleness(self.workers)
        return found

    def open(self, first: int, stop: int, bound: int | None) -> None:
        """Begin a segment of batches first..stop-1 with the weights that are in the storage now.

        Args:
            first, stop, bound: see `ConsistencyController.open`.
        """
        for mine, theirs in zip(self.master, self.shard.views(self.storage.data), strict=True):
            mine[...] = theirs
        self.optimizer.steps = self._model_optimizer.steps
        self.controller.open(first, stop, bound)

    def push(self, worker: int, push: Push, grads: Sequence[Array] | None) -> None:
        """Take a worker's gradient.

        Args:
            worker: whose it is.
            push: what comes with it. After a signal no further batch is begun; after a broken gradient no further task.
            grads: one array per flat buffer, as long as the shard's part of it. They must stay as they are until
                `release` has let a worker go on. None if the gradient has no rows, or is broken.

        Raises:
            CommError: for a worker that may not go on yet.
        """
        in_time = self.controller.arrive(worker)
        if push.broken:
            self.controller.close(at_once=True)
        elif in_time:
            self._pending[worker] = (push, [] if grads is None else grads)
        if push.signal:
            self.controller.close()

    def release(self) -> list[Reply]:
        """Return replies to all workers that may go on now, in their order.

        If there are any, all gradients that wait make one update first.

        Raises:
            CommError: when a worker would be further ahead than the bound, or a gradient is too old for it.
        """
        grants = self.controller.release()
        if self.controller.update_due:
            self._take()
        return [self._reply(grant) for grant in grants]

    def close(self) -> None:
        """End a segment: put the weights into the storage, and the number of steps into the model's optimizer."""
        for mine, theirs in zip(self.master, self.shard.views(self.storage.data), strict=True):
            theirs[...] = mine
        self._model_optimizer.steps = self.optimizer.steps

    def _reply(self, grant: Grant) -> Reply:
        self._unseen[grant.worker] = self._used.total() - self._used[grant.worker]
        return Reply(grant.worker, grant.task, grant.over, self.version, self.controller.clocks.slowest, self.signal())

    def _take(self) -> None:
        """Make one update of all gradients that wait."""
        # In the order of their tasks, and not of arrival: so equal gradients give equal bits.
        workers = sorted(self._pending, key=lambda worker: self._pending[worker][0].task)
        found = [self._pending[worker] for worker in workers]
        self._pending.clear()
        weights = []
        for worker, (push, _) in zip(workers, found, strict=True):
            stale = self.version - push.version
            self.staleness.add(worker, stale)
            weights.append(min(1.0, (self.workers - 1) / stale) if self.adapt and stale else 1.0)
            self._used[worker] += 1
        for worker in workers:
            self._check_age(worker)
        pushes = [push for push, _ in found]
        share = _share(pushes, weights)
        if share > 0:
            self._add([grads for _, grads in found], pushes, weights)
            self._update(share, _rate(pushes, weights))

    def _add(self, grads: Sequence[Sequence[Array]], pushes: Sequence[Push], weights: Sequence[float]) -> None:
        """Set the sums to the gradients times their weights; gradients without targets are left out.

        Args:
            grads: for each worker, one array per flat buffer.
            pushes, weights: for each worker.
        """
        is_first = True
        for arrays, push, weight in zip(grads, pushes, weights, strict=True):
            if not push.targets:
                continue
            for i, (total, array) in enumerate(zip(self._sums, arrays, strict=True)):
                xp = namespace(total)
                if weight != 1.0:
                    array = xp.multiply(array, weight, out=self._scaled[i])
                if is_first:
                    total[...] = array
                else:
                    xp.add(total, array, out=total)
            is_first = False

    def _update(self, share: float, lr: float) -> None:
        """Update the weights from the sums, which stand for this share of a batch, with its learning rate."""
        if share != 1.0:
            for total in self._sums:
                namespace(total).divide(total, share, out=total)
        self.optimizer.lr = lr if self.controller.backup else lr * share
        with timeline.span("update of the shard", "update", timeline.REDUCE):
            self.optimizer.update(self._blocks, self._frozen())
        self.version += 1

    def _frozen(self) -> list[Array]:
        """Return views of the weights that belong to parameters that need no gradient now."""
        found = []
        for span in self.storage.spans:
            part = self.shard.parts[span.buffer]
            if not span.parameter.requires_grad and span.start < part.stop and part.start < span.stop:
                view = slice(max(0, span.start - part.start), span.stop - part.start)
                found.append(self.master[span.buffer][view])
        return found

    def _check_age(self, worker: int) -> None:
        """Check that not too many gradients of others came between reading the weights and this worker's use of them.

        With a bound S each of the other workers was at most S steps behind when the weights were read, and can have
        done S + 1 more than this one since: together at most (2S + 1) (N - 1). Compare Ho et al. (2013), section 4.
        """
        bound = self.controller.bound
        between = self._used.total() - self._used[worker] - self._unseen[worker]
        if bound is not None and between > (2 * bound + 1) * (self.workers - 1):
            raise CommError(
                f"worker {worker}'s gradient is used after {between} of the others', more than "
                f"{(2 * bound + 1) * (self.workers - 1)}, which a bound of {bound} steps allows"
            )


def _share(pushes: Sequence[Push], weights: Sequence[float]) -> float:
    """Return for how much of a batch the gradients stand: exactly 1.0 for a whole one."""
    # Targets are whole numbers, whose sum is exact; weighted shares are rounded.
    if all(weight == 1.0 for weight in weights):
        targets = Counter[int]()
        for push in pushes:
            targets[push.global_targets] += push.targets
        return float(sum(count / max(1, whole) for whole, count in targets.items()))
    return float(sum(w * push.targets / max(1, push.global_targets) for push, w in zip(pushes, weights, strict=True)))


def _rate(pushes: Sequence[Push], weights: Sequence[float]) -> float:
    """Return the mean of the learning rates, each weighted by its gradient's share; bit for bit theirs if equal."""
    rates = {push.lr for push in pushes if push.targets}
    if len(rates) == 1:
        return rates.pop()
    shares = [w * push.targets / max(1, push.global_targets) for push, w in zip(pushes, weights, strict=True)]
    return sum(push.lr * share for push, share in zip(pushes, shares, strict=True)) / sum(shares)


def _zeros(arrays: Sequence[Array]) -> list[Array]:
    return [namespace(array).zeros(array.shape, array.dtype) for array in arrays]
