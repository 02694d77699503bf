"""Training sets whose samples stay where they are: every worker has a part of its own, and sees no other.

    none     any sample may come to any worker                    0 1 2 3 4 5 6 7 8 9 ...  shuffled anew in each epoch
    iid      a random part each, for the whole run                worker 0: 7 2 9    worker 1: 4 0 8    worker 2: 1 5 3
    label    the samples sorted by class, cut into parts          worker 0: 0 0 1    worker 1: 1 2 2    worker 2: 3 3 4

With iid, a worker's gradient estimates the gradient of the full set. With label it does not: it is biased towards that
worker's classes. Where workers do not wait for one another, a slow one contributes fewer updates, so its classes are
learned less (Zhao et al., "Federated learning with non-IID data", 2018; Koloskova et al., "Sharper convergence
guarantees for asynchronous SGD for distributed and federated learning", 2022).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.random import stream
from nnmpi.errors import UsageError
from nnmpi.shard import part

PARTITIONS = ("none", "iid", "label")


def check_partition(samples: int, partition: str, workers: int) -> None:
    """Check that there is such a partition, and that it leaves samples for everybody.

    Args:
        samples: of the training set.
        partition: one of PARTITIONS.
        workers: who share the samples.

    Raises:
        UsageError: if there is none, or more workers than samples.
    """
    if partition not in PARTITIONS:
        raise UsageError(f"partition {partition} does not exist; choose from: {', '.join(PARTITIONS)}")
    if partition != "none" and samples < workers:
        raise UsageError(
            f"partition {partition} shares {samples} training samples out over {workers} workers, so that some would "
            "have none; take fewer workers, or leave it out"
        )


def own_samples(labels: NDArray[np.int64], partition: str, seed: int, worker: int, workers: int) -> NDArray[np.int64]:
    """Return the places in the training set of the samples that a worker has; every sample is one worker's.

    Args:
        labels: (n,), of the whole training set.
        partition: "iid" or "label".
        seed: of the run.
        worker, workers: which of how many.

    Raises:
        UsageError: see `check_partition`.
    """
    check_partition(len(labels), partition, workers)
    shuffled = stream(seed, "partition").permutation(len(labels))
    if partition == "label":
        shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
    mine = part(len(labels), workers, worker)
    return np.asarray(shuffled[mine.start : mine.stop], np.int64)


def own_rows(own: NDArray[np.int64], seed: int, worker: int, first: int, count: int) -> NDArray[np.int64]:
    """Return which samples a worker takes as its numbers first..first+count-1 of the run.

    It goes through its own again and again, each time in another order, whatever the others do meanwhile.

    Args:
        own: (n,), the places that `own_samples` gave this worker.
        seed: of the run.
        worker: its number.
        first, count: the samples that it takes now, counted from the beginning of the run.
    """
    numbers = np.arange(first, first + count)
    taken = np.empty(count, np.int64)
    for passed in np.unique(numbers // len(own)):
        order = stream(seed, "own order", int(passed), worker).permutation(len(own))
        now = numbers // len(own) == passed
        taken[now] = own[order[numbers[now] % len(own)]]
    return taken
