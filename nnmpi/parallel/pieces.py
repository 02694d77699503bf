"""Who has which piece of which array, and who writes it: worked out from what all ranks say, the same on each.

With two stages of two ranks each, the first layer sharded by columns, its bias replicated:

    name        whole     rank 0       rank 1       rank 2    rank 3        (* writes it)
    0.weight    (4, 6)    [:, 0:3]*    [:, 3:6]*
    0.bias      (6,)      whole*       whole
    1.weight    (6, 2)                              whole*    whole

Arithmetic on integers; nothing here holds an array or sends a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

from nnmpi.comm.wording import name_ranks
from nnmpi.errors import CheckpointError, LayoutError
from nnmpi.shard import Region


@dataclass(frozen=True)
class Outline:
    """What an array is without its values: its shape, and its dtype by name ("float32")."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: Any) -> Outline:
        """Return the outline of an array of any library."""
        return cls(tuple(array.shape), str(array.dtype))

    @property
    def bytes(self) -> int:
        """The bytes of all its elements."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"shape {self.shape} and {self.dtype}"


@dataclass(frozen=True)
class Piece:
    """A region of an array on one rank; None for all of it.

    Attributes:
        owned: whether this rank is the one that writes it.
    """

    rank: int
    region: Region | None
    owned: bool


@dataclass(frozen=True)
class Place:
    """Where one array of the full model is.

    Attributes:
        outline: of the whole array.
        pieces: all that ranks hold of it, by rank.
    """

    outline: Outline
    pieces: tuple[Piece, ...]

    @property
    def written(self) -> list[Piece]:
        """The pieces that make up the whole, each element once; empty ones are left out."""
        return [piece for piece in self.pieces if piece.owned and not is_empty(piece.region, self.outline.shape)]

    def holders(self) -> dict[Region | None, list[int]]:
        """Return each different region with the ranks that have it; empty ones are left out."""
        found: dict[Region | None, list[int]] = {}
        for piece in self.pieces:
            if not is_empty(piece.region, self.outline.shape):
                found.setdefault(piece.region, []).append(piece.rank)
        return found


def is_empty(region: Region | None, shape: tuple[int, ...]) -> bool:
    """Return whether there is no element in this region of an array of that shape."""
    return prod(shape if region is None else region.local_shape) == 0


def encode(name: str, outline: Outline, region: Region | None, owned: bool) -> list[Any]:
    """Return what a rank tells the others of one of its arrays, as a JSON value."""
    return [name, outline.shape, outline.dtype, None if region is None else asdict(region), owned]


def survey(everyones: Sequence[Sequence[Sequence[Any]]], order: Sequence[str]) -> dict[str, Place]:
    """Return the place of each array of the full model, in order.

    Args:
        everyones: for each rank, its `encode`d arrays.
        order: the names of all arrays.

    Raises:
        LayoutError: when ranks disagree on an array, it is nobody's, its pieces leave gaps or overlap, or a rank has
            one that is not in `order`.
    """
    outlines: dict[str, Outline] = {}
    pieces: dict[str, list[Piece]] = {name: [] for name in order}
    for rank, entries in enumerate(everyones):
        for name, shape, dtype, region, owned in entries:
            outline = Outline(tuple(shape), dtype)
            if name not in pieces:
                raise LayoutError(f"rank {rank} has {name!r}, which is not among the {len(order)} names of the model")
            if outlines.setdefault(name, outline) != outline:
                first = pieces[name][0].rank
                raise LayoutError(f"{name} has {outlines[name]} on rank {first}, but {outline} on rank {rank}")
            if any(piece.rank == rank for piece in pieces[name]):
                raise LayoutError(f"rank {rank} has {name!r} twice; a rank gives each array once")
            pieces[name].append(Piece(rank, None if region is None else _region(region), owned))
    places = {}
    for name in order:
        if not pieces[name]:
            raise LayoutError(f"no rank has {name!r}; every array of the model must be somewhere")
        places[name] = Place(outlines[name], tuple(pieces[name]))
        _check_cover(name, places[name])
    return places


def check_fit(found: Mapping[str, Outline], expected: Mapping[str, Outline], source: object) -> None:
    """Check that the arrays of a file have the names, shapes and dtypes that the model has.

    Raises:
        CheckpointError: naming the file, the array and both shapes or dtypes.
    """
    for name, outline in expected.items():
        if name not in found:
            raise CheckpointError(f"{source} has no {name}, which this model needs with shape {outline.shape}")
        if found[name] != outline:
            raise CheckpointError(f"{source} has {name} with {found[name]}, but this model needs {outline}")
    for name, outline in found.items():
        if name not in expected:
            raise CheckpointError(f"{source} has {name} with shape {outline.shape}, which this model does not have")


def _region(values: Mapping[str, Any]) -> Region:
    return Region(**{**values, "shape": tuple(values["shape"])})


def _check_cover(name: str, place: Place) -> None:
    """Check that the written pieces are the whole array, each element once."""
    shape, written = place.outline.shape, place.written
    if prod(shape) == 0:
        return
    if any(piece.region is None or piece.region.is_whole for piece in written):
        if len(written) > 1:
            raise LayoutError(f"{name} is written by {name_ranks(piece.rank for piece in written)}; one may own it")
        return
    regions = sorted((piece.region for piece in written if piece.region), key=lambda region: region.start)
    cuts = {(region.axis, region.repeats) for region in regions}
    if len(cuts) > 1:
        raise LayoutError(f"{name} is cut along {len(cuts)} different axes; its pieces must be of one axis")
    at = 0
    for region in regions:
        if region.start != at:
            raise LayoutError(
                f"the pieces of {name} do not join on axis {region.axis}: one ends at {at}, the next begins at "
                f"{region.start}"
            )
        at = region.stop
    length = shape[regions[0].axis] // regions[0].repeats if regions else 0
    if not regions or at != length:
        raise LayoutError(f"the end of {name} is written by no rank; give an owner to each piece")
