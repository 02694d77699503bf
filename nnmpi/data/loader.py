"""Loader: the batches of one rank, prepared by background threads."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nnmpi.backend.array import Array
from nnmpi.data.dataset import Dataset
from nnmpi.data.prefetch import Prefetch
from nnmpi.data.sampler import batches_per_epoch, order, rows
from nnmpi.data.transform import Transform
from nnmpi.errors import ShapeError, UsageError


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
        y: (rows,), int64.
        indices: (rows,), int64, the samples' places in the data set.
        cuts: the microbatches that the rows belong to; one of all rows, if the loader makes no microbatches.
        global_rows: rows of the global batch: what losses are divided by.
        microbatches: how many there are of the global batch, over all ranks.
        epoch, number: which batch of which epoch this is.
    """

    x: Array
    y: NDArray[np.int64]
    indices: NDArray[np.int64]
    cuts: tuple[Cut, ...]
    global_rows: int
    epoch: int
    number: int
    microbatches: int = 1

    @property
    def first_row(self) -> int:
        """The place of the first row in the global batch."""
        return self.cuts[0].first_row if self.cuts else 0


class Loader:
    """Gives a rank its part of every global batch, in an order that depends on (seed, epoch) alone.

    Args:
        batch_size: rows of the global batch; n or more makes one batch of everything.
        rank, world: which part of how many.
        microbatches: the number of parts that each batch is worked on in, one after the other, to save memory.
        whole: give each rank whole microbatches (possibly none), instead of a part of each.
        transform: applied to x on the way; keyed by (seed, epoch, index), see `transform`.
        dtype: of x, a float type.
        workers: threads that prepare batches; 0 prepares each one when it is asked for.
        prefetch: the number of batches prepared ahead, at most.

    Raises:
        UsageError: for sizes and counts that make no sense; the message names the value.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        microbatches: int = 1,
        whole: bool = False,
        shuffle: bool = True,
        transform: Transform | None = None,
        dtype: DTypeLike = "float32",
        workers: int = 1,
        prefetch: int = 2,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch size {batch_size} is not possible; give 1 or more")
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} of {world} ranks does not exist")
        if microbatches < 1:
            raise UsageError(f"{microbatches} microbatches are not possible; give 1 or more")
        if workers < 0 or prefetch < 1:
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
        self.transform = transform
        self.dtype = np.dtype(dtype)
        self.workers = workers
        self.prefetch = prefetch

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of global batches in an epoch, the short last one included."""
        return batches_per_epoch(len(self.dataset), self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Prefetch[Batch]:
        """Return an iterator over this rank's part of each batch of an epoch, from batch number `start` on.

        Closing it, leaving its `with` block, or dropping it stops its threads. An exception of the transform is
        raised at the batch that it belongs to.
        """
        epoch_order = order(len(self.dataset), self.seed, epoch, self.shuffle)
        return Prefetch(
            lambda number: self._batch(epoch_order, epoch, number),
            range(start, self.batches_per_epoch),
            workers=self.workers,
            ahead=self.prefetch,
        )

    def parts(self, epoch: int) -> Callable[[int, int, int], Batch]:
        """Return a function of (batch number, part, parts) that makes any part of any batch of an epoch, at once.

        For ranks that learn which part is theirs when they have done the one before (see `parallel.server`). The parts
        of a batch are those that as many ranks would get.
        """
        epoch_order = order(len(self.dataset), self.seed, epoch, self.shuffle)
        return lambda number, part, parts: self._batch(epoch_order, epoch, number, (part, parts))

    def _batch(
        self, epoch_order: NDArray[np.int64], epoch: int, number: int, share: tuple[int, int] | None = None
    ) -> Batch:
        rank, world = (self.rank, self.world) if share is None else share
        where = (number, rank, world, self.microbatches, self.whole)
        ranges, global_rows = rows(len(self.dataset), self.batch_size, *where)
        indices = np.concatenate([epoch_order[:0], *(epoch_order[mine.start : mine.stop] for mine in ranges.values())])
        x = self.dataset.rows(indices, self.dtype)
        if self.transform is not None:
            x = self._checked(self.transform(x, indices, epoch, self.seed), len(indices))
        cuts, microbatches = self._cuts(ranges, number), min(self.microbatches, global_rows)
        return Batch(x, self.dataset.y[indices], indices, cuts, global_rows, epoch, number, microbatches)

    def _cuts(self, ranges: dict[int, range], number: int) -> tuple[Cut, ...]:
        """Return where each microbatch's rows stand among this rank's, and in the global batch."""
        cuts, start = [], 0
        for i, mine in ranges.items():
            cuts.append(Cut(start, start + len(mine), mine.start - number * self.batch_size, i))
            start += len(mine)
        return tuple(cuts)

    def _checked(self, x: Array, rows: int) -> Array:
        if len(x) != rows or x.dtype != self.dtype:
            raise ShapeError(f"the transform made {len(x)} rows of {x.dtype} out of {rows} rows of {self.dtype}")
        return np.ascontiguousarray(x)
