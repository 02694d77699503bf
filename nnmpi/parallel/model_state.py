"""A distributed model's state: its full arrays pass through rank 0, one at a time.

    gather    rank 1  [a0]--.                                         scatter  file -> rank 0 [a0 a1]
              rank 2  [a1]--+--> rank 0 [a0 a1] -> file, then the next                 |--[a0]--> rank 1 --> rank 3
              rank 3  [a0] (a replica, which owns nothing)                              `--[a1]--> rank 2

No rank ever holds more than its own slices, one whole array and one slice of that. This module does
not know layouts: the ranks report which slices they hold, and every rank works out the same map
from that, so any layout can read what another one wrote. With two stages of two ranks each, the
first layer sharded by columns, its bias replicated:

    name       whole    rank 0      rank 1      rank 2   rank 3  (* writes it: `Arrangement.writes`)
    0.weight   (4, 6)   [:, 0:3]*   [:, 3:6]*
    0.bias     (6,)     whole*      whole
    1.weight   (6, 2)                           whole*   whole

A rank that fails does not stop there. It keeps its error and answers "no" to each of its remaining
transfers, so that nobody blocks waiting for it; after the last array, all ranks raise together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.agreement import CollectivePhase, refuse_different
from nnmpi.comm.algorithms.tree import tree_broadcast
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import Rendezvous, rendezvous
from nnmpi.errors import CheckpointError, LayoutError, ShapeError
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
        region: what it holds.
        owned: whether this rank is the one that writes it.
    """

    rank: int
    region: Region
    owned: bool


@dataclass(frozen=True)
class ShardMap:
    """The location of a full array: a parameter, a buffer, or optimizer state of a parameter.

    Attributes:
        spec: of the whole array.
        slices: what the ranks hold of it, in the order of the ranks; empty slices are left out.
    """

    spec: ArraySpec
    slices: list[ArraySlice]

    @property
    def written(self) -> list[ArraySlice]:
        """The slices that are written, which make up the whole array, each element once."""
        return [item for item in self.slices if item.owned]

    def holders(self) -> dict[Region, list[int]]:
        """Return each different region with the ranks that have it."""
        result: dict[Region, list[int]] = {}
        for item in self.slices:
            result.setdefault(item.region, []).append(item.rank)
        return result


def shard_maps(
    everyones: Sequence[Sequence[Sequence[Any]]], order: Sequence[str]
) -> dict[str, ShardMap]:
    """Return the map of each array of the full model, in order.

    Args:
        everyones: for each rank what `StateEntry.describe` gave for its arrays.
        order: the names of all arrays.

    Raises:
        LayoutError: when ranks disagree on an array's shape or dtype, no rank has it, its slices
            leave gaps or overlap, or a rank has an array that is not in `order`.
    """
    maps: dict[str, ShardMap] = {}
    owners, known = dict[str, int](), set(order)  # the last rank that has each
    for rank, entries in enumerate(everyones):
        for name, shape, dtype, region, owned in entries:
            spec = ArraySpec(tuple(shape), dtype)
            if name not in known:
                raise LayoutError(
                    f"rank {rank} has {name!r}, which is not among the {len(order)} names of the"
                    " model"
                )
            if maps.setdefault(name, ShardMap(spec, [])).spec != spec:
                raise LayoutError(
                    f"{name} has {maps[name].spec} on rank {owners[name]}, but {spec} on rank {rank}"
                )
            if owners.get(name) == rank:
                raise LayoutError(f"rank {rank} has {name!r} twice; a rank gives each array once")
            owners[name] = rank
            axes = spec.shape or (1,)  # a single number counts as an array of one
            part = Region(axes, 0, 0, axes[0]) if region is None else Region(axes, *region)
            if prod(part.local_shape):
                maps[name].slices.append(ArraySlice(rank, part, owned))
    for name in order:
        if name not in maps:
            raise LayoutError(f"no rank has {name!r}; every array of the model must be somewhere")
        _check_cover(name, maps[name])
    return {name: maps[name] for name in order}


def check_fit(
    found: Mapping[str, ArraySpec], expected: Mapping[str, ArraySpec], source: object
) -> None:
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
            raise CheckpointError(
                f"{source} has no {name}, which this model needs with shape {spec.shape}"
            )
        if found[name] != spec:
            raise CheckpointError(
                f"{source} has {name} with {found[name]}, but this model needs {spec}"
            )
    for name, spec in found.items():
        if name not in expected:
            raise CheckpointError(
                f"{source} has {name} with shape {spec.shape}, which this model does not have"
            )


def _check_cover(name: str, shards: ShardMap) -> None:
    """Check that the written slices are the whole array, each element once."""
    written = sorted(shards.written, key=lambda entry: entry.region.start)
    regions = [item.region for item in written]
    cuts = {(region.axis, region.repeats) for region in regions}
    joins = [region.start for region in regions] == [0, *(region.stop for region in regions)][
        : len(regions)
    ]
    count = sum(prod(region.local_shape) for region in regions)
    if len(cuts) > 1 or not joins or count != prod(shards.spec.shape):
        parts = (
            f"{item.region.start}..{item.region.stop} of axis {item.region.axis} by rank"
            f" {item.rank}"
            for item in written
        )
        raise LayoutError(
            f"what the ranks write of {name} is not all of it, each element once:"
            f" {', '.join(parts) or 'nothing'}"
        )


@dataclass(frozen=True)
class ShardedArray:
    """An array whose consecutive ranges belong to a group's ranks. See `zero`.

    It stands for the whole array in a `StateEntry`, is put together when its turn comes, and is
    gone afterwards.

    Attributes:
        shape: of the whole array, which may itself be a rank's part of a larger one.
        own: (n,) a live view of what this rank has.
        place: which elements of the flat array these are.
        counts: how many each rank has.
        ranks: the ranks.
    """

    shape: tuple[int, ...]
    own: Array
    place: slice
    counts: Sequence[int]
    ranks: Group

    @property
    def dtype(self) -> Any:
        """The elements' dtype."""
        return self.own.dtype

    def gather(self) -> Array:
        """Return the whole array, on every rank. Collective."""
        xp = namespace(self.own)
        local = xp.ascontiguousarray(self.own)
        return xp.concatenate(self.ranks.all_gather_v(local, self.counts)).reshape(self.shape)

    def put(self, whole: Array) -> None:
        """Keep what is this rank's of an array."""
        self.own[...] = namespace(self.own).asarray(whole.reshape(-1)[self.place])


@dataclass(frozen=True)
class StateEntry:
    """One array of this rank: a parameter, a buffer, or an optimizer's state of a parameter.

    Attributes:
        name: the full name in the full model ("2.weight"; "momentum/2.weight").
        array: the values, a live view (of `region.local_shape`), on the host or a device; or shared
            out further.
        region: the part that this rank has; None for all of it.
        owned: whether this rank is the one that writes it; each element must have exactly one
            owner.

    Raises:
        ShapeError: when the array is not of the region's shape.
    """

    name: str
    array: Array | ShardedArray
    region: Region | None = None
    owned: bool = True

    def __post_init__(self) -> None:
        """Check that the array has the region's shape."""
        if self.region is not None and tuple(self.array.shape) != self.region.local_shape:
            raise ShapeError(
                f"{self.name} has shape {tuple(self.array.shape)} here, but this rank's part of"
                f" {self.region.shape} is {self.region.local_shape}"
            )

    def describe(self) -> list[Any]:
        """Return what a rank reports to the others about an array, as a JSON value."""
        part, shape, region = self.region, self.array.shape, None
        if part is not None:
            shape, region = part.shape, [part.axis, part.start, part.stop, part.repeats]
        return [self.name, shape, str(self.array.dtype), region, self.owned]


class ModelState:
    """The arrays that the ranks of a group hold, seen as those of one full model.

    Args:
        entries: this rank's arrays; there may be none.
        order: the names of all arrays of the full model, in order; the same on all ranks.
        group: all ranks over which the model and its replicas are spread.
    """

    def __init__(self, entries: Sequence[StateEntry], order: Sequence[str], group: Group) -> None:
        self._entries, self._order, self._group = list(entries), list(order), group
        self._own = {entry.name: entry.array for entry in self._entries}
        self._maps: dict[str, ShardMap] | None = None

    def specs(self) -> dict[str, ArraySpec]:
        """Return shape and dtype of each whole array by name, in order. Collective the first time.

        Raises:
            LayoutError: on all ranks, when the ranks' arrays do not make up one model; the message
                says which.
        """
        return {name: shards.spec for name, shards in self._shard_maps().items()}

    def gather(self, write: Callable[[str, Array], Any]) -> None:
        """Call `write(name, whole array)` on rank 0 for each name, in order. Collective.

        The array is C-contiguous, in host memory, and may be overwritten after the call has
        returned. It may be the model's own, and must not be changed.

        Raises:
            LayoutError: on all ranks: see `specs`.
            NnmpiError: on all ranks, when `write` raises or a rank cannot send its slice; nothing
                more is written then.
        """
        maps, phase = self._shard_maps(), CollectivePhase(self._group)
        with rendezvous(self._group) as channel:
            for name, shards in maps.items():
                local = self._own.get(name)
                local = local.gather() if isinstance(local, ShardedArray) else local
                full = _gather_array(shards, self._group.rank, local, channel, phase)
                if self._group.is_root:
                    phase.attempt(write, name, full)
        phase.agree(speaker=0)

    def check(
        self, found: Mapping[str, ArraySpec] | None, source: object = "the checkpoint"
    ) -> None:
        """Compare names, shapes and dtypes on rank 0 with those of the ranks' arrays. Collective.

        Raises:
            CheckpointError: on all ranks, with the first difference.
            LayoutError: on all ranks: see `specs`.
        """
        expected, phase = self.specs(), CollectivePhase(self._group)
        if self._group.is_root:
            phase.attempt(check_fit, found or {}, expected, source)
        phase.agree(speaker=0)

    def scatter(
        self,
        read: Callable[[str], Array],
        found: Mapping[str, ArraySpec] | None = None,
        source: object = "the checkpoint",
    ) -> None:
        """Scatter what rank 0's `read(name)` returns for each name, in order. Collective.

        Args:
            read: name -> the whole array; called on rank 0 alone.
            found: on rank 0 the shapes and dtypes of what `read` will return; by default those that
                the model has.
            source: what the arrays come from, for messages; on rank 0.

        Raises:
            CheckpointError: on all ranks, when a name is missing or unknown, or a shape or dtype
                differs; nothing is changed then.
            LayoutError: on all ranks: see `specs`.
            NnmpiError: on all ranks, when reading or writing fails halfway; the values are then of
                no use.
        """
        maps, phase, rank = self._shard_maps(), CollectivePhase(self._group), self._group.rank
        self.check(self.specs() if found is None else found, source)
        with rendezvous(self._group) as channel:
            for name, shards in maps.items():
                full = None if rank else phase.attempt(_read, read, name, shards.spec, source)
                for region, holders in shards.holders().items():
                    chain = [0, *(holder for holder in holders if holder)]
                    if rank not in chain:
                        continue
                    make = partial(np.empty, region.local_shape, shards.spec.dtype)
                    part = phase.attempt(make) if rank else phase.attempt(_take, full, region)
                    for step in tree_broadcast(chain.index(rank), len(chain)):
                        if step.from_ is not None and not phase.require(
                            channel.receive(part, chain[step.from_])
                        ):
                            part = None
                        if step.to is not None:
                            channel.send(part, chain[step.to])
                    if rank in holders:
                        phase.attempt(_write, self._own[name], part)
        phase.agree(speaker=0)

    def to_dict(self, everywhere: bool = False) -> dict[str, Array]:
        """Return copies of all full arrays by name, on rank 0 or `everywhere`. Collective.

        For models that fit into one rank's memory, as in tests. Collective.

        Raises:
            LayoutError, NnmpiError: see `gather`.
        """
        result: dict[str, Array] = {}
        self.gather(lambda name, array: result.update({name: array.copy()}))
        if everywhere:
            for name, spec in self.specs().items():
                array = result.setdefault(name, np.empty(spec.shape, spec.dtype))
                self._group.broadcast(array)
        return result

    def _shard_maps(self) -> dict[str, ShardMap]:
        """Return where every array is. Collective the first time."""
        if self._maps is None:
            local = [entry.describe() for entry in self._entries]
            digest = hashlib.blake2b("\0".join(self._order).encode(), digest_size=16).hexdigest()
            everyones = self._group.gather([digest, local])
            problem = "the names of the model's arrays, or their order, differ between the ranks"
            refuse_different(
                [[theirs] for theirs, _ in everyones], problem, kind=LayoutError, show=None
            )
            self._maps = shard_maps([entries for _, entries in everyones], self._order)
        return self._maps


def _read(read: Callable[[str], Array], name: str, spec: ArraySpec, source: object) -> Array:
    full = _to_host(read(name))
    if ArraySpec.of(full) != spec:
        raise CheckpointError(
            f"{source} has changed: {name} is now of {ArraySpec.of(full)}, not {spec}"
        )
    return full


def _to_host(array: Array) -> Array:
    """Return the values as a C-contiguous array in host memory, a copy only where one is needed;
    0-d stays 0-d.
    """
    get = getattr(array, "get", None)
    return np.asarray(array if get is None else get(), order="C")


def _gather_array(
    shards: ShardMap, rank: int, own: Array | None, channel: Rendezvous, phase: CollectivePhase
) -> Array | None:
    """Return the whole array on rank 0, to which its other owners send their slices; None elsewhere
    or on failure.
    """
    spec, written = shards.spec, shards.written
    if [(item.rank, item.region.is_whole) for item in written] == [(0, True)]:
        # without a copy where it lies in order
        return None if rank else phase.attempt(_to_host, own)
    full = None if rank else phase.attempt(np.empty, spec.shape, spec.dtype)
    for entry in written:
        if entry.rank == rank == 0:
            phase.attempt(_put, full, entry.region, own)
        elif entry.rank == rank:
            phase.require(channel.send(phase.attempt(_to_host, own), to=0))
        elif rank == 0:
            part = phase.attempt(np.empty, entry.region.local_shape, spec.dtype)
            if phase.require(channel.receive(part, entry.rank)):
                phase.attempt(_put, full, entry.region, part)
    return None if phase.stopped else full


def _put(whole: Array, region: Region, part: Array) -> None:
    region.put(whole.reshape(region.shape), _to_host(part))


def _take(whole: Array, region: Region) -> Array:
    return np.asarray(region.take(whole.reshape(region.shape)), order="C")


def _write(own: Array | ShardedArray, part: Array) -> None:
    if isinstance(own, ShardedArray):
        own.put(part)
        return
    own[...] = namespace(own).asarray(part.reshape(own.shape))
