"""A distributed model's state: its full arrays pass through rank 0, one at a time.

    gather    rank 1  [a0]--.
              rank 2  [a1]--+--> rank 0 [a0 a1] -> file, then the next array
              rank 3  [a0]       a replica, which owns nothing

    scatter   file -> rank 0 [a0 a1] --[a0]--> rank 1 --> rank 3
                                    `--[a1]--> rank 2

No rank ever holds more than its own slices, one full array and one slice of it. This module does
not depend on layouts: the ranks report their slices, and every rank computes the same map from the
reports. So any layout can read a checkpoint of any other. With two stages of two ranks each, the
first layer sharded by columns, its bias replicated:

    name       shape    rank 0      rank 1      rank 2   rank 3  (* `Arrangement.writes_here`)
    0.weight   (4, 6)   [:, 0:3]*   [:, 3:6]*
    0.bias     (6,)     all*        all
    1.weight   (6, 2)                           all*     all

A rank with an error does not raise at once. It saves the error and answers "no" to each of its
remaining transfers, so that no rank blocks waiting for it; after the last array, all ranks raise
together.

It was tried and dropped that each rank writes its own region of the file: with one writer, a
checkpoint survives a kill at any moment, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.base.errors import CheckpointError, LayoutError, ShapeError, group_ranks
from nnmpi.base.shard import Region
from nnmpi.comm.agreement import CollectivePhase, decode_json, refuse_different
from nnmpi.comm.algorithms.tree import tree_broadcast
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import Rendezvous, rendezvous


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


ArraySpecs: TypeAlias = Mapping[str, ArraySpec]  # by the arrays' names
ArraySource: TypeAlias = tuple[Callable[[str], Array], ArraySpecs | None, Path | None]
"""What gives a file's arrays by name, their specs, and its name; the arguments of `scatter`."""


@dataclass(frozen=True)
class ArraySlice:
    """One rank's slice of an array.

    Attributes:
        rank: the rank.
        region: the slice.
        owned: whether this rank writes it.
    """

    rank: int
    region: Region
    owned: bool


@dataclass(frozen=True)
class ShardMap:
    """The location of a full array: a parameter, a buffer, or optimizer state of a parameter.

    Attributes:
        spec: of the full array.
        slices: the ranks' slices, in the order of the ranks, without empty ones.
    """

    spec: ArraySpec
    slices: list[ArraySlice]

    @property
    def written(self) -> list[ArraySlice]:
        """The owned slices; together they are the full array, each element once."""
        return [item for item in self.slices if item.owned]

    def holders(self) -> dict[Region, list[int]]:
        """Return the distinct regions, each with its ranks."""
        return group_ranks((item.rank, item.region) for item in self.slices)


def shard_maps(
    by_rank: Sequence[Sequence[Sequence[Any]]], order: Sequence[str]
) -> dict[str, ShardMap]:
    """Return the map of each array of the full model, in order.

    Args:
        by_rank: each rank's list of `StateEntry.describe`.
        order: the names of all arrays.

    Raises:
        LayoutError: when ranks disagree on an array's shape or dtype, no rank has it, its slices
            leave gaps or overlap, or a rank has an array that is not in `order`.
    """
    maps: dict[str, ShardMap] = {}
    owners, names = dict[str, int](), set(order)  # the last rank that has each
    for rank, entries in enumerate(by_rank):
        for name, shape, dtype, region, owned in entries:
            spec = ArraySpec(tuple(shape), dtype)
            if name not in names:
                raise LayoutError(
                    f"rank {rank} has {name!r}, which is not among the {len(order)} names of the"
                    " model"
                )
            if maps.setdefault(name, ShardMap(spec, [])).spec != spec:
                raise LayoutError(
                    f"{name} has {maps[name].spec} on rank {owners[name]}, but {spec} on rank"
                    f" {rank}"
                )
            if owners.get(name) == rank:
                raise LayoutError(f"rank {rank} has {name!r} twice; a rank gives each array once")
            owners[name] = rank
            axes = spec.shape or (1,)  # a scalar counts as an array of one element
            part = Region(axes, 0, 0, axes[0]) if region is None else Region(axes, *region)
            if prod(part.local_shape):
                maps[name].slices.append(ArraySlice(rank, part, owned))
    for name in order:
        if name not in maps:
            raise LayoutError(f"no rank has {name!r}; each array of the model must be on a rank")
        _check_cover(name, maps[name])
    return {name: maps[name] for name in order}


def check_fit(specs: ArraySpecs, expected: ArraySpecs, source: object) -> None:
    """Check that a file's arrays have the model's names, shapes and dtypes.

    Args:
        specs: the file's arrays, by name.
        expected: the model's.
        source: the file, for messages.

    Raises:
        CheckpointError: naming the file, the array and both shapes or dtypes.
    """
    for name, spec in expected.items():
        if name not in specs:
            raise CheckpointError(
                f"{source} has no {name}, which this model needs with shape {spec.shape}"
            )
        if specs[name] != spec:
            raise CheckpointError(
                f"{source} has {name} with {specs[name]}, but this model needs {spec}"
            )
    for name, spec in specs.items():
        if name not in expected:
            raise CheckpointError(
                f"{source} has {name} with shape {spec.shape}, which this model does not have"
            )


def _check_cover(name: str, shards: ShardMap) -> None:
    """Check that the owned slices make up the full array, each element once."""
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
            f"the ranks do not write each element of {name} exactly once:"
            f" {', '.join(parts) or 'nothing'}"
        )


@dataclass(frozen=True)
class ShardedArray:
    """An array whose consecutive ranges belong to a group's ranks. See `zero`.

    In a `StateEntry` it represents the full array, which `ModelState` gathers when it needs it, and
    frees afterwards.

    Attributes:
        shape: of the full array, which may itself be a rank's part of a larger one.
        values: (n,) a live view of this rank's elements.
        span: the position of these elements in the flat array.
        counts: the elements of each rank.
        ranks: the group.
    """

    shape: tuple[int, ...]
    values: Array
    span: slice
    counts: Sequence[int]
    ranks: Group

    @property
    def dtype(self) -> Any:
        """The elements' dtype."""
        return self.values.dtype

    def gather(self) -> Array:
        """Return the full array, on every rank. Collective."""
        xp = namespace(self.values)
        local = xp.ascontiguousarray(self.values)
        return xp.concatenate(self.ranks.all_gather_v(local, self.counts, check=False)).reshape(
            self.shape
        )

    def put(self, full: Array) -> None:
        """Write this rank's elements of a full array."""
        self.values[...] = namespace(self.values).asarray(full.reshape(-1)[self.span])


@dataclass(frozen=True)
class StateEntry:
    """One array of this rank: a parameter, a buffer, or an optimizer's state of a parameter.

    Attributes:
        name: the full name in the full model ("2.weight"; "momentum/2.weight").
        array: the values, a live view (of `region.local_shape`), on the host or a device; a
            `ShardedArray` if ZeRO shards it further.
        region: this rank's part; None for the full array.
        owned: whether this rank writes it; each element must have exactly one owner.

    Raises:
        ShapeError: when the array does not have the region's shape.
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
        """Return the rank's report of this array to the other ranks, as a JSON value."""
        part, shape, region = self.region, self.array.shape, None
        if part is not None:
            shape, region = part.shape, [part.axis, part.start, part.stop, part.repeats]
        return [self.name, shape, str(self.array.dtype), region, self.owned]


class ModelState:
    """The arrays of a group's ranks, seen as those of one full model.

    Args:
        entries: this rank's arrays; may be empty.
        order: the names of all arrays of the full model, in order; the same on all ranks.
        group: all ranks of the model and its replicas.
        before_set, after_set: called on each rank before values are set by `scatter`, and after it.

    Example:
        >>> def program(group):
        ...     region = Region((4,), 0, 2 * group.rank, 2 * group.rank + 2)
        ...     local = np.arange(2.0) + 10 * group.rank
        ...     state = ModelState([StateEntry("w", local, region)], ["w"], group)
        ...     return {name: array.tolist() for name, array in state.to_dict().items()}
        >>> nnmpi.simulate(program, 2)  # rank 0 has the full model
        [{'w': [0.0, 1.0, 10.0, 11.0]}, {}]
    """

    def __init__(
        self,
        entries: Sequence[StateEntry],
        order: Sequence[str],
        group: Group,
        before_set: Callable[[], object] = int,
        after_set: Callable[[], object] = int,
    ) -> None:
        self._entries, self._order, self._group = list(entries), list(order), group
        self._before_set, self._after_set = before_set, after_set
        self._arrays = {entry.name: entry.array for entry in self._entries}
        self._maps: dict[str, ShardMap] | None = None

    def specs(self) -> dict[str, ArraySpec]:
        """Return shape and dtype of each full array by name, in order. Collective the first time.

        Raises:
            LayoutError: on all ranks, when the ranks' arrays do not make up one model.
        """
        return {name: shards.spec for name, shards in self._shard_maps().items()}

    def gather(self, write: Callable[[str, Array], Any]) -> None:
        """Call `write(name, full array)` on rank 0 for each name, in order. Collective.

        The array is C-contiguous and in host memory. It may be the model's own, so `write` must not
        change it; it may be overwritten after `write` returns.

        Raises:
            LayoutError: on all ranks: see `specs`.
            NnmpiError: on all ranks, when `write` raises or a rank cannot send its slice; nothing
                more is written then.
        """
        maps, phase = self._shard_maps(), CollectivePhase(self._group)
        with rendezvous(self._group) as channel:
            for name, shards in maps.items():
                local = self._arrays.get(name)
                local = local.gather() if isinstance(local, ShardedArray) else local
                full = _gather_array(shards, self._group.rank, local, channel, phase)
                if self._group.is_root:
                    phase.attempt(write, name, full)
        phase.agree()

    def check(self, given: ArraySpecs | None, source: object = "the checkpoint") -> None:
        """Compare names, shapes and dtypes on rank 0 with those of the ranks' arrays. Collective.

        Raises:
            CheckpointError: on all ranks, with the first difference.
            LayoutError: on all ranks: see `specs`.
        """
        expected, phase = self.specs(), CollectivePhase(self._group)
        if self._group.is_root:
            phase.attempt(check_fit, given or {}, expected, source)
        phase.agree()

    def scatter(
        self,
        read: Callable[[str], Array],
        given: ArraySpecs | None = None,
        source: object = "the checkpoint",
    ) -> None:
        """Scatter the full arrays that rank 0 reads, in order. Collective.

        Args:
            read: name -> the full array; called on rank 0 alone.
            given: on rank 0, shapes and dtypes of the arrays that `read` returns; by default the
                model's.
            source: the arrays' origin, for messages; on rank 0.

        Raises:
            CheckpointError: on all ranks, when a name is missing or unknown, or a shape or dtype
                differs; nothing is changed then.
            LayoutError: on all ranks: see `specs`.
            NnmpiError: on all ranks, when reading or writing fails midway; the model's values are
                then unusable.
            UsageError: for a model in whose place an average of its weights is now.
        """
        self._before_set()
        maps, phase, rank = self._shard_maps(), CollectivePhase(self._group), self._group.rank
        self.check(self.specs() if given is None else given, source)
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
                        phase.attempt(_write, self._arrays[name], part)
        phase.agree()
        self._after_set()

    def to_dict(self, everywhere: bool = False) -> dict[str, Array]:
        """Return copies of all full arrays by name, on rank 0 or `everywhere`. Collective.

        For models that fit into one rank's memory, as in tests.

        Raises:
            LayoutError, NnmpiError: see `gather`.
        """
        result: dict[str, Array] = {}
        self.gather(lambda name, array: result.update({name: array.copy()}))
        if everywhere:
            for name, spec in self.specs().items():
                array = result.setdefault(name, np.empty(spec.shape, spec.dtype))
                self._group.broadcast(array, check=False)
        return result

    def _shard_maps(self) -> dict[str, ShardMap]:
        """Return the location of every array. Collective the first time."""
        if self._maps is None:
            local = [entry.describe() for entry in self._entries]
            names = hashlib.blake2b("\0".join(self._order).encode(), digest_size=16).hexdigest()
            self._maps = _read_maps(self._group.gather_texts([names, local]), tuple(self._order))
        return self._maps


@lru_cache(1)  # one for all simulated ranks: each read all, a minute of 256 ranks' first save
def _read_maps(texts: Sequence[bytes], order: Sequence[str]) -> dict[str, ShardMap]:
    by_rank = [decode_json(text, rank) for rank, text in enumerate(texts)]
    problem = "the names of the model's arrays, or their order, differ between the ranks"
    refuse_different([[digest] for digest, _ in by_rank], problem, kind=LayoutError, show=None)
    return shard_maps([entries for _, entries in by_rank], order)


def _read(read: Callable[[str], Array], name: str, spec: ArraySpec, source: object) -> Array:
    full = _to_host(read(name))
    if ArraySpec.of(full) != spec:
        raise CheckpointError(
            f"{source} has changed: {name} is now of {ArraySpec.of(full)}, not {spec}"
        )
    return full


def _to_host(array: Array) -> Array:
    """Return the values in C-contiguous host memory, copied only if needed; 0-d stays 0-d."""
    get = getattr(array, "get", None)
    return np.asarray(array if get is None else get(), order="C")


def _gather_array(
    shards: ShardMap, rank: int, local: Array | None, channel: Rendezvous, phase: CollectivePhase
) -> Array | None:
    """Return the full array on rank 0, to which its owners send their slices.

    None on the other ranks, and on failure.
    """
    spec, written = shards.spec, shards.written
    if [(item.rank, item.region.is_whole) for item in written] == [(0, True)]:
        # no copy if it is contiguous
        return None if rank else phase.attempt(_to_host, local)
    full = None if rank else phase.attempt(np.empty, spec.shape, spec.dtype)
    for slice_ in written:
        if slice_.rank == rank == 0:
            phase.attempt(_put, full, slice_.region, local)
        elif slice_.rank == rank:
            phase.require(channel.send(phase.attempt(_to_host, local), to=0))
        elif rank == 0:
            part = phase.attempt(np.empty, slice_.region.local_shape, spec.dtype)
            if phase.require(channel.receive(part, slice_.rank)):
                phase.attempt(_put, full, slice_.region, part)
    return None if phase.stopped else full


def _put(full: Array, region: Region, part: Array) -> None:
    region.put(full.reshape(region.shape), _to_host(part))


def _take(full: Array, region: Region) -> Array:
    return np.asarray(region.take(full.reshape(region.shape)), order="C")


def _write(target: Array | ShardedArray, part: Array) -> None:
    if isinstance(target, ShardedArray):
        target.put(part)
        return
    target[...] = namespace(target).asarray(part.reshape(target.shape))
