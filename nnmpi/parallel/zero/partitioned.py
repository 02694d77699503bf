"""Flat storage of which each rank keeps a part: what the stages of ZeRO have in memory, and where.

A unit is a run of the model's layers, such as a block: what is gathered, computed with, and summed at once. Its
parameters lie together in a flat array (one for each optimizer group), of which rank r owns part r of `shard.split`. So
the parts of a unit differ by at most one element, and there is no padding but the gaps that flat storage has anyway.

                 unit 0      unit 1     unit 2             stage 1      stage 2      stage 3
    parameters  | 0 0 1 1 | 0 0 0 1 1 | 0 1 |             whole        whole        own parts, and two slots
    gradients   | 0 0 1 1 | 0 0 0 1 1 | 0 1 |  whose?     whole        own parts, and scratch of one unit
    state       | 0 0 1 1 | 0 0 0 1 1 | 0 1 |             own parts    own parts    own parts

    slots       even units in one, odd ones in the other: unit 0 | unit 1 | unit 0 <- unit 2 ...

Where all ranks are on one node, the parameters of stage 3 stand once in memory that they share. Each rank trains its
part of them, all see the whole, nothing is gathered, and there are no slots. Elsewhere a unit always comes to the same
slot. So parameters are views that never move, what an operation has saved of them in its forward pass is right again
once the unit is gathered for its backward pass, and nothing is allocated on the way.
Parameters that several units have, such as a tied embedding, are a unit of their own with places of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.errors import UsageError
from nnmpi.memory.state_offload import StoredArray
from nnmpi.memory.store import Store
from nnmpi.nn.module import Module
from nnmpi.parallel.model_state import ShardedArray
from nnmpi.parallel.zero.units import SHARED, STAGES, UNIT_BYTES, cut_units
from nnmpi.shard import part, split
from nnmpi.tensor.parameter import FlatStorage, Parameter, Span


class PartitionedStorage(FlatStorage):
    """The parameters of a model, of which the ranks of a group keep parts: what lies where.

    Args:
        parameters, values, allocate, group, dtype: see `FlatStorage`.
        model: that has the parameters.
        ranks: that keep the parts.
        stage: what is kept in parts: 1: the optimizer's state; 2: gradients, too; 3: parameters, too.
        unit_bytes: the longest unit, unless one child of the model is longer; by default 4 MiB, in stage 3 64 KiB.
        store: in stage 3, where this rank's parts of the parameters lie; None for in memory.

    Attributes:
        data, grads, groups: this rank's parts, one for each unit and optimizer group.
        own: which elements of the whole arrays they are.
        units: of the model.
        stage, ranks: as given.
        stands_once: whether the parameters stand once in memory that all ranks share.

    Raises:
        UsageError: for a stage that there is not.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        values: Mapping[str, Array],
        allocate: Callable[[int, Any], Array],
        group: Callable[[str, Parameter], str] | None = None,
        dtype: Any = None,
        *,
        model: Module,
        ranks: Group,
        stage: int,
        unit_bytes: int | None = None,
        store: Store | None = None,
    ) -> None:
        if stage not in STAGES:
            raise UsageError(f"ZeRO has no stage {stage}; choose one of {', '.join(map(str, STAGES))}")
        self.ranks, self.stage, self._store = ranks, stage, store
        itemsize = (next(iter(values.values())).dtype if dtype is None else np.dtype(dtype)).itemsize
        self.units, _ = cut_units(model, unit_bytes or UNIT_BYTES[stage], itemsize)
        homes = {id(each): number for number, unit in enumerate(self.units) for each in unit.parameters}

        def place(name: str, parameter: Parameter) -> str:
            label = "default" if group is None else group(name, parameter)
            return f"{homes.get(id(parameter), SHARED)} {label}"

        self.stands_once = False
        super().__init__(parameters, values, allocate, place, dtype)
        self.groups = [label.partition(" ")[2] for label in self.groups]
        self.known_groups = set(self.groups)
        self.shared = True

    def _allocate(
        self, lengths: Sequence[int], dtype: Any, allocate: Callable[[int, Any], Array]
    ) -> tuple[list[Array], list[Array]]:
        self._rooms: list[Array] = []  # slots and scratch
        self._pieces: dict[int, list[int]] = {number: [] for number in (SHARED, *range(len(self.units)))}
        for i, label in enumerate(self.groups):
            self._pieces[int(label.partition(" ")[0])].append(i)
        self.own = [part(length, self.ranks.size, self.ranks.rank) for length in lengths]
        data, grads = (
            self._lay_out(lengths, dtype, allocate, count) for count in (2 * (self.stage == 3), self.stage >= 2)
        )
        own = [slice(each.start, each.stop) for each in self.own]
        for i, each in enumerate(own):
            length = each.stop - each.start
            self.data.append(self._own(length, data[i], allocate) if self.stage == 3 else data[i][each])
            self.grads.append(allocate(length, dtype) if self.stage >= 2 else grads[i][each])
        return data, grads

    def _own(self, length: int, like: Array, allocate: Callable[[int, Any], Array]) -> Any:
        """Return an array for this rank's part of a unit, in memory or out of it."""
        return allocate(length, like.dtype) if self._store is None else StoredArray(self._store, length, like)

    def _lay_out(
        self, lengths: Sequence[int], dtype: Any, allocate: Callable[[int, Any], Array], slots: int
    ) -> list[Array]:
        """Return whole arrays: each in memory of its own, or the units' in so many slots by turns."""
        if not slots:
            return [allocate(length, dtype) for length in lengths]
        totals = {number: sum(lengths[i] for i in pieces) for number, pieces in self._pieces.items()}
        rooms = {SHARED: allocate(totals[SHARED], dtype)}
        for slot in range(slots):
            numbers = range(slot, len(self.units), slots)
            rooms |= dict.fromkeys(numbers, allocate(max((totals[number] for number in numbers), default=0), dtype))
        self._rooms += list({id(room): room for room in rooms.values()}.values())
        found: dict[int, Array] = {}
        for number, pieces in self._pieces.items():
            start = 0
            for i in pieces:
                found[i] = rooms[number][start : start + lengths[i]]
                start += lengths[i]
        return [found[i] for i in range(len(lengths))]

    def write(self, span: Span, value: Array) -> None:
        """See `FlatStorage.write`; of a parameter that is shared out this rank keeps its part."""
        if self.stage < 3:
            super().write(span, value)
        else:
            own, theirs = self._part(span)
            self.data[span.buffer][own] = value.reshape(-1)[theirs]

    def _part(self, span: Span) -> tuple[slice, slice]:
        """Return which part of a parameter is this rank's: where in its own array, and where in the flat parameter."""
        own = self.own[span.buffer]
        first = min(max(own.start, span.start), span.stop)
        last = max(min(own.stop, span.stop), first)
        at = min(max(first - own.start, 0), len(own))
        return slice(at, at + last - first), slice(first - span.start, last - span.start)

    def parts(self, span: Span, flats: Sequence[Array]) -> ShardedArray:
        """Return a parameter's part of arrays that lie as `data` does, as what it is of the whole."""
        own, theirs = self._part(span)
        length = len(self._data[span.buffer])
        ends = [max(min(each.stop, span.stop), span.start) for each in split(length, self.ranks.size)]
        counts = [end - begin for begin, end in zip([span.start, *ends], ends, strict=False)]
        return ShardedArray(span.parameter.declared, flats[span.buffer][own], theirs, counts, self.ranks)

    def held(self) -> Iterator[tuple[Span, Array, Array | None]]:
        """See `FlatStorage.held`: of each parameter some elements in a row, maybe none."""
        for span in self.spans:
            own, _ = self._part(span)
            yield span, self.data[span.buffer][own], self.grads[span.buffer][own]

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are all here, whenever one looks."""
        return self.stage < 3

    def split(self, buffer: int, flat: Array) -> NoReturn:
        """Refuse: no rank has all of such an array."""
        raise UsageError("the ranks have parts of these arrays; Trainer.state() puts them together")

    def move(self, data: Sequence[Array] | None = None, grads: Sequence[Array] | None = None) -> NoReturn:
        """Refuse: other ranks count on what lies where."""
        raise UsageError("parameters that ranks share out cannot move; leave ZeRO out")

    def frozen(self) -> list[Array]:
        """See `FlatStorage.frozen`; of this rank's parts."""
        frozen = [span for span in self.spans if not span.parameter.requires_grad]
        return [self.data[span.buffer][self._part(span)[0]] for span in frozen]

    def _settle(self, data: list[Array], grads: list[Array]) -> None:
        """Let the parameters lie in these whole arrays, and this rank's parts be theirs where there are whole ones."""
        self._data, self._grads = data, grads
        own = [slice(each.start, each.stop) for each in self.own]
        if self.stage < 3 or self.stands_once:
            self.data = [whole[each] for whole, each in zip(data, own, strict=True)]
        if self.stage == 1:
            self.grads = [whole[each] for whole, each in zip(grads, own, strict=True)]
        self._views = [self._lay(span) for span in self.spans]
        self.moves += 1
