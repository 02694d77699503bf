"""Which rank holds which slice of which array of the model, and which rank writes it.

Every rank works out the same maps from what all ranks report. With two stages of two ranks each, the first layer
sharded by columns, its bias replicated:

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

from nnmpi.comm.agreement import name_ranks
from nnmpi.errors import CheckpointError, LayoutError
from nnmpi.shard import Region


@dataclass(frozen=True)
class ArraySpec:
    """The shape of an array, and its dtype by name ("float32")."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: Any) -> ArraySpec:
        """Return the spec of an array of any library."""
        return cls(tuple(array.shape), str(array.dtype))

    @property
    def bytes(self) -> int:
        """The bytes of all its elements."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"shape {self.shape} and {self.dtype}"


@dataclass(frozen=True)
class ArraySlice:
    """What one rank holds of an array.

    Attributes:
        rank: the rank.
        region: what it holds; None for all of the array.
        owned: whether this rank is the one that writes it.
    """

    rank: int
    region: Region | None
    owned: bool


@dataclass(frozen=True)
class ShardMap:
    """Where one array of the full model is: a parameter, a buffer, or an optimizer's state of a parameter.

    Attributes:
        spec: of the whole array.
        slices: what the ranks hold of it, in the order of the ranks.
    """

    spec: ArraySpec
    slices: tuple[ArraySlice, ...]

    @property
    def written(self) -> list[ArraySlice]:
        """The slices that are written, which make up the whole array, each element once; empty ones are left out."""
        return [each for each in self.slices if each.owned and not is_empty(each.region, self.spec.shape)]

    def holders(self) -> dict[Region | None, list[int]]:
        """Return each different region with the ranks that have it; empty ones are left out."""
        found: dict[Region | None, list[int]] = {}
        for each in self.slices:
            if not is_empty(each.region, self.spec.shape):
                found.setdefault(each.region, []).append(each.rank)
        return found


def is_empty(region: Region | None, shape: tuple[int, ...]) -> bool:
    """Return whether there is no element in this region of an array of that shape."""
    return prod(shape if region is None else region.local_shape) == 0


def describe(name: str, spec: ArraySpec, region: Region | None, owned: bool) -> list[Any]:
    """Return what a rank reports to the others about one of its arrays, as a JSON value.

    Args:
        name: the array's full name in the full model.
        spec: of the whole array.
        region: what this rank holds; None for all of it.
        owned: whether this rank is the one that writes it.
    """
    return [name, spec.shape, spec.dtype, None if region is None else asdict(region), owned]


def shard_maps(everyones: Sequence[Sequence[Sequence[Any]]], order: Sequence[str]) -> dict[str, ShardMap]:
    """Return the map of each array of the full model, in order.

    Args:
        everyones: for each rank what `describe` gave for its arrays.
        order: the names of all arrays.

    Raises:
        LayoutError: when ranks disagree on an array's shape or dtype, no rank has it, its slices leave gaps or overlap,
            or a rank has an array that is not in `order`.
    """
    specs: dict[str, ArraySpec] = {}
    slices: dict[str, list[ArraySlice]] = {name: [] for name in order}
    for rank, entries in enumerate(everyones):
        for name, shape, dtype, region, owned in entries:
            spec = ArraySpec(tuple(shape), dtype)
            if name not in slices:
                raise LayoutError(f"rank {rank} has {name!r}, which is not among the {len(order)} names of the model")
            if specs.setdefault(name, spec) != spec:
                first = slices[name][0].rank
                raise LayoutError(f"{name} has {specs[name]} on rank {first}, but {spec} on rank {rank}")
            if slices[name] and slices[name][-1].rank == rank:
                raise LayoutError(f"rank {rank} has {name!r} twice; a rank gives each array once")
            slices[name].append(ArraySlice(rank, None if region is None else _region(region), owned))
    maps = {}
    for name in order:
        if not slices[name]:
            raise LayoutError(f"no rank has {name!r}; every array of the model must be somewhere")
        maps[name] = ShardMap(specs[name], tuple(slices[name]))
        _check_cover(name, maps[name])
    return maps


def check_fit(found: Mapping[str, ArraySpec], expected: Mapping[str, ArraySpec], source: object) -> None:
    """Check that the arrays of a file have the names, shapes and dtypes that the model has.

    Args:
        found: what the file has, by name.
        expected: what the model has.
        source: the file, for messages.

    Raises:
        CheckpointError: naming the file, the array and both shapes or dtypes.
    """
    for name, spec in expected.items():
        if name not in found:
            raise CheckpointError(f"{source} has no {name}, which this model needs with shape {spec.shape}")
        if found[name] != spec:
            raise CheckpointError(f"{source} has {name} with {found[name]}, but this model needs {spec}")
    for name, spec in found.items():
        if name not in expected:
            raise CheckpointError(f"{source} has {name} with shape {spec.shape}, which this model does not have")


def _region(values: Mapping[str, Any]) -> Region:
    return Region(**{**values, "shape": tuple(values["shape"])})


def _check_cover(name: str, shards: ShardMap) -> None:
    """Check that the written slices are the whole array, each element once."""
    shape, written = shards.spec.shape, shards.written
    if prod(shape) == 0:
        return
    if any(each.region is None or each.region.is_whole for each in written):
        if len(written) > 1:
            raise LayoutError(f"{name} is written by {name_ranks(each.rank for each in written)}; one may own it")
        return
    regions = sorted((each.region for each in written if each.region), key=lambda region: region.start)
    cuts = {(region.axis, region.repeats) for region in regions}
    if len(cuts) > 1:
        raise LayoutError(f"{name} is cut along {len(cuts)} different axes; its slices must be of one axis")
    at = 0
    for region in regions:
        if region.start != at:
            raise LayoutError(
                f"the slices of {name} do not join on axis {region.axis}: one ends at {at}, the next begins at "
                f"{region.start}"
            )
        at = region.stop
    length = shape[regions[0].axis] // regions[0].repeats if regions else 0
    if not regions or at != length:
        raise LayoutError(f"the end of {name} is written by no rank; give an owner to each slice")
