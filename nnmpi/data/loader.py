"""Loader: the batches of one rank, prefetched by background threads if that pays.

`Loader` decides the contents of batches. `Prefetch` computes items in threads and yields them in
order; it does not depend on data sets. Workers are threads, not processes as in PyTorch: NumPy
releases the interpreter lock in large operations, and a process would need its own data set.

For a device there are two ways, with the same bits:

    a data set that fits stays there     its batches are gathered, scaled and normalized there,
                                         many at a time
    otherwise, and with augmentations    threads make a batch in page-locked memory; it is copied
                                         during the step before its own (see `backend.upload`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy, deepcopy
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nnmpi.backend.array import Array, Integers, is_array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.backend.upload import Uploads, resident
from nnmpi.base.errors import DataError, ShapeError, UsageError, check_int, shortened
from nnmpi.base.loop import At, EpochLoop, Origin, Place, Taken
from nnmpi.base.settled import Settled
from nnmpi.base.shard import split
from nnmpi.base.words import answering
from nnmpi.data.dataset import Dataset, Samples, count_targets
from nnmpi.data.items import USED_UP, as_samples
from nnmpi.data.lazy import is_lazy, keep_rows, sampled
from nnmpi.data.names import Names, agree
from nnmpi.data.sampler import (
    POOL_BLOCKS,
    Cut,
    balanced_order,
    by_length,
    check_partition,
    cut_batch,
    in_blocks,
    order,
    partition_order,
    partition_samples,
    row_owners,
)
from nnmpi.data.transform import Compose, Normalize, Transform

# Up to this size, a rank's part of a batch is made faster than a thread could hand it over.
# Measured on 2 cores, one rank: without the thread, training takes 0.57 of the time for an MLP with
# 512 bytes per batch, and 0.86 for a CNN with 8 KiB.
SMALL_BYTES = 2**16
AHEAD = 2  # batches prefetched; at least one per thread
# The largest part of a device's free memory that a data set may take; the model has the rest.
RESIDENT_SHARE = 0.25
TRIED_ROWS = 8  # by which the ranks' transforms are compared
TRANSFORMED = f"the first {TRIED_ROWS} samples transformed to the checksum"
# Gathered at once on a device: a batch of MNIST, 200 KB, costs the host 5 us in place of 70.
GATHERED_BYTES = 2**24


_ARRAYS = "x", "y", "indices", "host_y"  # what a batch has after it was opened, in this order


@dataclass(eq=False, slots=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        x: (rows, *sample_shape), the loader's dtype, C-contiguous. A rank may have 0 rows.
        y: (rows, ...): int64 labels, one or several per sample, of which negative ones do not
            count (see `dataset.IGNORED`); or quantities in the loader's dtype.
        indices: (rows,), int64, of the samples in the data set.
        cuts: this rank's rows of each microbatch; without microbatches one cut with all rows.
        global_rows: rows of the global batch.
        microbatches: their number in the global batch, over all ranks.
        epoch, number: of the batch; both count from 0.
        targets: the number of targets in each microbatch of the global batch; by default every
            label of every row counts. Losses are divided by `global_targets`, the sum.
        weights: (rows,), by which the losses of the data set's samples are multiplied, in the
            loader's dtype: 1 on average over the targets of the global batch, so that the quotient
            is sum(weight * loss) / sum(weight). None for a data set without weights.
        host_y: the labels on the host if x and y are on a device; else None.
        length: the full length of the sequences if x and y hold a shard of their positions (see
            `parallel.sequence`); else None.
        first: the global batch's first index.
        row_elements: of the longest sample of the global batch; by default of x.
        source: what decides which samples it holds; None for a batch that no Loader made.
        loop: that read it; None if no Loader made it.

    A loop's batch is opened when its arrays are first asked for, and the loop notes that: so a
    batch that a program keeps ready does not count as trained on.
    """

    x: Array
    y: NDArray[Any]
    indices: Integers
    cuts: tuple[Cut, ...]
    global_rows: int
    epoch: int
    number: int
    microbatches: int = 1
    host_y: NDArray[Any] | None = None
    targets: tuple[int, ...] = ()
    length: int | None = None
    first: int = 0
    row_elements: int = 0
    source: Origin | None = None
    weights: Array | None = None
    loop: EpochLoop | None = field(default=None, repr=False)
    _unopened: tuple[Any, ...] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Set `targets` if not given: every label of every row counts."""
        self.row_elements = self.row_elements or prod(self.x.shape[1:])
        if not self.targets:
            item = prod(self.y.shape[1:]) if self.y.dtype.kind in "iu" else 1
            parts = split(self.global_rows, self.microbatches)
            self.targets = tuple(item * len(part) for part in parts)

    def read_by(self, loop: EpochLoop) -> Batch:
        """Note the loop that read it, which hears when the batch is opened; return it."""
        self.loop = loop
        self._unopened = self.x, self.y, self.indices, self.host_y
        del self.x, self.y, self.indices, self.host_y
        return self

    if not TYPE_CHECKING:  # or type checkers would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Open the batch: this is called while it does not have its arrays."""
            if name not in _ARRAYS or self._unopened is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            arrays, self._unopened = self._unopened, None
            for each, array in zip(_ARRAYS, arrays, strict=True):
                try:  # what the program has set stays
                    object.__getattribute__(self, each)
                except AttributeError:
                    setattr(self, each, array)
            self.loop.open(self.taken(), self.x, self.y)
            return getattr(self, name)

    def __iter__(self) -> Iterator[Array]:
        """Yield x and y, for loops `for x, y in loader`; and the weights, if samples have some."""
        yield self.x
        yield self.y
        if self.weights is not None:
            yield self.weights

    @property
    def global_targets(self) -> int:
        """The number of targets in the global batch: its tokens without padding, or its samples."""
        return sum(self.targets)

    @property
    def global_elements(self) -> int:
        """The number of elements of the global batch's samples, with padding."""
        return self.global_rows * self.row_elements

    @property
    def own_targets(self) -> int:
        """The number of targets in this rank's rows."""
        return count_targets(self.y if self.host_y is None else self.host_y)

    @property
    def labels(self) -> NDArray[Any] | None:
        """The labels on the host; None if they are on a device only."""
        return self.y if isinstance(self.y, np.ndarray) else self.host_y

    @property
    def on_host(self) -> NDArray[Any]:
        """The labels on the host, copied from a device if they are there only."""
        labels = self.labels
        return self.y.get() if labels is None else labels  # type: ignore[attr-defined]

    def checksum(self) -> int:
        """Return a checksum of labels, weights and samples (on a device, of their indices)."""
        x, labels = self.x if isinstance(self.x, np.ndarray) else self.indices, self.labels
        # on a device they are those of the indices
        if self.weights is not None and isinstance(self.weights, np.ndarray):
            return checksum(x, self.on_host, self.weights)
        return checksum(x) if labels is None else checksum(x, labels)

    def to(self, device: Backend) -> Batch:
        """Return the batch on a device, with its labels on the host, too."""
        x, y = device.asarray(self.x), device.asarray(self.y)
        return _weights_on(device, replace(self, x=x, y=y, host_y=self.labels))

    def rows(self, cut: Cut) -> Batch:
        """Return the samples and labels of a cut; all else is this batch's."""
        if cut.stop - cut.start == len(self.y):
            return self
        part = slice(cut.start, cut.stop)
        host_y = None if self.host_y is None else self.host_y[part]
        weights = None if self.weights is None else self.weights[part]
        return replace(self, x=self.x[part], y=self.y[part], host_y=host_y, weights=weights)

    def taken(self) -> Taken:
        """Return which batch it is, without its arrays."""
        which = self.epoch, self.number, self.first, self.global_rows, self.microbatches
        return Taken(self.source, *which, self.cuts)

    @property
    def first_row(self) -> int:
        """The index of this rank's first row in the global batch."""
        return self.cuts[0].first_row if self.cuts else 0


class Order:
    """What decides which samples a loader's batches hold, and in which order: a `loop.Origin`.

    Data are compared by a checksum, which is computed when it is first asked for.
    """

    def __init__(self, loader: Loader) -> None:
        self.world, self._dataset = loader.world, loader.dataset
        self._transform, self._kind = loader.transform, loader._kind
        of_epochs = "batch_size", "seed", "shuffle", "shuffle_block", "balance"
        names = *of_epochs, "partition", "microbatches", "world"
        self._settings = {name: getattr(loader, name) for name in names}
        self.of_epochs = {name: self._settings[name] for name in of_epochs}
        self.of_epochs["samples"] = len(loader.dataset)

    @property
    def names(self) -> Names:
        """What the numbers in the batches stand for, see `data.names`."""
        return self._dataset.names

    @property
    def name(self) -> str:
        """The data set's."""
        return self._dataset.name

    def texts(self) -> list[str]:
        """See `loop.Origin.texts`."""
        settings = (f"{name} {value}" for name, value in self._settings.items())
        return [f"{len(self._dataset)} samples", self._samples, self._weights, *settings]

    @cached_property
    def _samples(self) -> str:
        """A checksum of all samples in memory; of others, of some rows."""
        values = (item for name, item in vars(self._dataset).items() if name != "weights")
        arrays = [
            sampled(item) if is_lazy(item) else item
            for item in values
            if is_lazy(item) or (type(item) is np.ndarray and item.dtype != object)
        ]
        return f"samples with the checksum {checksum(*arrays)}"

    @cached_property
    def _weights(self) -> str:
        weights = self._dataset.weights
        what = "equal weights" if weights is None else f"the checksum {checksum(weights)}"
        return f"weights of samples: {what}"

    def transformed(self) -> str | None:
        """See `loop.Origin.transformed`.

        What a transform is, its attributes do not tell: they may be the rank's own, such as a file
        or its number. So a copy of it is called, with the data set's first samples: twice, since
        one that draws random numbers of its own says nothing.
        """
        if self._dataset.is_tokens:
            return None  # and has no transform
        indices = np.arange(min(TRIED_ROWS, len(self._dataset)))
        try:
            transform, lengths = deepcopy(self._transform), self._dataset.lengths
            longest = None if lengths is None else int(lengths[indices].max(initial=0))
            x, _ = self._dataset.pair(indices, self._kind, longest)
            tries = {
                checksum(x if transform is None else transform(x.copy(), indices, 0, 0))
                for _ in range(2)
            }
        except Exception:  # such as a file that cannot be copied, or a used-up iterator
            return None
        return f"{TRANSFORMED} {tries.pop()}" if len(tries) == 1 else None


def checksum(*arrays: Array) -> int:
    """Return a checksum of arrays of numbers."""
    result = 0
    for array in arrays:
        result = crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, result)
    return result


@answering
@dataclass(eq=False, repr=False)
class Loader(Settled, read_once="group"):
    """Yield a rank's part of every global batch, in an order that depends on (seed, epoch) alone.

    Args:
        dataset: a `Dataset`, a text, or another library's data set: see `data.items`.
        batch_size: rows of the global batch; n or more makes one batch per epoch.
        group: the ranks that share each batch: a `Group`, or any object with `rank` and `size`; or
            an `Arrangement`, whose replicas share it. Without one the batch is not shared.
        rank, world: instead of the group, this rank's part of the batch and the number of parts.
        microbatches: the number of microbatches per batch, which are computed one by one to save
            memory.
        whole_microbatches: give each rank whole microbatches (possibly none), not a shard of each.
        shuffle_block: for files that are slow at single rows: shuffle blocks of so many samples
            that are stored one after another, and samples within pools of blocks; None for a full
            shuffle. See `data.sampler`.
        balance: draw each class equally often, the samples of rare ones several times in an epoch:
            see `sampler.balanced_order`.
        partition: "none", or a fixed partition of the samples over the ranks: see `data.sampler`.
            With a partition, batches depend on the number of ranks.
        transform: a function (x, indices, epoch, seed) -> x with other values; see
            `data.transform`.
        dtype: of x, a float type.
        workers: threads that prefetch batches; 0 makes each batch on demand. The default is 0 for
            small batches on the host (see `SMALL_BYTES`) and 1 otherwise. A data set that stays on
            a device needs none.

    Raises:
        UsageError: for invalid sizes and counts; the message names the value.

    Example:
        >>> train, _ = data.load("iris")
        >>> def program(group):
        ...     loader = data.Loader(train, 50, group)
        ...     return [(len(batch.x), batch.global_rows) for batch in loader.epoch(0)]
        >>> nnmpi.simulate(program, ranks=4)[1]
        [(13, 50), (13, 50), (5, 20)]
    """

    dataset: Samples | Any
    batch_size: int
    group: InitVar[Any] = None
    _: KW_ONLY
    seed: int = 0
    rank: Any = None
    world: Any = None
    microbatches: int = 1
    whole_microbatches: bool = False
    shuffle: bool = True
    shuffle_block: int | None = None
    balance: bool = False
    partition: str = "none"
    transform: Transform | None = None
    dtype: DTypeLike = "float32"
    workers: int | None = None

    _place: Place = field(init=False, default_factory=Place)
    _held: Any = field(init=False, default=(None, None, None))
    _uploads: Any = field(init=False, default=None)

    def __post_init__(self, group: Any = None) -> None:
        """Check the settings, and derive what depends on them; again after each assignment."""
        self._is_made = False
        if group is not None or self.rank is None or self.world is None:
            self.rank, self.world = _part_of(group, self.rank, self.world)
        dataset = self.dataset = as_samples(self.dataset)
        partition = self.partition
        self.batch_size = size = check_int("batch_size", self.batch_size)
        self.microbatches = check_int("microbatches", self.microbatches)
        if check_int("rank", self.rank, 0) not in range(check_int("world", self.world)):
            raise UsageError(
                f"rank {self.rank!r} of {self.world} ranks does not exist; ranks count from 0"
            )
        if self.transform is not None and dataset.is_tokens:
            raise UsageError(
                "a transform changes numbers or images, and the samples are tokens, so it would"
                " never be called; change the texts before they are encoded, and leave it out"
            )
        self._check_order()
        if self.whole_microbatches and partition != "none":
            raise UsageError(
                f"the partition {partition!r} cannot be combined with whole microbatches, which go"
                " to any rank; leave one of them out"
            )
        if self.workers is not None:
            check_int("workers", self.workers, 0)
        if self.shuffle_block is not None:
            block = check_int("shuffle_block", self.shuffle_block)
            for array in (getattr(dataset, name, None) for name in "xy"):
                keep_rows(array, POOL_BLOCKS * block)
        self._kind = np.dtype(self.dtype)
        if self._kind.kind != "f":
            raise UsageError(
                f"samples cannot be converted to {self._kind}; choose float32 or float64"
            )
        check_partition(len(dataset), partition, self.world)
        if partition != "none":
            rows = [min(size, len(dataset) - first) for first in range(0, len(dataset), size)]
            self._owners = np.concatenate(
                [row_owners(row, self.world, self.microbatches) for row in rows]
            )
            self._shards = partition_samples(self._classes(), partition, self.seed, self._owners)
        self._source = Order(self)
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Follow a changed setting from the next epoch on, or refuse it as the constructor does."""
        before = getattr(self, name, None)
        super().__setattr__(name, value)
        if name[0] != "_" and self._is_made:
            try:
                self.__post_init__()
            except BaseException:
                vars(self)[name] = before
                self.__post_init__()
                raise

    def __repr__(self) -> str:
        whose = f"rank {self.rank} of {self.world}"
        return (
            f"Loader({self.dataset.name}: {len(self)} batches of {self.batch_size},"
            f" part of {whose})"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from the training's place to the end of its epoch: epoch 0 first.

        An update moves the place, and so does the end of a loop with updates: see `base.loop`. As
        long as there was none, each loop goes on where the one before was left. Later a loop
        without updates reads the epoch's first batches, too, so that an evaluation reads all.
        """
        epoch, start = self._where(self._place.start)
        rest = self._batches(epoch, range(start, len(self)), follows=True)
        yield from rest
        if start and rest.loop.had_no_updates:
            yield from self._batches(epoch, range(start), follows=True, rereads=True)

    def _check_order(self) -> None:
        """Refuse two settings that each give the samples an order, and classes that there are not.

        Raises:
            UsageError: with the remedy.
        """
        orders = {
            "shuffle=False": not self.shuffle,
            f"the partition {self.partition!r}": self.partition != "none",
            f"shuffle_block={self.shuffle_block}": self.shuffle_block is not None,
            "balance": self.balance,
        }
        given = [order for order, is_given in orders.items() if is_given]
        if len(given) > 1:
            raise UsageError(
                f"{given[0]} has an order of its own, without {given[1]}; leave one out"
            )
        dataset = self.dataset
        has_classes = isinstance(dataset, Dataset) and dataset.predicts == "classes"
        if self.balance and not (has_classes and self._labels.ndim == 1):
            raise UsageError(
                f"balance draws classes equally often, and {dataset.name} has none, one for each"
                " sample; leave it out"
            )

    @property
    def _labels(self) -> NDArray[Any]:
        """The labels of all samples."""
        return self.dataset.labels(np.arange(len(self.dataset)))

    @property
    def source(self) -> Order:
        """What decides which samples the batches hold."""
        return self._source

    @property
    def place(self) -> At:
        """The epoch and the batch with which the training goes on: behind its last update.

        There `for batch in loader` begins, too; or with the next epoch, if the program has read
        this one to its end and keeps batches that it will train on.
        """
        return self._where(self._place.next)

    def _where(self, at: At) -> At:
        """Return a place, or the next epoch if the rest of the place's own is lost."""
        (epoch, batch), source = at, self._place.source
        # with other settings its batches were others
        is_lost = batch and source and source.of_epochs != self._source.of_epochs
        return (epoch + 1, 0) if is_lost else at

    def state(self) -> dict[str, Any]:
        """Return the training's place, and the data's names, for a checkpoint, as JSON values.

        Raises:
            UsageError: if the program holds the arrays of several batches, so that the batch of the
                last update is not known.
        """
        if self._place.is_unsure:
            raise UsageError(
                "it is not known on which batch the last update was made, since the arrays of"
                " several were taken before it and are still held, as by a loop that reads ahead;"
                " keep the batches themselves ready, and take batch.x and batch.y when you train on"
                " them, or give the batch to worker.step; of several batches for one update, let"
                " each go before you take the next, `while window: batch = window.pop(0)`"
            )
        epoch, batch = self.place
        at = {"epoch": epoch, "batch": batch, "is_trained": self._place.is_trained}
        return {**at, **self._source.of_epochs, "names": agree({}, self._source.names, "")}

    def load(self, state: Mapping[str, Any]) -> None:
        """Let the next `for batch in loader` begin at a place that `state` returned.

        Raises:
            UsageError: for a place within an epoch whose batches were others.
            DataError: for data whose classes or columns have other names.
        """
        agree(state.get("names", {}), self._source.names, self.dataset.name)
        for name, now in self._source.of_epochs.items():
            before = state.get(name, now)
            if state["batch"] and before != now:
                raise UsageError(
                    f"the saved loader was within an epoch, with {name} {before}, but this one has"
                    f" {now}: some samples would be left out, and others come twice; give it"
                    f" {name} {before}, or save at the end of an epoch"
                )
        place = self._place
        place.trained, place.read = (state["epoch"], state["batch"]), None
        place.is_trained, place.is_restored = bool(state.get("is_trained", True)), True
        place.source, place.finished, place.is_unsure = self._source, 0, False

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.batches_per_epoch

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of global batches in an epoch, the short last one included."""
        return -(-len(self.dataset) // self.batch_size)

    def epoch(self, epoch: int, start: int = 0, backend: Backend | None = None) -> Batches:
        """Return an iterator over this rank's part of an epoch's batches, from batch `start`.

        `close`, the end of a `with` block, or garbage collection stops its threads. An exception of
        the transform is raised at its batch.

        Args:
            backend: of x and y; None for the host. A `Dataset` without augmentations that takes at
                most `RESIDENT_SHARE` of a device's free memory is copied there by the first call.
        """
        numbers = range(check_int("start", start, 0), len(self))
        return self._batches(check_int("epoch", epoch, 0), numbers, backend)

    def _batches(
        self,
        epoch: int,
        numbers: range,
        backend: Backend | None = None,
        follows: bool = False,
        rereads: bool = False,
    ) -> Batches:
        epoch_order = self.order(epoch)
        settings = copy(self)  # a setting that is changed meanwhile is the next epoch's
        loop = EpochLoop(self._place, epoch, numbers, follows, rereads)
        device = backend if backend is not None and backend.is_device else None
        held = None if device is None else self._held_by(device)
        if device is not None and held is not None:
            gathered = _gathered(settings, device, held, epoch_order, epoch, numbers)
            return Batches(loop, lambda number: next(gathered), numbers, workers=0)
        threads = (
            int(device is not None or self._takes_long) if self.workers is None else self.workers
        )
        # one object for all epochs: so its stream has its memory
        if device is not None and (self._uploads is None or self._uploads.device is not device):
            self._uploads = Uploads(device)
        uploads = None if device is None else self._uploads

        def make(number: int) -> Batch:
            batch = settings.part(epoch_order, epoch, number, settings.rank, settings.world)
            if uploads is None:
                return batch
            x, y = uploads.pack(batch.x, batch.y)
            return replace(batch, x=x, y=y, host_y=batch.y)

        def send(batch: Batch) -> Callable[[], Batch]:
            assert uploads is not None
            arrive = uploads.send(batch.x, batch.y)

            def received() -> Batch:
                x, y = arrive()
                return _weights_on(uploads.device, replace(batch, x=x, y=y))

            return received

        return Batches(
            loop,
            make,
            numbers,
            workers=threads,
            ahead=max(AHEAD, threads),  # with fewer, some threads would be idle
            send=None if uploads is None else send,
        )

    def _held_by(self, device: Backend) -> Dataset | None:
        """Return the data set with its samples on a device; None if they must not or cannot be.

        The first call decides, so that every epoch is alike.
        """
        dataset, x = self.dataset, getattr(self.dataset, "x", None)
        if self._held[0] is not dataset or self._held[1] is not device:
            held, most = None, RESIDENT_SHARE * device.room_bytes()
            if type(dataset) is Dataset and isinstance(x, np.ndarray) and x.nbytes <= most:
                held = copy(dataset)
                object.__setattr__(held, "x", resident(device, x))
            self._held = dataset, device, held
        return self._held[2] if self._only_normalizes else None

    @property
    def is_small(self) -> bool:
        """Whether an epoch is a single batch of few bytes."""
        return len(self.dataset) <= self.batch_size and not self._takes_long

    @property
    def _steps(self) -> list[Transform]:
        """The transforms, in order."""
        steps = self.transform
        return steps.transforms if isinstance(steps, Compose) else [steps] if steps else []

    @property
    def _only_normalizes(self) -> bool:
        """Whether a sample is the same in every epoch."""
        return all(isinstance(step, Normalize) for step in self._steps)

    @property
    def _takes_long(self) -> bool:
        """Whether making a part of a batch may take longer than handing it over from a thread."""
        if self.dataset.is_tokens or not self._only_normalizes:
            return True
        x = getattr(self.dataset, "x", None)
        if is_lazy(x) and not isinstance(x, np.ndarray):
            return True
        return self._part_bytes > SMALL_BYTES

    @property
    def _part_bytes(self) -> int:
        """The bytes of x in a part of a batch."""
        rows = -(-self.batch_size // self.world)
        return rows * prod(self.dataset.sample_shape) * self._kind.itemsize

    def order(self, epoch: int) -> Integers:
        """Return the order of an epoch's samples, (n,).

        Sentences of similar length share a batch. With a partition, each rank's rows hold its own
        samples, so that the order depends on the number of ranks.
        """
        count = len(self.dataset)
        if self.partition != "none":
            return partition_order(self._shards, self._owners, self.seed, epoch)
        if self.balance:
            return balanced_order(self._labels, self.seed, epoch)
        if self.shuffle_block is None:
            result = order(count, self.seed, epoch, self.shuffle)
        else:
            places = self.dataset.places
            result = in_blocks(count, self.shuffle_block, self.seed, epoch, places)
        lengths = self.dataset.lengths
        if lengths is None or not self.shuffle:
            return result
        return by_length(result, lengths, self.batch_size, self.seed, epoch)

    def part(
        self,
        epoch_order: Integers,
        epoch: int,
        number: int,
        rank: int,
        world: int,
    ) -> Batch:
        """Return a part of a batch; the rank may be another than this loader's.

        Args:
            epoch_order: of the epoch's samples; see `order`.
            number: of the batch in the epoch.
            rank, world: the part, and the number of parts.
        """
        make, indices, length = self._outline(epoch_order, epoch, number, rank, world)
        x, y = self.dataset.pair(indices, self._kind, length)
        return make(self._transformed(x, indices, epoch), self._converted(y), indices)

    def _outline(
        self, epoch_order: Integers, epoch: int, number: int, rank: int, world: int
    ) -> tuple[Callable[..., Batch], Integers, int | None]:
        """Return a part of a batch without x, y and indices; its indices; its samples' length."""
        start = number * self.batch_size
        global_rows = min(self.batch_size, len(self.dataset) - start)
        cuts = cut_batch(global_rows, rank, world, self.microbatches, self.whole_microbatches)
        rows = [epoch_order[start + cut.first_row :][: cut.stop - cut.start] for cut in cuts]
        indices = rows[0] if len(rows) == 1 else np.concatenate([epoch_order[:0], *rows])
        batch_order = epoch_order[start : start + global_rows]
        targets, length = self._extent(batch_order)
        weights = None
        if self.dataset.weights is not None:
            weights = self._weights(self.dataset.weights, batch_order, indices)
        make = partial(
            Batch,
            cuts=cuts,
            global_rows=global_rows,
            epoch=epoch,
            number=number,
            microbatches=min(self.microbatches, global_rows),
            targets=targets,
            first=epoch_order[start],
            source=self._source,
            weights=weights,
        )
        return make, indices, length

    def _weights(
        self, weights: NDArray[Any], batch_order: Integers, indices: Integers
    ) -> NDArray[Any]:
        """Return the weights of some samples of a batch; see `Batch.weights`.

        Args:
            weights: of all samples.
            batch_order: the samples of the global batch, so that no message is needed.
            indices: of the samples.
        """
        targets = self.dataset.targets
        counts = 1 if targets is None else targets[batch_order]
        total = float((weights[batch_order] * counts).sum())
        whole = len(batch_order) if targets is None else int(targets[batch_order].sum())
        return (weights[indices] * (whole / (total or 1.0))).astype(self._kind)

    def _converted(self, y: NDArray[Any]) -> NDArray[Any]:
        return y.astype(self._kind, copy=False) if y.dtype.kind == "f" else y

    def _extent(self, batch_order: Integers) -> tuple[tuple[int, ...], int | None]:
        """Return each microbatch's number of targets, and the length to pad samples to.

        Both are computed from the global batch, so that they do not depend on the layout and need
        no message. The targets are empty if every sample has one; the length is None if all
        samples have the same shape.
        """
        targets, lengths = self.dataset.targets, self.dataset.lengths
        counts: tuple[int, ...] = ()
        if targets is not None:
            cuts = cut_batch(len(batch_order), microbatches=self.microbatches)
            counts = tuple(int(targets[batch_order[cut.start : cut.stop]].sum()) for cut in cuts)
        return counts, None if lengths is None else int(lengths[batch_order].max(initial=0))

    def _transformed(self, x: Array, indices: Integers, epoch: int) -> Array:
        for step in self._steps:
            try:
                x = step(x, indices, epoch, self.seed)
            except StopIteration as error:
                items = shortened(", ".join(map(str, indices)))
                raise DataError(
                    f"the transform {shortened(repr(step))} of items {items} {USED_UP}"
                ) from error
            made = f"{len(x)} rows of {x.dtype}" if is_array(x) else "no array"
            if made != (expected := f"{len(indices)} rows of {self._kind}"):
                raise ShapeError(
                    f"the transform made {made} from {expected}; return as many, of that dtype"
                )
        return namespace(x).ascontiguousarray(x)

    def _classes(self) -> Integers:
        """Return each sample's class, (n,); zeros for samples with several labels or quantities."""
        have = "several labels"
        if self.dataset.targets is None:
            labels, have = self.dataset.labels(np.arange(len(self.dataset))), "a quantity"
            if labels.dtype.kind != "f":
                return labels
        if self.partition == "label":
            raise UsageError(
                f"the partition 'label' sorts samples by class, but each sample of"
                f" {self.dataset.name} has {have}; use iid"
            )
        return np.zeros(len(self.dataset), np.int64)


def _part_of(group: Any, rank: Any, world: Any) -> tuple[Any, Any]:
    """Return the number of this rank's part of each batch, and the number of parts.

    Raises:
        UsageError: for another kind of group, one besides rank or world, and one of these alone.
    """
    if rank is not None or world is not None:
        raise UsageError(
            f"a Loader got rank={rank!r}, world={world!r} and group={group!r}, so ranks might take"
            " the same rows; give the group alone, data.Loader(dataset, 64, group), or rank and"
            " world"
        )
    if group is None:
        return 0, 1
    for names in (("data_rank", "data_ranks"), ("rank", "size")):
        if all(hasattr(group, name) for name in names):
            return getattr(group, names[0]), getattr(group, names[1])
    raise UsageError(
        f"a Loader's third argument is the group of the ranks that share each batch, not"
        f" {shortened(repr(group))}; give nnmpi.start(), and settings by name, as in shuffle=True"
    )


def _gathered(
    loader: Loader,
    device: Backend,
    held: Dataset,
    epoch_order: Integers,
    epoch: int,
    numbers: range,
) -> Iterator[Batch]:
    """Yield the batches of an epoch with these numbers, from a data set on a device.

    Args:
        loader: of the batches.
        device: of the data set.
        held: the loader's data set, with its samples there.
        epoch_order, epoch: see `Loader.part`.
        numbers: of the batches.
    """
    count = 4  # gathered at once; doubles, since a segment may need only a few batches
    most = max(1, GATHERED_BYTES // max(loader._part_bytes, 1))
    while numbers:
        some, numbers = numbers[: min(count, most)], numbers[min(count, most) :]
        outlines = [
            loader._outline(epoch_order, epoch, number, loader.rank, loader.world)
            for number in some
        ]
        indices = np.concatenate([rows for _, rows, _ in outlines])
        places = device.asarray(indices)
        x = loader._transformed(held.rows(places, loader._kind), indices, epoch)
        labels = loader._converted(loader.dataset.labels(indices))
        y, start = device.asarray(labels), 0  # few bytes, in one copy
        for make, rows, _ in outlines:
            part = slice(start, start := start + len(rows))
            yield _weights_on(device, make(x[part], y[part], rows, host_y=labels[part]))
        count *= 2


def _weights_on(device: Backend, batch: Batch) -> Batch:
    """Return a batch with its samples' weights on a device, if it has some."""
    if batch.weights is not None:
        batch.weights = device.asarray(batch.weights)
    return batch


T = TypeVar("T")


class Prefetch(Iterator[T]):
    """Yield make(i) for i in numbers, computed by threads up to `ahead` items early.

    Items keep the order of `numbers`. An exception in `make` is raised at its item; a
    StopIteration, which would end the loop as if there were no more, as a DataError. The threads
    end after the last item, at close(), at the end of a `with` block, or when the iterator is
    garbage collected. With workers=0 each item is made on demand.

    Args:
        send: begins to copy an item, in the consuming thread, if it is made, before the one ahead
            of it is returned; and returns a function that ends the copy. None for no copy.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        numbers: range,
        *,
        workers: int = 1,
        ahead: int = 2,
        send: Callable[[T], Callable[[], T]] | None = None,
    ) -> None:
        self._make, self._numbers, self._send = partial(_made, make), iter(numbers), send
        self._sent: Callable[[], T] | None = None
        self._pending: deque[Future[T]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        if workers and numbers:
            self._pool = ThreadPoolExecutor(min(workers, len(numbers)), "nnmpi-prefetch")
            self._submit(self._pool, max(ahead, 1))

    def _submit(self, pool: ThreadPoolExecutor, count: int) -> None:
        self._pending += [
            pool.submit(self._make, number) for number in islice(self._numbers, count)
        ]

    def __next__(self) -> T:
        """Return the next item; wait for its thread."""
        try:
            if self._send is None:
                return self._made()
            arrive = self._sent or self._send(self._made())
            self._sent = self._send(self._made()) if self._is_made else None
            return arrive()
        except BaseException:
            self.close()
            raise

    def _made(self) -> T:
        if self._pool is None:
            return self._make(next(self._numbers))
        if not self._pending:
            raise StopIteration
        item = self._pending.popleft().result()
        self._submit(self._pool, 1)
        return item

    @property
    def _is_made(self) -> bool:
        """Whether the next item is there without waiting."""
        return (
            bool(self._pending) and self._pending[0].done() and self._pending[0].exception() is None
        )

    def close(self) -> None:
        """Discard prefetched items and stop the threads, without waiting for hung ones."""
        self._numbers, self._sent = iter(()), None
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _made(make: Callable[[int], T], number: int) -> T:
    """Return an item; a function, since a thread that refers to the iterator would keep it."""
    try:
        return make(number)
    except StopIteration as error:
        raise DataError(f"batch {number} {USED_UP}") from error


class Batches(Prefetch[Batch]):
    """The batches of an epoch; their loop notes which were read.

    Args:
        loop: of the epoch.
        make, numbers, options: see `Prefetch`.
    """

    def __init__(
        self, loop: EpochLoop, make: Callable[[int], Batch], numbers: range, **options: Any
    ) -> None:
        self.loop = loop
        super().__init__(make, numbers, **options)

    def __next__(self) -> Batch:
        """Return the next batch; wait for its thread."""
        try:
            batch = super().__next__()
        except StopIteration:
            self.loop.end()
            raise
        self.loop.read(batch.number, batch.source)
        return batch.read_by(self.loop)

    def close(self) -> None:
        """See `Prefetch.close`."""
        super().close()
        self.loop.is_open = False

    def __del__(self) -> None:
        self.loop.is_open = False
