"""Workers with samples of their own: in step they are one run, through servers and by
all-reduce.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from nnmpi import AsynchronousWorker, Sync, Worker
from nnmpi.comm.synchrony.slow import Slow
from nnmpi.data import Loader
from tests.compose.small_runs import BATCH, BATCHES, build, dataset, optimizer_of, weights

pytestmark = pytest.mark.mpi

EPOCHS = 2


def loader_of(group):
    where = {"rank": group.rank, "world": group.size, "partition": "label"}
    return Loader(dataset(), BATCH, dtype="float64", workers=0, **where)


def train(worker, loader):
    """Train for two epochs and return the weights."""
    for epoch in range(EPOCHS):
        worker.run(loader, epoch, 0, BATCHES, epoch * BATCHES, lambda step: 0.1 / (1 + step))
    return weights(worker.model).copy()


def test_in_step_own_samples_make_one_run_however_gradients_travel(group):
    slow, result = Slow.parse("ms=0.3;probability=0.3,factor=3"), []
    for sync in (Sync("ssp", staleness=0), None):
        model = build()
        given = (model, optimizer_of(model, "momentum"), group)
        worker = Worker(*given) if sync is None else AsynchronousWorker(*given, sync, slow=slow)
        result.append(train(worker, loader_of(group)))
        worker.release()
    close = bool(np.allclose(result[1], result[0], rtol=1e-9, atol=1e-12))
    assert group.gather(close) == [True] * group.size


def test_without_a_bound_everybody_keeps_to_its_own_samples(group, monkeypatch):
    """A slow rank does fewer steps, and nobody does them on its samples in its place."""
    seen = []
    part = Loader.part

    def noted(self, *args, **options):
        batch = part(self, *args, **options)
        seen.extend(batch.indices.tolist())
        return replace(batch)

    monkeypatch.setattr(Loader, "part", noted)
    model = build()
    slow = Slow.parse(f"ms=2;rank={group.size - 1},factor=5")
    worker = AsynchronousWorker(model, optimizer_of(model), group, Sync("asp"), slow=slow)
    train(worker, loader_of(group))
    worker.release()
    local = loader_of(group)._shards[group.rank].tolist()
    counts = Counter(seen)
    even = not seen or max(counts.values()) - min(counts[sample] for sample in local) <= 1
    assert group.gather([set(seen) <= set(local), even]) == [[True, True]] * group.size, (
        local,
        counts,
    )
