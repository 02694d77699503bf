"""A parameter server: it holds the weights and the optimizer's state, and workers push and pull.

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

For a whole batch, q = 1, this is bit for bit what an optimizer does with the all-reduced sum. (So ASP with N workers
has an N-th of the rate in an update, where many papers give each worker's gradient the full one.)

For plain SGD it makes no difference that gradients which wait become one update, as nobody reads the weights meanwhile.
With momentum and Adam it does: they forget, and count their steps, by update, of which ASP does N for one of BSP. And
staleness is counted in updates: gradients that waited together, all computed on the newest weights, have staleness 0,
however far ahead their workers were; those who count every gradient as an update have up to N - 1 there.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nnmpi import timeline
from nnmpi.backend.array import Array, namespace
from nnmpi.optim.optimizer import Arrays, Optimizer
from nnmpi.synchrony.consistency import ConsistencyController, Task
from nnmpi.synchrony.staleness import Staleness
from nnmpi.tensor.parameter import FlatStorage


@dataclass(frozen=True, kw_only=True)
class Push:
    """What comes with a gradient.

    Attributes:
        batch, part: the task that it was computed for.
        samples, targets: of the task, maybe 0: its rows, and how many of its labels count.
        global_targets: of the whole batch.
        lr: the learning rate of that batch.
        loss_sum, score_sum: over the targets.
        norm: the gradient's length, scaled to the whole batch's size or not, as the worker reports it.
        compute_s, sync_s, input_s: how long the worker computed, and waited before for the weights and for the batch.
        signal: the number of the signal that the worker got, 0 for none: the segment ends with whole batches.
        broken: whether the gradient is of no use; the segment ends at once.
        segment, sequence, version: see `push_pull`, which fills them in; the weights' version is the one that the
            gradient was computed on.
    """

    batch: int
    part: int
    samples: int
    targets: int
    global_targets: int
    lr: float
    loss_sum: float = 0.0
    score_sum: float = 0.0
    norm: float = 0.0
    compute_s: float = 0.0
    sync_s: float = 0.0
    input_s: float = 0.0
    signal: int = 0
    broken: bool = False
    segment: int = 0
    sequence: int = 0
    version: int = 0

    @property
    def share(self) -> float:
        """The part of its batch's targets that the gradient stands for."""
        return self.targets / max(1, self.global_targets)


class ParameterServer:
    """The weights and the optimizer's state, and what becomes of gradients. It sends no messages.

        server.open(first, stop, bound)
        send(server.release())                          all workers get the weights and begin
        while not server.controller.over:
            server.push(worker, push, gradient)         one or several that have arrived
            send(server.release())
        server.close()

    Args:
        storage: the model's; its values are taken in `open` and given back in `close`, and may change meanwhile.
        optimizer: of the storage's buffers; its state is updated in place.
        workers: how many there are.

    Attributes:
        controller: decides which worker may go on, and gives it its task.
        master: the weights, one array per flat buffer.
        version: of the weights: the number of updates since the server was made.
        staleness: of the gradients that were used since `open`.
    """

    def __init__(self, storage: FlatStorage, optimizer: Optimizer, workers: int) -> None:
        self.controller, self._storage, self._model_optimizer = ConsistencyController(workers), storage, optimizer
        self.master, self._sums = (
            [namespace(array).zeros(array.shape, array.dtype) for array in storage.data] for _ in range(2)
        )
        self.optimizer = optimizer.over(Arrays(self.master, self._sums, storage.groups))
        self._blocks = self.optimizer.cut()
        self.version = 0
        self.staleness = Staleness(workers)
        self._pending: dict[int, tuple[Push, Sequence[Array]]] = {}

    def open(self, first: int, stop: int, bound: int | None) -> None:
        """Begin a segment of batches first..stop-1 with the weights that are in the storage now."""
        for mine, theirs in zip(self.master, self._storage.data, strict=True):
            mine[...] = theirs
        self.optimizer.steps = self._model_optimizer.steps
        self.staleness = Staleness(len(self.controller.clocks.steps))
        self.controller.open(first, stop, bound)

    def push(self, worker: int, push: Push, grads: Sequence[Array]) -> None:
        """Take a worker's gradient. After a signal no further batch is begun; after a broken gradient no further task.

        Args:
            worker: whose it is.
            push: what comes with it.
            grads: one array per flat buffer, which must stay as it is until `release` has let a worker go on.

        Raises:
            CommError: for a worker that may not go on yet.
        """
        self.controller.arrive(worker)
        if push.broken:
            self.controller.close(at_once=True)
        else:
            self._pending[worker] = (push, grads)
        if push.signal:
            self.controller.close()

    def release(self) -> dict[int, Task | None]:
        """Return all workers that may go on now; if there are any, all gradients that wait make one update first."""
        released = self.controller.release()
        if released:
            self._take()
        return released

    def close(self) -> None:
        """End a segment: put the weights into the storage, and the number of steps into the model's optimizer."""
        for mine, theirs in zip(self.master, self._storage.data, strict=True):
            theirs[...] = mine
        self._model_optimizer.steps = self.optimizer.steps

    def _take(self) -> None:
        """Make one update of all gradients that wait, in the order of their tasks: so equal gradients give equal bits.

        The order in which they arrive differs from run to run.
        """
        for worker, (push, _) in self._pending.items():
            self.staleness.add(worker, self.version - push.version)
        found = sorted(self._pending.values(), key=lambda each: (each[0].batch, each[0].part))
        found = [(push, grads) for push, grads in found if push.targets]
        self._pending.clear()
        if not found:
            return
        for push, grads in found:
            for total, array in zip(self._sums, grads, strict=True):
                if push is found[0][0]:
                    total[...] = array
                else:
                    namespace(total).add(total, array, out=total)
        targets = Counter[int]()  # whole numbers, whose sum is exact
        for push, _ in found:
            targets[push.global_targets] += push.targets
        share = sum(count / max(1, whole) for whole, count in targets.items())
        rates = {push.lr for push, _ in found}
        # Equal rates stay as they are, bit for bit.
        lr = rates.pop() if len(rates) == 1 else sum(push.lr * push.share for push, _ in found) / share
        if share != 1.0:
            for total in self._sums:
                namespace(total).divide(total, share, out=total)
        self.optimizer.lr = lr * share
        frozen = [span for span in self._storage.spans if not span.parameter.requires_grad]
        with timeline.span("update of the server", "update", timeline.REDUCE):
            self.optimizer.update(self._blocks, [self.master[span.buffer][span.start : span.stop] for span in frozen])
        self.version += 1
