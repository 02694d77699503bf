"""The order of samples and their ranks: pure functions, so every layout sees the same batches.

An epoch's order is a permutation of the samples. It is cut into global batches; the last may be
short. The rows of a global batch are sharded contiguously over the ranks:

    order     7 2 9 0 | 4 8 1 5 | 3 6
    rank 0    7 2     | 4 8     | 3
    rank 1        9 0 |     1 5 |   6

With `in_blocks`, an epoch's order follows where the samples are stored, for files that are slow at
single rows: blocks of consecutive rows are shuffled, and then the samples within each pool of them:

    blocks of 2    0 1 | 2 3 | 4 5 | 6 7 | 8 9
    shuffled       6 7 | 2 3 | 8 9 | 0 1 | 4 5
    pools of 3     6 9 2 7 8 3     | 4 0 1 5

A batch then reads of POOL_BLOCKS blocks, and is less random than b samples of all. Where samples
beside one another are alike, with a correlation r in their block, the mean of b samples has
1 + (b - 1) r / POOL_BLOCKS times the variance; where the order of the file is random, r is 0.

A batch is cut into microbatches first. Each is sharded, or given to one rank
(`whole_microbatches`):

    2 microbatches      7 2 | 9 0        rank 0    7   | 9        whole    rank 0    7 2
                                         rank 1      2 |   0               rank 1        | 9 0

A partition fixes each worker's samples for the run:

    none     any worker may get any sample            shuffled again in each epoch
    iid      a random part per worker                 0: 7 2 9    1: 4 0 8    2: 1 5 3
    label    samples sorted by class, cut in parts    0: 0 0 1    1: 1 2 2    2: 3 3 4

With iid, a worker's gradient estimates the gradient of the full set. With label it does not: it is
biased towards that worker's classes. In asynchronous training a straggler contributes fewer
updates, so its classes are learned less (Zhao et al., "Federated learning with non-IID data", 2018;
Koloskova et al., "Sharper convergence guarantees for asynchronous SGD for distributed and federated
learning", 2022).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nnmpi.backend.array import Integers
from nnmpi.backend.random import stream
from nnmpi.base.errors import UsageError
from nnmpi.base.shard import part, split

POOL_BLOCKS = 16  # blocks whose samples are shuffled together: more need more memory or more reads
POOL = 50  # batches sorted together: a larger pool saves padding and makes batches less random


def order(n: int, seed: int, epoch: int, shuffle: bool = True) -> Integers:
    """Return the order of an epoch's samples: (n,), a permutation if shuffled.

    Args:
        n: samples of the training set.
        seed: of the run.
        epoch: from 0; each has its own order.
        shuffle: False keeps the data set's order.
    """
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    return stream(seed, "order", epoch).permutation(n)


def in_blocks(n: int, rows: int, seed: int, epoch: int, places: Integers | None = None) -> Integers:
    """Return an epoch's order for samples that are read in blocks: (n,); see the module.

    Args:
        n: samples of the training set.
        rows: samples of a block.
        seed, epoch: as for `order`.
        places: (n,), where the samples are stored; None for the data set's order.
    """
    stored = np.arange(n, dtype=np.int64) if places is None else np.argsort(places)
    count = -(-n // rows)
    draws = stream(seed, "order in blocks", epoch)
    blocks = draws.permutation(count)
    pools = list[Integers]()
    for pool in split(count, max(1, -(-count // POOL_BLOCKS))):
        samples = [stored[block * rows :][:rows] for block in blocks[pool.start : pool.stop]]
        pools.append(draws.permutation(np.concatenate([stored[:0], *samples])))
    return np.concatenate([stored[:0], *pools])


def balanced_order(labels: Integers, seed: int, epoch: int) -> Integers:
    """Return an epoch's order in which each class has equally many rows: (n,), with repeats.

    Samples of a rare class come several times before one of them comes once more; of a frequent
    class each epoch has other ones. Where n is no multiple of the classes, some have a row more,
    other ones in each epoch.

    Args:
        labels: (n,), the class of each sample; classes without samples have no rows.
        seed, epoch: as for `order`.
    """
    draws = stream(seed, "balanced order", epoch)
    classes = draws.permutation(np.unique(labels))
    rows = list[Integers]()
    for number, share in zip(classes, split(len(labels), len(classes)), strict=True):
        own = np.flatnonzero(labels == number)
        turns = [draws.permutation(own) for _ in range(-(-len(share) // len(own)))]
        rows.append(np.concatenate(turns)[: len(share)])
    return draws.permutation(np.concatenate(rows))


def by_length(
    epoch_order: Integers, lengths: Integers, batch_size: int, seed: int, epoch: int
) -> Integers:
    """Return an epoch's order in which the samples of a batch have similar lengths.

    Samples are sorted by length in pools of POOL batches. Then all full batches are shuffled:

        a pool of 4 batches of 2, by length    3 9 | 1 8 | 2 7 | 9 4
        sorted                                 1 2 | 3 4 | 7 8 | 9 9
        shuffled                               7 8 | 1 2 | 9 9 | 3 4

    Args:
        epoch_order: the result of `order`.
        lengths: (n,), of all samples.
        batch_size: rows of a global batch.
        seed, epoch: as for `order`.
    """
    pools = np.arange(len(epoch_order)) // (POOL * batch_size)
    result = epoch_order[np.lexsort((lengths[epoch_order], pools))]  # by pool, then by length
    full = len(result) // batch_size
    shuffled = result[: full * batch_size].reshape(full, batch_size)
    shuffled = shuffled[stream(seed, "batches by length", epoch).permutation(full)]
    return np.concatenate([shuffled.reshape(-1), result[full * batch_size :]])


@dataclass(frozen=True)
class Cut:
    """A rank's rows of one microbatch.

    Attributes:
        start, stop: rows start..stop-1 of the rank's rows of the global batch.
        first_row: the index of row `start` in the global batch.
        number: the microbatch's index in the global batch.
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
    """Return a rank's rows of each microbatch.

    The global batch is split into microbatches first and each is sharded over the ranks, so that
    microbatches hold the same samples under every layout. No microbatch is empty, so a short batch
    may have fewer microbatches. With more ranks than rows in a microbatch, some ranks get none.

    Args:
        global_rows: rows of the global batch.
        rank, world: the rank's number among the data-parallel ranks, and the number of these.
        microbatches: the number of microbatches per full batch.
        whole_microbatches: give each rank whole microbatches, possibly none. Their shapes then do
            not depend on the layout.
    """
    micros = split(global_rows, min(microbatches, global_rows))
    cuts: list[Cut] = []
    start = 0
    for number in part(len(micros), world, rank) if whole_microbatches else range(len(micros)):
        rows = part(len(micros[number]), *((1, 0) if whole_microbatches else (world, rank)))
        cuts.append(Cut(start, start + len(rows), micros[number].start + rows.start, number))
        start += len(rows)
    return tuple(cuts)


PARTITIONS = ("none", "iid", "label")


def check_partition(samples: int, partition: str, workers: int) -> None:
    """Raise UsageError for an unknown partition, and for more workers than samples."""
    if partition not in PARTITIONS:
        raise UsageError(f"partition {partition} is unknown; choose one of {', '.join(PARTITIONS)}")
    if partition != "none" and samples < workers:
        raise UsageError(
            f"partition {partition} shares {samples} training samples out over {workers} workers,"
            " so some would have none; use fewer workers, or leave it out"
        )


@lru_cache(maxsize=4)
def row_owners(global_rows: int, world: int, microbatches: int) -> Integers:
    """Return the rank of each row of a global batch: (global_rows,)."""
    result = np.empty(global_rows, np.int64)
    for rank in range(world):
        for cut in cut_batch(global_rows, rank, world, microbatches):
            result[cut.first_row : cut.first_row + cut.stop - cut.start] = rank
    return result


def partition_samples(
    labels: Integers, partition: str, seed: int, owners: Integers
) -> list[Integers]:
    """Partition the training set: return each worker's samples, as indices.

    Args:
        labels: (n,), of the full training set.
        partition: "iid" or "label".
        seed: of the run.
        owners: (n,), the worker of each row of an epoch. A worker gets one sample for each of its
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
