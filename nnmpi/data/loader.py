"""Loader: the batches of one rank, prepared by background threads where that pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nnmpi.backend.array import Array
from nnmpi.data.dataset import Samples, count_targets
from nnmpi.data.prefetch import Prefetch
from nnmpi.data.sampler import PARTITIONS, batches_per_epoch, by_length, order, own_rows, own_samples, rows
from nnmpi.data.transform import Transform, can_split, split_transform
from nnmpi.errors import ShapeError, UsageError
from nnmpi.errors import whole as whole_number
from nnmpi.shard import split

# A part of a batch that is not larger takes less time to make than to hand over from a thread. Measured on 2 cores, one
# rank: without the thread training takes 0.57 of the time with an mlp and 512 bytes, 0.86 with a cnn and 8 KiB.
SMALL_BYTES = 2**16


@dataclass(frozen=True)
class Cut:
    """One microbatch: rows start..stop-1 of the rank's part; the first is row `first_row` of the global batch.

    Attributes:
        number: which of the global batch's microbatches it is.
    """

    start: int
    stop: int
    first_row: int
    number: int = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        x: (rows, *sample_shape), the loader's dtype, C-contiguous. A rank may have 0 rows.
        y: (rows, ...), int64, one label or several for each sample; a negative one does not count (see
            `dataset.IGNORED`). Of quantities the loader's dtype.
        indices: (rows,), int64, the samples' places in the data set.
        cuts: the microbatches that the rows belong to; one of all rows, if the loader makes no microbatches.
        global_rows: rows of the global batch.
        microbatches: how many there are of the global batch, over all ranks.
        epoch, number: which batch of which epoch this is.
        targets: of each microbatch of the global batch, how many labels count; by default those of full rows. Losses
            are divided by `global_targets`, their sum.
        host_y: the labels on the host, where x and y are on a device; else None.
        length: how many positions the samples have, where x and y have some of them alone (see `parallel.sequence`);
            else None.
    """

    x: Array
    y: NDArray[Any]
    indices: NDArray[np.int64]
    cuts: tuple[Cut, ...]
    global_rows: int
    epoch: int
    number: int
    microbatches: int = 1
    host_y: NDArray[Any] | None = None
    targets: tuple[int, ...] = ()
    length: int | None = None

    def __post_init__(self) -> None:
        """Count the targets of the global batch, if nobody has: all ranks' rows are then taken for full ones."""
        if not self.targets:
            each = prod(self.y.shape[1:]) if self.y.dtype.kind in "iu" else 1
            object.__setattr__(self, "targets", _full_targets(self.global_rows, self.microbatches, each))

    def __iter__(self) -> Iterator[Array]:
        """Yield x and y, for loops that want nothing else."""
        yield self.x
        yield self.y

    @cached_property
    def global_targets(self) -> int:
        """How many labels of the global batch count: its real tokens, or its samples."""
        return sum(self.targets)

    @property
    def own_targets(self) -> int:
        """How many labels of this rank's rows count."""
        return count_targets(self.y if self.labels is None else self.labels)

    @property
    def labels(self) -> NDArray[Any] | None:
        """The labels on the host; None where they are on a device alone."""
        return self.y if isinstance(self.y, np.ndarray) else self.host_y

    @property
    def first_row(self) -> int:
        """The place of the first row in the global batch."""
        return self.cuts[0].first_row if self.cuts else 0


@lru_cache(maxsize=16)  # an epoch has two sizes of batches
def _full_targets(global_rows: int, microbatches: int, each: int) -> tuple[int, ...]:
    """Return how many labels count in each microbatch of a global batch whose samples have so many."""
    return tuple(each * len(part) for part in split(global_rows, microbatches))


class Loader:
    """Gives a rank its part of every global batch, in an order that depends on (seed, epoch) alone.

    Args:
        batch_size: rows of the global batch; n or more makes one batch of everything.
        rank, world: which part of how many.
        microbatches: the number of parts that each batch is worked on in, one after the other, to save memory.
        whole: give each rank whole microbatches (possibly none), instead of a part of each.
        partition: "none", or how the samples are divided for good, so that each rank sees its own alone; see
            `data.sampler`. The batches then depend on the number of ranks.
        transform: applied to x on the way; keyed by (seed, epoch, index), see `transform`.
        dtype: of x, a float type.
        workers: threads that prepare batches; 0 prepares each one when it is asked for. By default one, but for small
            batches on the host: see `SMALL_BYTES`.
        prefetch: the number of batches prepared ahead, at most; one for each worker if there are more of those.

    Raises:
        UsageError: for sizes and counts that make no sense; the message names the value.
    """

    def __init__(
        self,
        dataset: Samples,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        microbatches: int = 1,
        whole: bool = False,
        shuffle: bool = True,
        partition: str = "none",
        transform: Transform | None = None,
        dtype: DTypeLike = "float32",
        workers: int | None = None,
        prefetch: int = 2,
    ) -> None:
        batch_size, microbatches = whole_number("batch_size", batch_size), whole_number("microbatches", microbatches)
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} of {world} ranks does not exist")
        if partition not in PARTITIONS:
            raise UsageError(f"the partition {partition!r} does not exist; choose from: {', '.join(PARTITIONS)}")
        if whole and partition != "none":
            raise UsageError(
                f"the partition {partition!r} does not go with whole microbatches, which are dealt to any rank"
            )
        if not hasattr(dataset, "sample_shape"):
            what = type(dataset).__name__
            raise UsageError(f"a Loader takes a data set, not a {what}; make one: data.Dataset(name, x, y, classes=10)")
        if (workers is not None and workers < 0) or prefetch < 1:
            raise UsageError(f"{workers} loader threads and {prefetch} batches ahead; give at least 0 and 1")
        if np.dtype(dtype).kind != "f":
            raise UsageError(f"samples cannot be given as {np.dtype(dtype)}; choose float32 or float64")
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world = world
        self.microbatches = microbatches
        self.whole = whole
        self.shuffle = shuffle
        self.partition = partition
        self.transform = transform
        self.dtype = np.dtype(dtype)
        self.workers = workers
        self.prefetch = prefetch
        self._asked = 0  # how often for the next epoch
        self._own: dict[tuple[int, int], NDArray[np.int64]] = {}  # by part and parts: who has which samples
        if partition != "none":
            self._owned(rank, world)

    def __repr__(self) -> str:
        """Say which part of how large batches it gives."""
        whose = f"rank {self.rank} of {self.world}"
        return f"Loader({self.dataset.name}: {self.batches_per_epoch} batches of {self.batch_size}, part of {whose})"

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches of the next epoch: of epoch 0 when this is asked first, then of 1, and so on."""
        self._asked += 1
        return self.epoch(self._asked - 1)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.batches_per_epoch

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of global batches in an epoch, the short last one included."""
        return batches_per_epoch(len(self.dataset), self.batch_size)

    def epoch(self, epoch: int, start: int = 0, stored: bool = False) -> Prefetch[Batch]:
        """Return an iterator over this rank's part of each batch of an epoch, from batch number `start` on.

        Closing it, leaving its `with` block, or dropping it stops its threads. An exception of the transform is
        raised at the batch that it belongs to.

        Args:
            stored: give samples as the data set has them, at most moved about, and leave their arithmetic to a device;
                see `data.upload` and `transform.split_transform`.
        """
        epoch_order = self.order(epoch)
        threads = int(stored or self._takes_long) if self.workers is None else self.workers
        return Prefetch(
            lambda number: self.part(epoch_order, epoch, number, self.rank, self.world, stored=stored),
            range(start, self.batches_per_epoch),
            workers=threads,
            ahead=max(self.prefetch, threads),  # with fewer, some threads would only wait
        )

    @cached_property
    def _takes_long(self) -> bool:
        """Return whether making a part of a batch may take longer than having it made by a thread."""
        if self.dataset.is_tokens or not can_split(self.transform) or split_transform(self.transform)[0]:
            return True
        return -(-self.batch_size // self.world) * prod(self.dataset.sample_shape) * self.dtype.itemsize > SMALL_BYTES

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of the samples in an epoch: (n,). Shuffled sentences of like length come together."""
        found, lengths = order(len(self.dataset), self.seed, epoch, self.shuffle), self.dataset.lengths
        if lengths is None or not self.shuffle:
            return found
        return by_length(found, lengths, self.batch_size, self.seed, epoch)

    def parts(self, epoch: int) -> Parts:
        """Return what makes any part of any batch of an epoch, at once.

        For ranks that learn which part is theirs when they have done the one before (see `parallel.server`). The parts
        of a batch are those that as many ranks would get.
        """
        return Parts(self, epoch)

    def part(
        self,
        epoch_order: NDArray[np.int64],
        epoch: int,
        number: int,
        rank: int,
        world: int,
        taken: int | None = None,
        stored: bool = False,
    ) -> Batch:
        """Return a part of a batch, whichever rank this loader is for.

        Args:
            epoch_order: the order of the samples in the epoch; see `sampler.order`.
            number: of the batch in the epoch.
            rank, world: which part of how many.
            taken: with a partition, how many samples this worker has taken in the run; by default its part of each
                batch before this one.
            stored: see `epoch`.
        """
        start = number * self.batch_size
        global_rows = min(self.batch_size, len(self.dataset) - start)
        cuts = _cuts(global_rows, rank, world, self.microbatches, self.whole)
        if self.partition == "none":
            firsts = [(start + cut.first_row, cut.stop - cut.start) for cut in cuts]
            places = [epoch_order[first : first + count] for first, count in firsts]
            indices = places[0] if len(places) == 1 else np.concatenate([epoch_order[:0], *places])
        else:
            if taken is None:
                taken = self.rows_before(epoch * self.batches_per_epoch + number, rank, world)
            count = cuts[-1].stop if cuts else 0
            indices = own_rows(self._owned(rank, world), self.seed, rank, taken, count)
        targets, length = self._extent(epoch_order, epoch, number, world, indices)
        x, y = self._samples(indices, epoch, stored, length), self.dataset.labels(indices, length)
        if y.dtype.kind == "f":
            y = y.astype(self.dtype, copy=False)
        microbatches = min(self.microbatches, global_rows)
        return Batch(x, y, indices, cuts, global_rows, epoch, number, microbatches, targets=targets)

    def _extent(
        self, epoch_order: NDArray[np.int64], epoch: int, number: int, world: int, own: NDArray[np.int64]
    ) -> tuple[tuple[int, ...], int | None]:
        """Return the targets of each microbatch of a global batch, and the length that its samples are padded to.

        Both are the global batch's, so that no layout changes them, and every rank finds them without a message. The
        targets are empty where every sample has one, and the length None where all have the same.

        Args:
            epoch_order, epoch, number, world: see `part`.
            own: this rank's samples.
        """
        targets, lengths = self.dataset.targets, self.dataset.lengths
        if targets is None and lengths is None:
            return (), None
        cuts = self._everyones(epoch_order, epoch, number, world)
        counts = () if targets is None else tuple(int(targets[indices].sum()) for indices in cuts)
        if lengths is None:
            return counts, None
        return counts, max(int(lengths[indices].max()) for indices in (*cuts, own) if len(indices))

    def _everyones(
        self, epoch_order: NDArray[np.int64], epoch: int, number: int, world: int
    ) -> list[NDArray[np.int64]]:
        """Return the samples of each microbatch of a global batch; with a partition, those of workers in step."""
        n, step = len(self.dataset), epoch * self.batches_per_epoch + number
        if self.partition == "none":
            whole, _ = rows(n, self.batch_size, number, microbatches=self.microbatches)
            return [epoch_order[mine.start : mine.stop] for mine in whole.values()]
        found: dict[int, list[NDArray[np.int64]]] = {}
        for rank in range(world):
            ranges, _ = rows(n, self.batch_size, number, rank, world, self.microbatches)
            lengths = [len(mine) for mine in ranges.values()]
            first = self.rows_before(step, rank, world)
            indices = own_rows(self._owned(rank, world), self.seed, rank, first, sum(lengths))
            for i, part in zip(ranges, np.split(indices, np.cumsum(lengths)[:-1]), strict=True):
                found.setdefault(i, []).append(part)
        return [np.concatenate(parts) for parts in found.values()]

    def _samples(self, indices: NDArray[np.int64], epoch: int, stored: bool, length: int | None) -> Array:
        if self.dataset.is_tokens:
            return self.dataset.rows(indices, length=length)
        if stored:
            x = self.dataset.stored(indices)
            for transform in split_transform(self.transform)[0]:
                x = transform(x, indices, epoch, self.seed)
            return np.ascontiguousarray(x)
        x = self.dataset.rows(indices, self.dtype)
        if self.transform is None:
            return x
        return self._checked(self.transform(x, indices, epoch, self.seed), len(indices))

    def rows_before(self, step: int, rank: int, world: int) -> int:
        """Return how many rows a rank has had before a step of the run, in all epochs together.

        Args:
            step: of the run, from 0.
            rank, world: which of how many data-parallel ranks.
        """
        epochs, batches = divmod(step, self.batches_per_epoch)
        full, last = (
            sum(map(len, rows(len(self.dataset), self.batch_size, number, rank, world, self.microbatches)[0].values()))
            for number in (0, self.batches_per_epoch - 1)
        )
        return epochs * ((self.batches_per_epoch - 1) * full + last) + batches * full

    def _owned(self, rank: int, world: int) -> NDArray[np.int64]:
        """Return the samples that a rank has for the whole run."""
        if (rank, world) not in self._own:
            self._own[rank, world] = own_samples(self._classes(), self.partition, self.seed, rank, world)
        return self._own[rank, world]

    def _classes(self) -> NDArray[np.int64]:
        """Return each sample's class; without one each, zeros."""
        labels = self.dataset.labels(np.arange(len(self.dataset))) if self.dataset.targets is None else None
        if labels is not None and labels.dtype.kind != "f":
            return labels
        if self.partition == "label":
            have = "several labels each" if labels is None else "quantities"
            raise UsageError(
                f"the partition 'label' sorts samples by class, but those of {self.dataset.name} have {have}; take iid"
            )
        return np.zeros(len(self.dataset), np.int64)

    def _checked(self, x: Array, rows: int) -> Array:
        if len(x) != rows or x.dtype != self.dtype:
            raise ShapeError(f"the transform made {len(x)} rows of {x.dtype} out of {rows} rows of {self.dtype}")
        return np.ascontiguousarray(x)


@lru_cache(maxsize=16)
def _cuts(global_rows: int, rank: int, world: int, microbatches: int, whole: bool) -> tuple[Cut, ...]:
    """Return where each microbatch's rows stand among a rank's, and in a global batch of so many rows."""
    cuts, start = [], 0
    for number, mine in rows(global_rows, global_rows, 0, rank, world, microbatches, whole)[0].items():
        cuts.append(Cut(start, start + len(mine), mine.start, number))
        start += len(mine)
    return tuple(cuts)


class Parts:
    """Any part of any batch of an epoch, one at a time.

    Attributes:
        owned: whether workers have samples of their own (see `partition`): then part w is always worker w's.
    """

    def __init__(self, loader: Loader, epoch: int) -> None:
        self._loader, self._epoch = loader, epoch
        self._order = loader.order(epoch)
        self.owned = loader.partition != "none"

    def __call__(self, number: int, part: int, parts: int) -> Batch:
        """Return part `part` of `parts` of batch `number`."""
        return self._loader.part(self._order, self._epoch, number, part, parts)

    def assigned(self, number: int, part: int, parts: int, worker: int, taken: int) -> Batch:
        """Return what a worker computes to whom a part was assigned: that part, or as many of its own samples.

        Args:
            taken: the samples that this worker has taken in the run.
        """
        if not self.owned:
            return self(number, part, parts)
        return self._loader.part(self._order, self._epoch, number, worker, parts, taken)

    def whole(self, number: int, workers: int) -> Batch:
        """Return a batch of all workers' parts."""
        if not self.owned:
            return self(number, 0, 1)
        return join([self(number, worker, workers) for worker in range(workers)])


def join(batches: Sequence[Batch]) -> Batch:
    """Return the parts of one global batch as one; their microbatches stay apart."""
    starts = np.cumsum([0, *(len(batch.y) for batch in batches)])
    cuts = [
        Cut(cut.start + int(start), cut.stop + int(start), cut.first_row, cut.number)
        for batch, start in zip(batches, starts, strict=False)
        for cut in batch.cuts
    ]
    x, y, indices = (np.concatenate([getattr(batch, name) for batch in batches]) for name in ("x", "y", "indices"))
    return replace(batches[0], x=x, y=y, indices=indices, cuts=tuple(cuts))
