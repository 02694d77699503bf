"""Sharded flat storage: the memory of ZeRO's stages, its layout and its exchanges.

A unit is a run of the model's layers, such as a block. Its parameters are gathered together, and
its gradients are summed together. They lie in one flat array for each optimizer group; rank r owns
part r of `shard.split` of that array. So the parts of a unit differ by at most one element. The
only padding is the gaps of flat storage.

                 unit 0      unit 1     unit 2      stage 1     stage 2     stage 3
    parameters  | 0 0 1 1 | 0 0 0 1 1 | 0 1 |       all         all         own parts, two slots
    gradients   | 0 0 1 1 | 0 0 0 1 1 | 0 1 |       all         own parts, and scratch of one unit
    state       | 0 0 1 1 | 0 0 0 1 1 | 0 1 |       own parts   own parts   own parts
                  (the rank that owns each element)

    slots       even units in one, odd units in the other: unit 0 | unit 1 | unit 0 <- unit 2 ...

    acquire(2, 1)  wait for unit 2 in its slot, prefetch unit 1
    release(2)     another unit may use the slot
    reduce(2)      sum its gradients over the ranks; accumulate this rank's part of the sum
    finish_update  publish the new parameters to all ranks

A unit is always gathered to the same slot. So parameters are views that never move: a view that an
operation saved in its forward pass is valid again once the unit is gathered for the backward pass,
and nothing is allocated in a step. Parameters that several units use, such as a tied embedding, are
a unit of their own, `COMMON`, outside the slots. A rank's own experts are in no unit: the rank has
all of them, with their gradients and state.

With all ranks on one node, no message is sent in any stage: the ranks share one copy of the
parameters in memory. Each rank updates its part and reads all parts, so nothing is gathered and
there are no slots. Gradients are added in place (`comm.node_sum`).

`cut_units` and `predict_bytes` compute with integers alone, before a model has values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from math import nan
from typing import Any, NoReturn, TypeAlias

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels import cast
from nnmpi.base.errors import DeviceError, UsageError
from nnmpi.base.shard import buckets, common, part, split
from nnmpi.comm.agreement import refuse_different
from nnmpi.comm.algorithms.registry import AUTO, NATIVE, SHARED
from nnmpi.comm.buffers import MAX_MESSAGE_BYTES, is_device
from nnmpi.comm.collective import ALL_GATHER, REDUCE_SCATTER
from nnmpi.comm.execution import Pending
from nnmpi.comm.gradients import BUCKET_BYTES
from nnmpi.comm.group import Group
from nnmpi.comm.node import SharedMemory
from nnmpi.comm.node_sum import NodeSum
from nnmpi.comm.world import Traffic
from nnmpi.memory.store import Store
from nnmpi.nn.chain import ChainLayer, ModelPart, base_of, open_chain, parameters_of
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import ALL, STAGES
from nnmpi.parallel.model_state import ShardedArray
from nnmpi.tensor.parameter import Allocate, FlatStorage, Parameter, Span, aligned

NO_GATHER = (
    "each rank has only part of this model's parameters, and the strategy that gathers them"
    " was released; to continue with a whole model, call gather_model() instead of release()"
)
# where ranks meet that share memory: before a sum, after it, after an update; and before they
# compare one by other messages
PLACES = (
    "begun a sum of gradients",
    "ended a sum of gradients",
    "called optimizer.step()",
    "called backward",
)
COMMON = -1  # the unit of parameters that several units use
# by stage; shorter units would only add messages
UNIT_BYTES = {1: BUCKET_BYTES, 2: BUCKET_BYTES, 3: 64 * 2**10}
MATRIX = 2  # axes: what has fewer is no thousandth of a base, and stays whole on each rank


class MessageTransport:
    """Messages between ranks that shard a model: a sum and a gather of each array.

    Args:
        storage: of this rank's parts.
        group: the same ranks, for these messages alone; None until the storage is connected.
        algorithm: a name.
    """

    is_shared = False

    def __init__(
        self, storage: ShardedStorage, group: Group | None = None, algorithm: str = NATIVE
    ) -> None:
        self._storage, self._group = storage, group
        self._resident: dict[int, bool] = {}  # by unit in a slot: whether its gather is complete
        # by unit: parameters without values while it is in no slot, which has another's by then
        self._hidden: dict[int, list[tuple[Parameter, Array]]] = {}
        # by number of the array; empty if there is nothing to exchange
        self._gathers: dict[int, Pending] = {}
        self._sums: dict[int, Pending] = {}  # arrays without one use MPI's reduce-scatter
        if group is None or group.size == 1:
            return
        bind, data, grads = partial(group.bind, algorithm=algorithm), storage._data, storage._grads
        for i, full in enumerate(data):
            if not full.size or storage.rank_local[i]:
                continue
            self._gathers[i] = bind(full, tag=i, operation=ALL_GATHER.name)
            # MPI's own is not bound: binding it would keep a copy of each summed array
            is_bound = algorithm != NATIVE or grads[i].nbytes > MAX_MESSAGE_BYTES
            if is_bound and storage.has_grads:
                tag = len(data) + i
                self._sums[i] = bind(grads[i], tag=tag, operation=REDUCE_SCATTER.name)

    def meet(self, place: int) -> None:
        """Do nothing: messages wait for one another. See `NodeTransport.meet`."""

    def sum(self, i: int, adds: bool) -> None:
        """Sum an array of gradients over the ranks.

        Args:
            i: its number.
            adds: whether this rank's part is added to the last sums, or replaces them.
        """
        full, target = self._storage._grads[i], self._storage.grads[i]
        arrived = full[self._storage.slices[i]]
        if i in self._sums:
            self._sums[i].run()
        elif i in self._gathers and self._group is not None:
            counts = [len(item) for item in split(full.size, self._group.size)]
            arrived = self._group.reduce_scatter_v(full, counts, check=False)
        if adds:
            target += arrived
        else:
            target[...] = arrived

    def publish(self) -> None:
        """Give all ranks the new parameters; units in slots are gathered at their next use.

        Raises:
            UsageError: if nothing is connected.
        """
        if self._group is None:
            raise UsageError(
                "nothing gathers the ranks' parts; make a ShardedDataParallel of this model first"
            )
        for i, pending in self._gathers.items() if self._storage.stage < 3 else ():
            self._storage.count(i)
            pending.run()

    def start(self, number: int) -> None:
        """Start to gather a unit's parameters, unless they are there."""
        if number in self._resident or self._storage.stage < 3:
            return
        if self._group is None:
            raise UsageError(NO_GATHER)
        storage = self._storage
        if number != COMMON:  # out of turn, its slot may hold another unit: evict that
            for other in [
                item for item in self._resident if item != COMMON and (item - number) % 2 == 0
            ]:
                self.release(other)
        self._resident[number] = False
        for i in storage.pieces[number]:
            storage._data[i][storage.slices[i]] = storage.data[i]
            if i in self._gathers:
                storage.count(i)
                self._gathers[i].start()

    def acquire(self, number: int, following: int | None = None) -> None:
        """Wait until the unit's parameters are gathered, and prefetch the next unit's. Collective.

        Args:
            number: the unit.
            following: the next unit, whose slot is free; None if there is none.
        """
        self.start(number)
        if following is not None:
            self.start(following)
        self._wait(number)

    def _wait(self, number: int) -> None:
        if self._resident.get(number, True):
            return
        with self._storage.ranks.collective(ALL_GATHER.name):
            for i in self._storage.pieces[number]:
                if i in self._gathers:
                    self._gathers[i].wait()
        self._resident[number] = True
        for parameter, values in self._hidden.get(number, ()):
            parameter.place(values)

    def release(self, *numbers: int) -> None:
        """Free units' slots; first complete the gathers that were started and never awaited.

        Args:
            numbers: of the units; none for all.
        """
        for number in numbers or [*self._resident]:
            if number in self._resident:
                self._wait(number)
                del self._resident[number]
                for parameter, _ in self._hidden.get(number, ()):
                    parameter.drop()

    def hide(self) -> None:
        """Let parameters have values only while these are gathered, for passes of a user's own."""
        storage = self._storage
        for span in storage.spans if storage.stage == 3 else ():
            if not storage.rank_local[span.buffer]:
                rows = self._hidden.setdefault(storage.unit_of(span), [])
                rows.append((span.parameter, span.parameter.stored))
                span.parameter.drop()

    def free(self) -> None:
        """Free the communicator. Collective."""
        if self._group is not None:
            self._group.free()


class NodeTransport:
    """A node's memory: the ranks share one copy of the parameters, so that nothing is gathered.

    Args:
        group: to be freed.
        node: adds gradients in place.
        places: int64, (2, ranks): where each rank is, by turns in two rows.
    """

    is_shared = True

    def __init__(self, group: Group, node: NodeSum, places: Array) -> None:
        self._group, self._node, self._places, self._turn = group, node, places, 0

    def meet(self, place: int) -> None:
        """Wait for the other ranks before the next read or write.

        Each rank says where it is, and all compare: of two that meet in different places, one would
        read what the other still writes. They write by turns in two rows, since a rank that is
        ahead may say where it is next while another still reads.

        Args:
            place: in PLACES.

        Raises:
            UsageError: on all ranks, naming them.
        """
        self._turn = 1 - self._turn
        rows = self._places[self._turn]
        rows[self._node.memory.rank] = place
        self._node.barrier.run()
        refuse_different(
            [[PLACES[number]] for number in rows.tolist()],
            "the ranks meet at different places of their loops",
            "call backward and optimizer.step() equally often on all ranks",
            UsageError,
        )

    def sum(self, i: int, adds: bool) -> None:
        """See `MessageTransport.sum`: each rank adds its slice of all ranks' arrays."""
        for _ in self._node.sums(i, replace=not adds):
            pass

    def publish(self) -> None:
        """See `MessageTransport.publish`: the parameters are in place, once all ranks are done."""
        self.meet(2)

    def start(self, *_: object) -> None:
        """Do nothing: all units are there."""

    acquire = release = hide = start

    def free(self) -> None:
        """Free memory and communicator. Collective."""
        self._node.memory.barrier()  # no rank unmaps memory that another still reads
        self._node.memory.free()
        self._group.free()


class ShardedStorage(FlatStorage):
    """A model's parameters, sharded over a group's ranks. Give it to `Module.initialize`:

        model.initialize(seed=0, storage=sharded(model, group, stage=3))

    An optimizer of this storage updates this rank's parts, and has state for them alone.

    Args:
        parameters, values, allocate, group, dtype: see `FlatStorage`.
        model: the owner of the parameters.
        ranks: the group that shards them.
        stage: 1 shards the optimizer's state; 2 also the gradients; 3 also the parameters.
        unit_bytes: the maximal size of a unit; a larger child of the model is a unit by itself. By
            default 4 MiB, in stage 3 64 KiB.
        store: in stage 3, the store of this rank's parts of the parameters; None for memory.
        units: of the model, and the parameters in none; None to cut it.

    Attributes:
        data, grads, groups: this rank's parts, one for each unit and optimizer group.
        slices: the ranges of these parts in the full arrays.
        units: the model's units.
        stage, ranks: as given.
        transport: how the ranks exchange arrays; it gathers units, and frees their slots.
        pieces: by unit: the numbers of its arrays.
        bases: in stage 3, the storages of the base that adapters change; they follow this one.
        has_grads: whether its parameters have gradients.
        in_program: whether a pass's program gathers and frees the weights now.

    Raises:
        UsageError: for an unknown stage.
    """

    in_program, has_grads = False, True

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        values: Mapping[str, Array],
        allocate: Allocate,
        group: Callable[[str, Parameter], str] | None = None,
        dtype: Any = None,
        *,
        model: Module,
        ranks: Group,
        stage: int,
        unit_bytes: int | None = None,
        store: Store | None = None,
        units: UnitCut | None = None,
    ) -> None:
        if stage not in STAGES:
            raise UsageError(
                f"ZeRO has no stage {stage}; choose one of {', '.join(map(str, STAGES))}"
            )
        self.ranks = self.replicas = ranks
        self.stage, self._store = stage, store
        itemsize = (
            next(iter(values.values())).dtype if dtype is None else np.dtype(dtype)
        ).itemsize
        self.units, _ = units or cut_units(model, unit_bytes or UNIT_BYTES[stage], itemsize, stage)
        unit_of = {
            item: number for number, unit in enumerate(self.units) for item in unit.parameters
        }

        def label_of(name: str, parameter: Parameter) -> str:
            label = "default" if group is None else group(name, parameter)
            return f"{unit_of.get(parameter, COMMON)} {label}"

        self.transport: MessageTransport | NodeTransport = MessageTransport(self)
        super().__init__(parameters, values, allocate, label_of, dtype)
        self.groups = [label.partition(" ")[2] for label in self.groups]
        self.known_groups = set(self.groups)
        self.distributed = True
        self._fresh = [True] * len(self.data)  # nothing was accumulated since `zero_grad`
        self.bases: list[BaseStorage] = []
        if stage == 3 and self.has_grads and ranks.size > 1:
            dtypes = {
                item.base_dtype or self.dtype: () for unit in self.units for item in unit.base
            }
            self.bases = [BaseStorage(model, self, allocate, dtype) for dtype in dtypes]

    # ---- layout ----

    def _allocate(
        self, lengths: Sequence[int], dtype: Any, allocate: Allocate
    ) -> tuple[list[Array], list[Array]]:
        self._layout = list(lengths), dtype
        self._grad_lengths = list(lengths) if self.has_grads else [0] * len(lengths)
        self._rooms: list[Array] = []  # slots and scratch
        self.pieces: dict[int, list[int]] = {
            number: [] for number in (COMMON, *range(len(self.units)))
        }
        for i, label in enumerate(self.groups):
            if not self.rank_local[i]:
                self.pieces[int(label.partition(" ")[0])].append(i)
        self.slices = [
            slice(0, length) if is_own else slice(item.start, item.stop)
            for length, is_own in zip(lengths, self.rank_local, strict=True)
            for item in [part(length, self.ranks.size, self.ranks.rank)]
        ]
        data = self._lay_out(lengths, dtype, allocate, 2 * (self.stage == 3), allocate)
        grads = self._lay_out(self._grad_lengths, dtype, allocate, self.stage >= 2, allocate)
        for full, item, grad, is_own in zip(data, self.slices, grads, self.rank_local, strict=True):
            local, local_grad = full[item], grad[item]
            if self.stage == 3 and not is_own:
                local = (allocate if self._store is None else self._store.zeros)(len(local), dtype)
            if self.stage >= 2 and not is_own:
                local_grad = allocate(len(local_grad), dtype)
            self.data.append(local)
            self.grads.append(local_grad)
        return data, grads

    def _lay_out(
        self,
        lengths: Sequence[int],
        dtype: Any,
        allocate: Allocate,
        slots: int,
        allocate_own: Callable[..., Array] | None = None,
    ) -> list[Array]:
        """Return full arrays: one after another, or units in alternating slots.

        Args:
            allocate_own: of arrays that are this rank's alone; None for empty ones in their place.
        """
        offsets: dict[int, tuple[int, int]] = {}
        ends = dict.fromkeys(range(slots + 1), 0)  # room 0: COMMON, or everything without slots
        for number, pieces in self.pieces.items():
            room = 1 + number % slots if slots and number != COMMON else 0
            start = 0 if slots else ends[0]
            for i in pieces:
                offsets[i] = room, start
                start += lengths[i]
            ends[room] = max(ends[room], start)
        # one allocation per room: each is a window in shared memory, and MPI has few
        rooms = [allocate(end, dtype) for end in ends.values()]
        self._rooms += rooms if slots else []
        own = allocate_own or (lambda *_: rooms[0][:0])
        return [
            own(length, dtype)
            if i not in offsets
            else rooms[offsets[i][0]][offsets[i][1] :][:length]
            for i, length in enumerate(lengths)
        ]

    def _with_own(self, arrays: list[Array], own: Sequence[Array]) -> list[Array]:
        """Return the arrays with this rank's own ones in their places."""
        rows = zip(arrays, own, self.rank_local, strict=True)
        return [mine if is_own else array for array, mine, is_own in rows]

    def _bind(self, span: Span) -> tuple[Parameter, Array, Array]:
        """See `FlatStorage._bind`; values that a gather overwrites or ranks share are read-only."""
        bound = super()._bind(span)
        is_own = self.rank_local[span.buffer]
        in_slot = self._rooms and self.stage == 3
        if (in_slot or self.is_node_shared) and not is_own and not is_device(bound[1]):
            bound[1].flags.writeable = False
        return bound

    def write(self, span: Span, value: Array, first: int = 0) -> None:
        """See `FlatStorage.write`; in stage 3 this rank keeps its part alone."""
        if self.stage < 3:
            super().write(span, value, first)
        else:
            start = span.start + first
            local, in_value = self._part(replace(span, start=start, stop=start + value.size))
            self.data[span.buffer][local] = value.reshape(-1)[in_value]
            self.version.count += 1

    def _part(self, span: Span) -> tuple[slice, slice]:
        """Return this rank's part of a parameter as two slices: of its own array, and of the flat
        parameter.
        """
        local = self.slices[span.buffer]
        own = common(local, range(span.start, span.stop))
        return (
            slice(own.start - local.start, own.stop - local.start),
            slice(own.start - span.start, own.stop - span.start),
        )

    def view(self, span: Span, flats: Sequence[Array]) -> Any:
        """See `FlatStorage.view`: this rank's part of a parameter."""
        if self.rank_local[span.buffer]:
            return super().view(span, flats)
        local, in_parameter = self._part(span)
        parts = split(len(self._data[span.buffer]), self.ranks.size)
        counts = [len(common(item, range(span.start, span.stop))) for item in parts]
        return ShardedArray(
            span.parameter.declared, flats[span.buffer][local], in_parameter, counts, self.ranks
        )

    def weights(self, span: Span) -> Any:
        """See `FlatStorage.weights`.

        Of weights that this rank has all of in memory of its own, all: what is set from outside
        must reach the other ranks' parts of them, too.
        """
        if self.is_whole and not self.is_node_shared:
            return super().view(span, self._data)
        return self.view(span, self.data)

    def held(self) -> Iterator[tuple[Span, Array, Array | None]]:
        """See `FlatStorage.held`: this rank's elements of each parameter, possibly none."""
        for span in self.spans:
            local = self.trained_slice(span)
            yield span, self.data[span.buffer][local], self.grads[span.buffer][local]

    @property
    def is_whole(self) -> bool:
        """Whether all parameters are readable at any time."""
        return self.stage < 3

    def move(
        self, data: Sequence[Array] | None = None, grads: Sequence[Array] | None = None
    ) -> NoReturn:
        """Refuse: the other ranks rely on this layout."""
        raise self.refuse("these parameters cannot move to other arrays")

    def refuse(self, what: str) -> UsageError:
        """Return the error of a strategy that needs the whole model on every rank."""
        return UsageError(
            f"ZeRO {self.stage} has sharded this model, so {what}; call gather_model() of its"
            " strategy (worker.strategy) on all ranks, then make a new optimizer"
        )

    def trained_slice(self, span: Span) -> slice:
        """See `FlatStorage.trained_slice`."""
        return self._part(span)[0]

    @property
    def is_node_shared(self) -> bool:
        """Whether the node's ranks share one copy of the parameters."""
        return self.transport.is_shared

    def held_bytes(self) -> tuple[int, int, int]:
        """See `FlatStorage.held_bytes`, with the base; the third counts slots and scratch."""
        kinds = zip(self._own_bytes(), *(base.held_bytes() for base in self.bases), strict=True)
        parameters, gradients, buffers = map(sum, kinds)
        return parameters, gradients, buffers

    def _own_bytes(self) -> tuple[int, int, int]:
        local = [] if self._store is not None else self.data
        parameters = sum(
            array.nbytes
            for array in (local if self.stage == 3 or self.is_node_shared else self._data)
        )
        gradients = sum(array.nbytes for array in (self._grads if self.stage == 1 else self.grads))
        return parameters, gradients, sum(room.nbytes for room in self._rooms)

    def _settle(self, data: list[Array], grads: list[Array]) -> None:
        """Use these full arrays; this rank's parts become views of them in the stages that keep the
        full arrays.
        """
        self._data, self._grads = data, grads
        # The last two rooms are the gradients' scratch. Older scratch and the parameters' slots are
        # freed.
        self._rooms = self._rooms[-2:]
        if self.stage < 3 or self.is_node_shared:
            self.data = [full[item] for full, item in zip(data, self.slices, strict=True)]
        if self.stage == 1:
            self.grads = [full[item] for full, item in zip(grads, self.slices, strict=True)]
        self._views = [self._bind(span) for span in self.spans]
        self.moves += 1

    # ---- gradients ----

    def _clear_grads(self) -> None:
        super()._clear_grads()
        self._fresh = [True] * len(self.data)

    @property
    def has_gradients(self) -> bool:
        """See `FlatStorage.has_gradients`."""
        return super().has_gradients if self.stage == 1 else not all(self._fresh)

    @property
    def keeps_parts(self) -> bool:  # type: ignore[override]
        """See `FlatStorage.keeps_parts`."""
        return self.stage > 1 and not all(self._fresh)

    def _finish(self) -> None:
        if self.stage == 1:
            super()._finish()
            return
        self.check_places()
        for i, fresh in enumerate(self._fresh):
            if fresh and not self.rank_local[i]:
                self.grads[i][...] = 0
        for span in self.spans:
            if self.rank_local[span.buffer]:
                span.parameter.finish_gradient()

    def reduce(self, *numbers: int) -> None:
        """Reduce-scatter units' gradients, and accumulate this rank's part. Collective."""
        full = list(chain.from_iterable(map(self._complete, numbers)))
        if not (full or self.is_node_shared):  # there all meet, whatever each has frozen
            return
        with self.ranks.collective(REDUCE_SCATTER.name):
            self.transport.meet(0)
            for i in full:
                adds = self.stage > 1 and not self._fresh[i]
                self._fresh[i] = False
                self.count(i)
                self.transport.sum(i, adds)
            self.transport.meet(1)

    def _complete(self, number: int) -> Iterable[int]:
        """Complete a unit's full gradients; return the numbers of their arrays, none if frozen."""
        pieces = self.pieces[number]
        numbers = [i for i, span in enumerate(self.spans) if span.buffer in pieces]
        if not any(self.spans[i].parameter.requires_grad for i in numbers):
            return ()
        ends = dict.fromkeys(pieces, 0)
        for i in numbers:
            span = self.spans[i]
            span.parameter.finish_gradient()
            # zero the gap: scratch still has another unit's gradients there
            self._grads[span.buffer][ends[span.buffer] : span.start] = 0
            ends[span.buffer] = span.stop
            if self.stage > 1:
                span.parameter.grad = None
        for i, end in ends.items():
            self._grads[i][end:] = 0
        return ends

    # ---- parameters ----

    def connect(self, group: Group, algorithm: str = AUTO) -> str:
        """Prepare gathers and sums; return why "auto" uses no shared memory. Collective.

        Args:
            group: the same ranks, for these messages alone.
            algorithm: "shared", which moves the arrays to memory that a node's ranks share,
                "native" (MPI's own), "ring" or "tree". "auto" is "shared" for arrays in host memory
                and ranks of one node, otherwise "native".

        Raises:
            UsageError: for another name, and for "shared" without shared memory.
        """
        one_node = (
            group.on_one_node() and not any(map(is_device, self._data)) and self._store is None
        )
        names = (AUTO, NATIVE, "ring", "tree", *([SHARED] if one_node else []))
        if algorithm not in names:
            raise UsageError(
                f"ZeRO needs a reduce-scatter and an all-gather, which {algorithm!r} does not have"
                f" here; choose {', '.join(names)} (shared: for ranks on one node, with arrays in"
                " the host's memory that are not offloaded)"
            )
        notice = ""
        if one_node and group.size > 1 and algorithm in (AUTO, SHARED):
            try:
                self._share(group, SharedMemory(group))
            except DeviceError as error:
                if algorithm == SHARED:
                    raise
                notice = f"ranks of one node send messages: {error}"
        if not self.transport.is_shared:
            name = NATIVE if algorithm in (AUTO, SHARED) else algorithm
            self.transport = MessageTransport(self, group, name)
        for base in self.bases:
            notice = base.connect(group.duplicate(), algorithm) or notice
        return notice

    def _share(self, group: Group, memory: SharedMemory) -> None:
        """Move parameters and gradients to memory that the ranks share. Collective."""
        lengths, dtype = self._layout
        try:
            shared = [
                0 if is_own else length
                for length, is_own in zip(lengths, self.rank_local, strict=True)
            ]
            places = 2 * memory.size, np.dtype("int64")
            at, *data = memory.common_all([places, *((length, dtype) for length in shared)])
            grads = self._lay_out(self._grad_lengths, dtype, memory.allocate, self.stage >= 2)
        except DeviceError:
            memory.free()
            raise
        for full, item, local, is_own in zip(
            data, self.slices, self.data, self.rank_local, strict=True
        ):
            if not is_own:
                full[item] = local
        memory.barrier()
        self.version.meet = memory.barrier
        empty = [array[:0] for array in grads]
        owns = [
            slice(0, 0) if is_own else item
            for item, is_own in zip(self.slices, self.rank_local, strict=True)
        ]
        # in stage 1 a rank's sums lie in its own array: what it does to its gradients changes them
        parts = [full[item] for full, item in zip(grads, self.slices, strict=True)]
        totals = self._with_own(parts if self.stage == 1 else list(self.grads), empty)
        node = NodeSum(grads, memory, owns=owns, totals=totals)
        self.transport = NodeTransport(group, node, at.reshape(2, memory.size))
        self._settle(self._with_own(data, self._data), self._with_own(grads, self._grads))
        self.grads = self._with_own(node.totals, self.grads)

    def finish_update(self) -> None:
        """Publish all new parameters; in stage 3, discard the gathered old ones."""
        super().finish_update()
        self.transport.release()
        with self.ranks.collective(ALL_GATHER.name):
            self.transport.publish()

    def start(self, number: int) -> None:
        """Start to gather a unit's parameters, with its base, unless they are there."""
        for storage in (self, *self.bases):
            storage.transport.start(number)

    def acquire(self, number: int, following: int | None = None) -> None:
        """Wait until a unit's parameters and its base are gathered. Collective.

        Args:
            number, following: see `MessageTransport.acquire`.
        """
        for storage in (self, *self.bases):
            storage.transport.acquire(number, following)

    def release(self, *numbers: int) -> None:
        """Free units' slots; see `MessageTransport.release`."""
        for storage in (self, *self.bases):
            storage.transport.release(*numbers)

    def hide(self) -> None:
        """Let parameters have values only while these are gathered."""
        for storage in (self, *self.bases):
            storage.transport.hide()

    def unit_of(self, span: Span) -> int:
        """Return the unit of a parameter; COMMON for this rank's own, too."""
        return next((unit for unit, its in self.pieces.items() if span.buffer in its), COMMON)

    def count(self, i: int) -> None:
        """Count an exchange of an array by the bytes of the full one."""
        if self.ranks.size > 1 and self._data[i].size:
            self.ranks.count(Traffic(0.0, int(self._data[i].nbytes), 1, nan))

    def disconnect(self) -> None:
        """Free the communicator, and move to this rank's private memory. Collective."""
        for base in self.bases:
            base.disconnect()
        transport, self.transport = self.transport, MessageTransport(self)
        if transport.is_shared:
            _, dtype = self._layout
            grads = self._lay_out(self._grad_lengths, dtype, np.zeros, self.stage >= 2)
            if self.stage == 3:
                self.data = self._with_own([local.copy() for local in self.data], self.data)
                data = [
                    np.broadcast_to(np.zeros((), full.dtype), full.shape) for full in self._data
                ]
            else:
                data = [full.copy() for full in self._data]
            self._settle(self._with_own(data, self._data), self._with_own(grads, self._grads))
            self.version.meet = int
        transport.free()


class BaseStorage(ShardedStorage):
    """The matrices of a base that adapters change, sharded as weights are in stage 3.

    They are never trained: they have no gradients, and no optimizer sees them. Other weights of a
    base, such as norms, are on each rank.

    Args:
        model: the owner.
        trained: the storage of its adapters, with the same units.
        allocate: see `FlatStorage`.
        dtype: of the matrices that are stored here.
    """

    has_grads = False

    def __init__(
        self, model: Module, trained: ShardedStorage, allocate: Allocate, dtype: Any
    ) -> None:
        weights = {
            name: item
            for name, item in model.named_base()
            if is_shared_base(item) and (item.base_dtype or trained.dtype) == dtype
        }
        for name, item in weights.items():
            if item.home is not None:
                raise UsageError(
                    f"ranks share {name}, of the base that adapters change; build the model again"
                )
        here = {*weights.values()}
        units = tuple(
            Unit(unit.layers, tuple(item for item in unit.base if item in here))
            for unit in trained.units
        )
        given = {item: item.stored for item in here if item.has_values}
        self._filled = {*given}
        # in place of values, which are written below, when each has its place
        placeholders: Any = weights
        super().__init__(
            weights,
            placeholders,
            allocate,
            None,
            dtype,
            model=model,
            ranks=trained.ranks,
            stage=3,
            units=(units, ()),
        )
        self._span_of = {span.parameter: span for span in self.spans}
        while given:
            self.fill(*given.popitem())

    def write(self, span: Span, value: Any, first: int = 0) -> None:
        """Write values; a parameter that stands for its own has none yet."""
        if value is not span.parameter:
            super().write(span, value, first)

    def fill(self, parameter: Parameter, values: Array, first: int = 0) -> None:
        """Give a parameter its values, or some rows as `write`; this rank keeps a part."""
        self._filled.add(parameter)
        self.write(self._span_of[parameter], cast(values, self.dtype), first)

    def has(self, parameter: Parameter) -> bool:
        """Return whether a parameter has got values."""
        return parameter in self._filled

    def view_of(self, parameter: Parameter) -> ShardedArray:
        """Return this rank's part of a parameter."""
        return self.view(self._span_of[parameter], self.data)

    def give_back(self) -> None:
        """Give each rank all values again, in memory of its own. Collective."""
        for parameter in self._span_of:
            values = self.view_of(parameter).gather()
            parameter.home = None
            parameter.drop()
            parameter.place(values)

    def _bind(self, span: Span) -> Any:
        """See `FlatStorage._bind`."""
        parameter = span.parameter
        values = self._data[span.buffer][span.start : span.stop].reshape(parameter.declared)
        if not is_device(values):
            values.flags.writeable = False
        parameter.drop()
        parameter.home = self
        parameter.place(values)
        return parameter, values, None


def is_shared_base(parameter: Parameter) -> bool:
    """Return whether ZeRO 3 shards a parameter of a base."""
    return parameter.ndim >= MATRIX and not parameter.rank_local


def base_itemsize(parameter: Parameter, itemsize: int) -> int:
    """Return the bytes of an element of a base, in a model whose elements have `itemsize`."""
    return itemsize if parameter.base_dtype is None else parameter.base_dtype.itemsize


def sharded(
    model: Module,
    ranks: Group,
    stage: int = 3,
    unit_bytes: int | None = None,
    store: Store | None = None,
    units: UnitCut | None = None,
) -> Callable[..., ShardedStorage]:
    """Return a factory of a model's storage for `Module.initialize`.

    Args:
        model, ranks, stage, unit_bytes, store, units: see `ShardedStorage`.
    """
    return partial(
        ShardedStorage,
        model=model,
        ranks=ranks,
        stage=stage,
        unit_bytes=unit_bytes,
        store=store,
        units=units,
    )


@dataclass(frozen=True, eq=False)
class Unit:
    """A run of layers; its parameters are those that no other unit uses.

    Attributes:
        base: of these layers, what ranks share of it.
    """

    layers: tuple[ChainLayer, ...]
    parameters: tuple[Parameter, ...]
    base: tuple[Parameter, ...] = ()


UnitCut: TypeAlias = tuple[tuple[Unit, ...], tuple[Parameter, ...]]
"""The units, and the parameters that are in none, as several units use them."""


def cut_units(model: Module, limit_bytes: int, itemsize: int, stage: int = 1) -> UnitCut:
    """Cut a model's chain into units; return them, and the parameters that several units use.

    Args:
        model: a sequence, or a part of one; any other module is one unit.
        limit_bytes, itemsize, stage: see `cut_runs`.
    """
    layers = model.layers if isinstance(model, ModelPart) else open_chain(model)
    return as_units(model, cut_runs(layers, limit_bytes, itemsize, stage))


def cut_runs(
    layers: Sequence[ChainLayer], limit_bytes: int, itemsize: int, stage: int = 1
) -> list[tuple[ChainLayer, ...]]:
    """Cut layers into runs for units.

    The layers of one child of the model, such as a residual block, stay together. Successive
    children are merged while their parameters fit the limit; a child without parameters joins the
    one before it.

    Args:
        layers: of a chain.
        limit_bytes: at least 1.
        itemsize: bytes of an element.
        stage: of ZeRO; stage 3 shards a base, too.
    """
    blocks = [
        tuple(block) for _, block in groupby(layers, lambda layer: layer.name.partition(".")[0])
    ]
    seen: set[Parameter] = set()
    merged: list[tuple[ChainLayer, ...]] = [()]
    sizes = [0]
    for block in blocks:
        new = [item for item in parameters_of(block) if not (item.rank_local or item in seen)]
        if stage == 3:
            new += [item for item in base_of(block) if is_shared_base(item) and item not in seen]
        seen.update(new)
        size = sum(item.size * base_itemsize(item, itemsize) for item in new)
        if size and sizes[-1]:
            merged.append(())
            sizes.append(0)
        merged[-1] += block
        sizes[-1] += size
    return [
        tuple(layer for i in group for layer in merged[i]) for group in buckets(sizes, limit_bytes)
    ]


def as_units(
    model: Module,
    runs: Sequence[tuple[ChainLayer, ...]],
    tied: Collection[Parameter] = (),
) -> UnitCut:
    """Return the units of runs of a model's layers, and the parameters in none.

    Args:
        tied: parameters that are in no unit, because other ranks use them, too.
    """
    users = Counter(item for run in runs for item in parameters_of(run) if not item.rank_local)
    alone = {item for item, count in users.items() if count == 1} - {*tied}
    readers = Counter(item for run in runs for item in base_of(run) if is_shared_base(item))
    units = [
        Unit(
            run,
            tuple(item for item in parameters_of(run) if item in alone),
            tuple(item for item in base_of(run) if readers[item] == 1),
        )
        for run in runs
    ]
    rest = (item for item in model.parameters() if item not in alone and not item.rank_local)
    return tuple(units), tuple(rest)


@dataclass(frozen=True)
class StateBytes:
    """The bytes of parameters, gradients and optimizer state that a rank holds.

    Attributes:
        parameters, gradients, optimizer: the rank's own parts, or all; 0 for offloaded ones. The
            weights of a rank's own experts, and of the base of adapters, are never offloaded.
        units: slots of gathered parameters, and scratch for a unit's gradients.
        lengths: the bytes that one gather or sum moves: of each unit, and of the parameters that
            several units use.
        gathered: the same of what is only gathered, a base.
    """

    parameters: int
    gradients: int
    optimizer: int
    units: int
    lengths: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.parameters + self.gradients + self.optimizer + self.units


def predict_bytes(
    model: Module,
    stage: int,
    rank: int,
    size: int,
    itemsize: int,
    state_arrays: int,
    unit_bytes: int | None = None,
    is_node_shared: bool = False,
    offloaded: str | None = None,
    units: UnitCut | None = None,
) -> StateBytes:
    """Return the exact bytes a rank will hold, for one parameter group, without values.

    Args:
        model: as for `cut_units`.
        stage: 1, 2 or 3; 0 for plain data parallelism.
        rank, size: in the group that shards the model.
        itemsize: bytes of an element.
        state_arrays: how many arrays of each parameter's size the optimizer keeps.
        unit_bytes: see `ShardedStorage`.
        is_node_shared: whether the node's ranks share one copy of the parameters.
        offloaded: `OPTIMIZER` for the optimizer's state, `ALL` for state and parameters in stage 3;
            None for nothing.
        units: see `ShardedStorage`.
    """
    limit = unit_bytes or UNIT_BYTES[stage or 1]
    cut, shared = units or cut_units(model, limit, itemsize, stage)
    runs = [*(unit.parameters for unit in cut), shared]
    order = [item for item in model.parameters() if not item.rank_local]

    def length(parameters: Sequence[Parameter]) -> int:
        return sum(aligned(item.size, itemsize) for item in parameters)

    *lengths, rest = [length(parameters) * itemsize for parameters in runs]
    full = sum(lengths) + rest if stage == 1 else length(order) * itemsize
    own = length([item for item in model.parameters() if item.rank_local]) * itemsize
    base = _predict_base(model, cut, stage == 3 and size > 1, rank, size, itemsize)
    pieces = [
        length([item for item in parameters if item.room == room])
        for parameters in runs
        for room in {item.room for item in parameters}
    ]
    local = sum(len(part(length, size, rank)) for length in pieces) * itemsize
    scratch = max(lengths, default=0) + rest
    slots = 0 if is_node_shared else _slots(lengths) + rest + base.units
    return StateBytes(
        base.parameters
        + own
        + ((local if stage == 3 or is_node_shared else full) if offloaded != ALL else 0),
        own + (local if stage >= 2 else full),
        (own + (local if stage else full)) * state_arrays if offloaded is None else 0,
        {0: 0, 1: 0, 2: scratch, 3: scratch + slots}[stage],
        tuple(filter(None, (*lengths, rest))),
        base.gathered,
    )


def _slots(lengths: Sequence[int]) -> int:
    """Return the bytes of two slots, in which units of these bytes lie by turns."""
    return sum(max(lengths[i::2], default=0) for i in (0, 1))


def _predict_base(
    model: Module, units: Sequence[Unit], is_sharded: bool, rank: int, size: int, itemsize: int
) -> StateBytes:
    """Return the bytes of a base; see `predict_bytes`."""
    widths = {item: base_itemsize(item, itemsize) for _, item in model.named_base()}
    shared = [item for item in widths if is_sharded and is_shared_base(item)]
    in_units = {item for unit in units for item in unit.base}
    runs = [*(unit.base for unit in units), [item for item in shared if item not in in_units]]
    own = sum(item.size * width for item, width in widths.items())
    own -= sum(item.size * widths[item] for item in shared)
    slots, gathered = 0, list[int]()
    for width in {widths[item] for item in shared}:
        *lengths, rest = [
            width * sum(aligned(item.size, width) for item in run if widths[item] == width)
            for run in runs
        ]
        own += sum(width * len(part(length // width, size, rank)) for length in (*lengths, rest))
        slots += _slots(lengths) + rest
        gathered += filter(None, (*lengths, rest))
    return StateBytes(own, 0, 0, slots, gathered=tuple(gathered))
