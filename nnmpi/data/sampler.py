"""Which rank sees which sample when: pure functions, so every layout sees the same batches.

    order     7 2 9 0 | 4 8 1 5 | 3 6      a permutation of the samples, cut into global batches (the last is short)
    rank 0    7 2     | 4 8     | 3        the rows of a global batch are shared out in contiguous parts
    rank 1        9 0 |     1 5 |   6

With microbatches each of these is cut first, and its pieces are sharded, or (`whole`) given out
whole:

    2 microbatches      7 2 | 9 0        rank 0    7   | 9        whole    rank 0    7 2
                                         rank 1      2 |   0               rank 1        | 9 0

Samples may also stay where they are: every worker has a part of its own, and sees no other.

    none     any sample may come to any worker                    0 1 2 3 4 5 6 7 8 9 ...  shuffled anew in each epoch
    iid      a random part each, for the whole run                worker 0: 7 2 9    worker 1: 4 0 8    worker 2: 1 5 3
    label    the samples sorted by class, cut into parts          worker 0: 0 0 1    worker 1: 1 2 2    worker 2: 3 3 4

With iid, a worker's gradient estimates the gradient of the full set. With label it does not: it is
biased towards that worker's classes. Where workers do not wait for one another, a slow one
contributes fewer updates, so its classes are learned less (Zhao et al., "Federated learning with
non-IID data", 2018; Koloskova et al., "Sharper convergence guarantees for asynchronous SGD for
distributed and federated learning", 2022).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nnmpi.backend.array import Integers
from nnmpi.backend.random import stream
from nnmpi.errors import UsageError
from nnmpi.shard import part, split

POOL = 50  # batches that are sorted together: more are more alike, and less random


def order(n: int, seed: int, epoch: int, shuffle: bool = True) -> Integers:
    """Return the order of an epoch's samples: (n,), a permutation if shuffled.

    Args:
        n: samples of the training set.
        seed: of the run.
        epoch: from 0; every epoch has an order of its own.
        shuffle: whether the order is random.
    """
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    return stream(seed, "order", epoch).permutation(n)


def by_length(
    epoch_order: Integers, lengths: Integers, batch_size: int, seed: int, epoch: int
) -> Integers:
    """Return an epoch's order in which the samples of a batch have about the same length.

    Each POOL batches are sorted by length, and all batches but a short last one are shuffled again:

        lengths    3 9 1 8 | 2 7 9 4     ->     1 2 | 3 4 | 7 8 | 9 9    ->    7 8 | 1 2 | 9 9 | 3 4

    Args:
        epoch_order: of `order`.
        lengths: (n,), of all samples.
        batch_size: rows of a global batch.
        seed, epoch: as for `order`.
    """
    pool = POOL * batch_size
    sorted_pools = [epoch_order[first : first + pool] for first in range(0, len(epoch_order), pool)]
    sorted_pools = [
        sorted_pool[np.argsort(lengths[sorted_pool], kind="stable")] for sorted_pool in sorted_pools
    ]
    result = np.concatenate([epoch_order[:0], *sorted_pools])
    full = len(result) // batch_size
    shuffled = result[: full * batch_size].reshape(full, batch_size)
    shuffled = shuffled[stream(seed, "batches by length", epoch).permutation(full)]
    return np.concatenate([shuffled.reshape(-1), result[full * batch_size :]])


@dataclass(frozen=True)
class Cut:
    """One microbatch: rows start..stop-1 of the rank's, from row `first_row` of the batch.

    Attributes:
        number: which of the global batch's microbatches it is.
    """

    start: int
    stop: int
    first_row: int
    number: int = 0


@lru_cache(maxsize=16)  # an epoch has two sizes of batches
def cut_batch(
    global_rows: int,
    rank: int = 0,
    world: int = 1,
    microbatches: int = 1,
    whole_microbatches: bool = False,
) -> tuple[Cut, ...]:
    """Return each microbatch's rows, among the rank's rows and in the global batch.

    The global batch is split into microbatches first, each of which is sharded over the ranks, so
    that microbatches hold the same samples under every layout. A microbatch has at least one row,
    so a short batch may have fewer of them; some ranks have none of its rows when there are more
    ranks than rows.

    Args:
        global_rows: of the batch.
        rank, world: which of how many data-parallel ranks.
        microbatches: into how many a batch is cut.
        whole_microbatches: give each rank whole microbatches instead, possibly none; their shapes then do not
            depend on the layout.
    """
    micros = split(global_rows, min(microbatches, global_rows))
    cuts: list[Cut] = []
    start = 0
    for number in part(len(micros), world, rank) if whole_microbatches else range(len(micros)):
        mine = part(len(micros[number]), *((1, 0) if whole_microbatches else (world, rank)))
        cuts.append(Cut(start, start + len(mine), micros[number].start + mine.start, number))
        start += len(mine)
    return tuple(cuts)


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
        raise UsageError(
            f"partition {partition} does not exist; choose from: {', '.join(PARTITIONS)}"
        )
    if partition != "none" and samples < workers:
        raise UsageError(
            f"partition {partition} shares {samples} training samples out over {workers} workers,"
            " so that some would have none; take fewer workers, or leave it out"
        )


@lru_cache(maxsize=4)
def row_owners(global_rows: int, world: int, microbatches: int) -> Integers:
    """Return which rank takes each row of a global batch: (global_rows,)."""
    result = np.empty(global_rows, np.int64)
    for rank in range(world):
        for cut in cut_batch(global_rows, rank, world, microbatches):
            result[cut.first_row : cut.first_row + cut.stop - cut.start] = rank
    return result


def partition_samples(
    labels: Integers, partition: str, seed: int, owners: Integers
) -> list[Integers]:
    """Return each worker's own samples, as indices into the training set; a partition.

    Args:
        labels: (n,), of the whole training set.
        partition: "iid" or "label".
        seed: of the run.
        owners: (n,), which worker takes each row of an epoch: it has as many samples as it takes
            rows.
    """
    shuffled = stream(seed, "partition").permutation(len(labels))
    if partition == "label":
        shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return np.split(shuffled.astype(np.int64), np.cumsum(np.bincount(owners))[:-1])


def partition_order(
    shards: Sequence[Integers], owners: Integers, seed: int, epoch: int
) -> Integers:
    """Return an epoch's order in which each row holds a sample of its worker, (n,).

    Args:
        shards, owners: see `partition_samples`.
        seed, epoch: as for `order`.
    """
    result = np.empty(len(owners), np.int64)
    for worker, shard in enumerate(shards):
        result[owners == worker] = shard[
            stream(seed, "own order", epoch, worker).permutation(len(shard))
        ]
    return result
