"""What the tests of training out of step share: runs in segments that end anywhere, and what they
are compared with.
"""

import numpy as np
import pytest

from nnmpi import AsynchronousWorker, Numerics, Sync, Worker
from nnmpi.comm.synchrony.slow import Slow
from nnmpi.comm.synchrony.sync import MODES
from nnmpi.data import Loader
from tests.compose.small_runs import BATCH, BATCHES, ROWS, build, dataset, optimizer_of, weights
from tests.worker_options import grouped

# (epoch, first, stop) of six batches, of which the last one has 2 rows: with more ranks some have
# none.
SEGMENTS = ((0, 0, 4), (0, 4, BATCHES), (1, 0, 1), (1, 1, BATCHES))

# settings with which something happens in a few steps; 1 for any other
FEW = {"local_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
EVERY_MODE = tuple(
    Sync(name, **{setting: FEW.get(setting, 1) for setting in row.settings})
    for name, row in MODES.items()
    if row.combines != "all-reduce"
)


def name_of(sync):
    """Return a short name for a test."""
    return sync.sync + "".join(str(getattr(sync, name)) for name in sync.mode.settings[:1])


def skip_unless_fitting(group, sync):
    """Skip on all ranks what so many ranks cannot have."""
    if group.size < sync.mode.fewest:
        pytest.skip(f"{sync.describe()} on one rank")


def make(group, sync, name="sgd", slow="", **options):
    """Return a worker with a small model."""
    model = options.pop("model", None) or build()
    slowness = Slow.parse(slow, seed=7)
    return AsynchronousWorker(
        model, optimizer_of(model, name), group, sync, seed=3, slow=slowness, **grouped(**options)
    )


def loader_of(group, model, batch=BATCH, rows=ROWS):
    """Return a loader of this rank's part."""
    dtype = model.storage.data[0].dtype
    return Loader(dataset(rows), batch, group, dtype=dtype, workers=0)


def rate(step):
    """Return a learning rate that changes from step to step."""
    return 0.1 / (1 + step / 10)


def train(worker, segments=SEGMENTS, batch=BATCH, lr=rate, **options):
    """Train for some segments."""
    loader = loader_of(worker.group, worker.model, batch)
    count = loader.batches_per_epoch
    return [
        worker.run(loader, epoch, first, stop, epoch * count + first, lr, **options)
        for epoch, first, stop in segments
    ]


def all_reduced(group, name, model, clip=None, batches=2 * BATCHES):
    """Return the weights of a synchronous run."""
    worker = Worker(model, optimizer_of(model, name), group, seed=3, numerics=Numerics(clip=clip))
    loader = loader_of(group, model)
    step = 0
    for epoch in range(-(-batches // loader.batches_per_epoch)):
        for batch in loader.epoch(epoch):
            if step < batches:
                worker.step(batch, lr=rate(step))
                step += 1
    worker.release()
    return weights(model)


def everything(worker):
    """Return weights, running statistics and what is kept of the optimizer, from the ranks that
    have it. Collective.
    """
    model, optimizer = (state.to_dict(everywhere=True) for state in worker.state())
    return np.concatenate(
        [np.ravel(array) for state in (model, optimizer) for array in state.values()]
    )


def equal_on_all(group, values):
    """Return whether all ranks have the same bits. Collective."""
    return len(set(group.gather(values.tobytes().hex()))) == 1
