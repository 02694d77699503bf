"""The arrays of a model that is spread over ranks, whole and one at a time on rank 0, and back again.

    pull      rank 1  [a0]--.                                         push     file -> rank 0 [a0 a1]
              rank 2  [a1]--+--> rank 0 [a0 a1] -> file, then the next                 |--[a0]--> rank 1 --> rank 3
              rank 3  [a0] (a replica, which owns nothing)                              `--[a1]--> rank 2

No rank ever holds more than its own part, one whole array and one piece of it. Nothing here knows what a layout is:
who has what is found by asking (see `pieces`), so that what one layout wrote any other can read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.comm.agree import agree
from nnmpi.comm.group import Group
from nnmpi.comm.mail import opened
from nnmpi.comm.wording import name_ranks
from nnmpi.errors import CheckpointError, LayoutError, ShapeError
from nnmpi.parallel.moves import Trial, assemble, give, spread, to_host
from nnmpi.parallel.pieces import Outline, Place, check_fit, encode, survey
from nnmpi.shard import Region


@dataclass(frozen=True)
class Entry:
    """One array of this rank: a parameter, a buffer, or an optimizer's state of a parameter.

    Attributes:
        name: the full name in the full model ("2.weight"; "momentum/2.weight").
        shape, dtype: of the whole array.
        region: the part that this rank has; None for all of it.
        array: the values, a live view (of `region.local_shape`), on the host or a device.
        owned: whether this rank is the one that writes it; of each element there must be one owner.

    Raises:
        ShapeError: when the array is not of the region's shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    region: Region | None
    array: Array
    owned: bool

    def __post_init__(self) -> None:
        """Check that the array is that region of such a whole."""
        whole, local = (self.shape, self.shape)
        if self.region is not None:
            whole, local = self.region.shape, self.region.local_shape
        if whole != self.shape or tuple(self.array.shape) != local:
            raise ShapeError(
                f"{self.name} has shape {tuple(self.array.shape)} here, but this rank's part of {self.shape} is {local}"
            )

    @classmethod
    def of(cls, name: str, array: Array, region: Region | None = None, owned: bool = True) -> Entry:
        """Return the entry of an array, with the shape and dtype that it says itself."""
        shape = tuple(array.shape) if region is None else region.shape
        return cls(name, shape, str(array.dtype), region, array, owned)


class LayoutState:
    """The arrays of all ranks of a group, as one model's.

    Args:
        entries: this rank's arrays; there may be none.
        order: the names of all arrays of the full model, in order; the same on all ranks.
        group: all ranks among which the model and its replicas are spread.
    """

    def __init__(self, entries: Sequence[Entry], order: Sequence[str], group: Group) -> None:
        self._entries, self._order, self._group = list(entries), list(order), group
        self._own = {entry.name: entry.array for entry in self._entries}
        self._places: dict[str, Place] | None = None

    def outlines(self) -> dict[str, Outline]:
        """Return shape and dtype of each whole array by name, in order. Collective the first time.

        Raises:
            LayoutError: on all ranks, when the ranks' arrays do not make up one model; the message says which.
        """
        return {name: place.outline for name, place in self._survey().items()}

    def pull(self, write: Callable[[str, Array], Any]) -> None:
        """Call `write(name, whole array)` on rank 0 for each name, in order. Collective.

        The array is C-contiguous, in host memory, and may be overwritten after the call has returned.

        Raises:
            LayoutError: on all ranks: see `outlines`.
            NnmpiError: on all ranks, when `write` raises or a rank cannot give its piece; nothing more is written.
        """
        places, trial = self._survey(), Trial()
        with opened(self._group) as mail:
            for name, place in places.items():
                if self._group.is_root:
                    whole = assemble(place, self._own.get(name), mail, trial)
                    trial.attempt(write, name, whole)
                else:
                    give(place, self._group.rank, self._own.get(name), mail, trial)
        agree(self._group, trial.error, speaker=0)

    def check(self, found: Mapping[str, Outline] | None, source: object = "the checkpoint") -> None:
        """Check that what rank 0 has found has the names, shapes and dtypes that the ranks' arrays have. Collective.

        Args:
            found, source: see `push`.

        Raises:
            CheckpointError: on all ranks, with the first difference.
            LayoutError: on all ranks: see `outlines`.
        """
        expected, trial = self.outlines(), Trial()
        if self._group.is_root:
            trial.attempt(check_fit, found or {}, expected, source)
        agree(self._group, trial.error, speaker=0)

    def push(
        self,
        read: Callable[[str], Array],
        found: Mapping[str, Outline] | None = None,
        source: object = "the checkpoint",
    ) -> None:
        """Give every rank its part of what rank 0's `read(name)` returns for each name, in order. Collective.

        Args:
            read: name -> the whole array; called on rank 0 alone.
            found: what there is to be read, on rank 0; without it everything is read once more, to see what it is.
            source: what the arrays come from, for messages; on rank 0.

        Raises:
            CheckpointError: on all ranks, when a name is missing or unknown, or a shape or dtype differs; nothing is
                changed then.
            LayoutError: on all ranks: see `outlines`.
            NnmpiError: on all ranks, when reading or writing fails halfway; the values are then of no use.
        """
        places, trial, rank = self._survey(), Trial(), self._group.rank
        if found is None and rank == 0:
            found = trial.attempt(_look, read, places)
        agree(self._group, trial.error, speaker=0)
        self.check(found, source)
        with opened(self._group) as mail:
            for name, place in places.items():
                whole = None if rank else trial.attempt(_read, read, name, place.outline, source)
                for region, holders in place.holders().items():
                    spread(place, rank, region, holders, whole, self._own.get(name), mail, trial)
        agree(self._group, trial.error, speaker=0)

    def to_dict(self, everywhere: bool = False) -> dict[str, Array]:
        """Return copies of all whole arrays by name, in host memory, on rank 0 or `everywhere`; else nothing.

        For models that fit into one rank's memory, as in tests. Collective.

        Raises:
            LayoutError, NnmpiError: see `pull`.
        """
        found: dict[str, Array] = {}
        self.pull(lambda name, array: found.update({name: array.copy()}))
        if everywhere:
            for name, outline in self.outlines().items():
                array = found.setdefault(name, np.empty(outline.shape, outline.dtype))
                self._group.broadcast(array)
        return found

    def _survey(self) -> dict[str, Place]:
        """Return where everything is. Collective the first time."""
        if self._places is None:
            own = [encode(e.name, Outline(e.shape, e.dtype), e.region, e.owned) for e in self._entries]
            digest = hashlib.blake2b("\0".join(self._order).encode(), digest_size=16).hexdigest()
            everyones = self._group.gather([digest, own])
            different = [rank for rank, (theirs, _) in enumerate(everyones) if theirs != everyones[0][0]]
            if different:
                raise LayoutError(f"{name_ranks(different)}: other names of the model than rank 0, or another order")
            self._places = survey([entries for _, entries in everyones], self._order)
        return self._places


def _look(read: Callable[[str], Array], names: Iterable[str]) -> dict[str, Outline]:
    """Return the outlines of those arrays that there are."""
    found = {}
    for name in names:
        with suppress(KeyError):
            found[name] = Outline.of(read(name))
    return found


def _read(read: Callable[[str], Array], name: str, outline: Outline, source: object) -> Array:
    whole = to_host(read(name))
    if Outline.of(whole) != outline:
        raise CheckpointError(f"{source} has changed: {name} is now of {Outline.of(whole)}, not {outline}")
    return whole
