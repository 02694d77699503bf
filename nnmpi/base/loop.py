"""The place of a training in a loader's data, which updates move, and nothing else does.

    for batch in loader:       an EpochLoop reads batches
        model(batch.x)         it is opened
        ...
        optimizer.step()       the loader's Place is now behind the batch that was opened last

So an evaluation, a look at the first batch and a second loop leave the training where it is, and a
loop that was left goes on with the next batch, in this program as in a resumed one.

A Worker knows the batch of its update. An optimizer in a loop of one's own does not: there it is
the last one that was opened in this thread, which is when its arrays were first asked for. Reading
is not enough: a program may keep batches ready, in a list, in a queue of another thread or in a
generator, and then those that wait have been read, but not trained on. One that opens several
before an update, and keeps them, does not say which is trained on: it trains, but its place cannot
be saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Protocol
from weakref import ref

from nnmpi.base.errors import UsageError

At = tuple[int, int]  # an epoch and a batch in it


LEFT = 4  # loaders of whose left loops the last is known: not of all that were ever looked at


@dataclass(eq=False, slots=True)
class Place:
    """The place of a training in a loader's data.

    Attributes:
        trained: the batch that follows the last one with an update.
        read: without any update, the one that follows the last one of a loop, so that a loader
            serves programs without an optimizer; a look at one batch is no loop. None otherwise.
        is_trained: whether there were updates, in this program or before.
        is_restored: whether a checkpoint said so, and no update has followed.
        updates: their number in this program.
        source: of the batches of its epoch.
        opened: the number of batches that were opened in this program.
        finished: the epochs before this one were read to their ends by loops with updates.
        is_unsure: whether the batch of the last update is not known; see `EpochLoop.train`.
    """

    trained: At = (0, 0)
    read: At | None = None
    is_trained: bool = False
    is_restored: bool = False
    updates: int = 0
    source: Origin | None = None
    opened: int = 0
    finished: int = 0
    is_unsure: bool = False

    @property
    def next(self) -> At:
        """The batch with which a resumed program goes on."""
        return self.trained if self.is_trained or self.read is None else self.read

    @property
    def start(self) -> At:
        """The batch with which this program's next loop begins: behind all that was read."""
        return max(self.next, (self.finished, 0))


class Origin(Protocol):
    """What decides which samples the batches of a loader have.

    Attributes:
        world: into how many parts each batch is cut.
        name: of the data.
    """

    world: int

    @property
    def name(self) -> str:
        """See the class."""

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        """What the numbers of the batches stand for, see `data.names`."""

    @property
    def of_epochs(self) -> Mapping[str, Any]:
        """What a place within an epoch depends on."""

    def texts(self) -> list[str]:
        """Return it as text."""

    def transformed(self) -> str | None:
        """Return what the transform makes of some samples, as text; None if that says nothing."""


@dataclass(slots=True)
class Taken:
    """A batch that a loop has taken, without its arrays; see `data.loader.Batch`."""

    source: Origin | None
    epoch: int
    number: int
    first: int
    global_rows: int
    microbatches: int
    cuts: Sequence[Any]

    def texts(self) -> list[str]:
        """Return which batch it is as text."""
        told = [
            f"epoch {self.epoch}",
            f"number {self.number}",
            f"first sample {self.first}",
            f"rows {self.global_rows}",
            f"microbatches {self.microbatches}",
        ]
        return told if self.source is None else [*self.source.texts(), *told]


@dataclass(eq=False, slots=True)
class EpochLoop:
    """A loop over an epoch's batches.

    Attributes:
        place: of the loader.
        epoch, batches: of the loop.
        follows: whether the loop began at the loader's place, as `for batch in loader` does;
            otherwise the program chose the epoch, and keeps account of it.
        rereads: whether it reads what was trained on already, for an evaluation.
        number, taken: of the batch that was opened last.
        opened_at: the place's number of updates then; -1 before and after all.
        is_open: whether more may be read.
        is_trained: whether updates were made in it.
        began_at: the place's number of updates when it began.
        read_to: the batch that was read last.
        waits_to: the batch that had been read last when the last update was made: those after the
            update's own batch, up to this one, wait to be trained on.
        reader: the thread that reads.
        is_fed: whether updates are made in another thread, which may lag behind.
        opened: the arrays of the batches that were opened since the last update, x and y of each.
        is_late: whether the batch that was opened last had been kept after the loop was over, or
            came from another thread, whose loop may be over at any time.
        is_unsure: whether the loop opens batches before it trains on those in front of them.
    """

    place: Place
    epoch: int
    batches: range
    follows: bool = False
    rereads: bool = False
    number: int = -1
    taken: Taken | None = None
    opened_at: int = -1
    is_open: bool = True
    is_trained: bool = False
    began_at: int = 0
    read_to: int = -1
    waits_to: int = -1
    reader: int = 0
    is_fed: bool = False
    opened: list[list[ref[Any]]] = field(default_factory=list)
    is_late: bool = False
    is_unsure: bool = False

    def __post_init__(self) -> None:
        self.began_at = self.place.updates

    def __deepcopy__(self, _: Any) -> EpochLoop:
        """Return the loop itself: a copy of its batch is a batch of the same loop."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a pickled batch have no loop: the loop and its loader's place are this program's."""
        return type(None), ()

    @property
    def is_new(self) -> bool:
        """Whether there was no update on its loader's batches since one was opened."""
        return self.opened_at == self.place.updates

    @property
    def had_no_updates(self) -> bool:
        """Whether it is an evaluation, of a loader that trains otherwise."""
        return self.place.is_trained and self.began_at == self.place.updates

    def after(self, number: int) -> At:
        """Return the batch that follows one of this loop."""
        last = number + 1 >= self.batches.stop
        return (self.epoch + 1, 0) if last else (self.epoch, number + 1)

    @property
    def is_current(self) -> bool:
        """Whether its batches are being read, or those that were kept of it are being opened."""
        return self.is_open or self.is_late

    @property
    def is_over(self) -> bool:
        """Whether it was left behind its first batch without updates: it evaluated."""
        return not (self.is_open or self.is_trained) and self.number > self.batches.start

    @property
    def is_here(self) -> bool:
        """Whether it has opened the batch with which the training goes on."""
        return (self.epoch, self.number) == self.place.trained

    @property
    def begins_here(self) -> bool:
        """Whether a training may begin with this loop: none before read batches without updates."""
        begin, place = (self.epoch, self.batches.start), self.place
        return not self.follows or place.is_trained or begin == place.trained

    def read(self, number: int, source: Origin | None) -> None:
        """Note that a batch was read."""
        place, self.read_to, self.reader = self.place, number, get_ident()
        if self.follows and not place.is_trained and number > self.batches.start:
            place.read, place.source = self.after(number), source

    def open(self, taken: Taken, *arrays: Any) -> None:
        """Note that a batch is opened, and let updates in this thread find the loop."""
        place = self.place
        if not self.is_new:
            self.opened.clear()
        self.number, self.taken, self.opened_at = taken.number, taken, place.updates
        try:
            self.opened.append([*map(ref, arrays)])
        except TypeError:  # a device's arrays, which are not referred to weakly
            self.opened.append([])
        place.opened += 1
        # a look at one batch, as in `next(iter(loader)).x`, keeps none
        was_kept = not self.is_open and self.read_to > self.batches.start
        self.is_late = was_kept or self.reader != get_ident()

        if self not in (known := _loops.get()):
            left = {loop.place: loop for loop in known if loop.is_new and not loop.is_open}
            kept = [*left.values()][-LEFT:]
            _loops.set((*kept, *(loop for loop in known if loop.is_open), self))

    def end(self) -> None:
        """Note that all were read. The epoch is over, also if the last ones had no update, unless
        the program has read ahead: then it is over with the update on the last one.
        """
        place = self.place
        if self.is_trained:
            place.finished = max(place.finished, self.epoch + 1)
            if self.waits_to <= self.number and not self.is_fed:
                self._move(self.batches.stop)
                self.opened_at = -1
        elif self.follows and not place.is_trained:
            place.read = self.after(self.batches.stop)

    def check(self, number: int) -> None:
        """Refuse an update on a batch if the training is elsewhere in the data.

        Raises:
            UsageError: naming both places.
        """
        place = self.place
        if self.rereads:
            raise UsageError(
                f"this is batch {number} of epoch {self.epoch} again, since the loop's batches"
                " before had no update, as in an evaluation; read the next epoch's by"
                f" loader.epoch({self.epoch + 1})"
            )
        if place.is_trained and not place.is_restored:
            return
        epoch, batch = place.trained
        if place.is_restored and not self.follows and (self.epoch, number) < place.trained:
            raise UsageError(
                f"this is batch {number} of epoch {self.epoch}, but the resumed loader goes on with"
                f" batch {batch} of epoch {epoch}; loop over the loader itself, or begin with"
                " loader.epoch(*loader.place)"
            )
        if not self.begins_here:
            raise UsageError(
                f"the updates would begin with batch {self.batches.start} of epoch {self.epoch},"
                " since a loop before read this loader's batches without an update; read them by"
                f" loader.epoch({epoch}), which does not count"
            )

    def train(self, number: int, is_known: bool) -> None:
        """Note that an update was made on a batch.

        Args:
            number: of the batch.
            is_known: whether the program gave the batch itself, as to a Worker. Otherwise it is the
                one that was opened last; if the program still holds others that it has opened
                since the update before, it may be any of them.
        """
        place = self.place
        if self.is_new and not is_known and len(self.opened) > 1:
            held = [any(array() is not None for array in arrays) for arrays in self.opened]
            self.is_unsure |= sum(held) > 1
        place.is_unsure = self.is_unsure and not is_known

        self.is_trained, self.waits_to = True, self.read_to
        self.is_fed |= self.reader != get_ident()
        if not place.is_trained or place.is_restored:
            place.is_trained, place.is_restored, place.read = True, False, None
        place.updates += 1
        self._move(number)

    def _move(self, number: int) -> None:
        # a batch that was kept, and is trained on again, moves nothing back
        if (after := self.after(number)) > self.place.trained:
            self.place.trained = after
            self.place.source = self.taken.source if self.taken else None


Reached = list[tuple[EpochLoop, int]]
"""Loops, and a batch of each."""

_loops: ContextVar[tuple[EpochLoop, ...]] = ContextVar("nnmpi_loops", default=())


def last_read() -> Reached:
    """Return, for each loader, the last batch that was opened since its last update.

    It is that of an open loop, or one of a loop whose batches the program had kept; otherwise that
    of an open one with updates, for a second optimizer; otherwise that of one that was left at its
    first batch, as in `next(iter(loader))`. Of two loops over a loader, such as a look at batches
    beside the training, the one counts that is at the training's place; otherwise one that had
    updates.
    """
    loops = _loops.get()
    if not loops:
        return []
    found = [loop for loop in loops if loop.is_current and loop.is_new]
    found = found or [loop for loop in loops if loop.is_trained and loop.is_open]
    if not found:
        left = [loop for loop in loops if loop.is_new and not loop.is_over]
        found = [loop for loop in left if loop.begins_here] or left
    if len(found) > 1:
        found.sort(key=lambda loop: (loop.is_here, loop.is_trained, loop.follows))
        found = [*{loop.place: loop for loop in found}.values()]
    return [(loop, loop.number) for loop in found]
