"""Storage that is shared out, at work: units are gathered and left, gradients are summed, in the order of the passes.

    enter(2, 1)    unit 2 is in its slot; unit 1 begins to come            leave(2)    another one may have the slot
    reduce(2)      its gradients are summed, and this rank's part of the sum is added to what it has
    finish_update  all ranks have what an update has written

Through messages, or through memory that a node's ranks share (`window`). What lies where is in `partitioned`.
"""

from collections.abc import Callable
from functools import partial
from math import nan
from typing import Any

import numpy as np

from nnmpi import clock, timeline
from nnmpi.backend.array import Array, namespace
from nnmpi.comm.algorithms.registry import AUTO, NATIVE
from nnmpi.comm.algorithms.registry import SHARED as SHARED_MEMORY
from nnmpi.comm.buffers import is_device
from nnmpi.comm.collective import ALL_GATHER, REDUCE_SCATTER
from nnmpi.comm.execution import MAX_MESSAGE_BYTES, Pending
from nnmpi.comm.gradients import Traffic
from nnmpi.comm.group import Group
from nnmpi.errors import DeviceError, UsageError
from nnmpi.memory.state_offload import StoredArray
from nnmpi.memory.store import Store
from nnmpi.nn.module import Module
from nnmpi.parallel.zero.partitioned import PartitionedStorage
from nnmpi.parallel.zero.units import SHARED
from nnmpi.parallel.zero.window import NodeArrays
from nnmpi.shard import split


class ShardedStorage(PartitionedStorage):
    """The parameters of a model, of which the ranks of a group keep parts. Give it to `Module.initialize`:

        model.initialize(seed=0, storage=sharded(model, group, stage=3))

    An optimizer over it has the state of this rank's parts alone, and updates those. For the arguments see
    `PartitionedStorage`.

    Attributes:
        sent_bytes: bytes of the arrays that were gathered and summed since the last `take_traffic`.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        self._window: NodeArrays | None = None
        self._standing: dict[int, bool] = {}  # the units in their slots, and whether all of each has come
        self._seconds, self._calls, self.sent_bytes = 0.0, 0, 0
        self._gathers: list[Pending | None] = []
        self._sums: list[Pending | None] = []
        self._arrived = np.empty(0)
        self._connected = False
        super().__init__(*given, **options)
        self._fresh = [True] * len(self.data)  # no gradients were added since `zero_grad`

    def held_bytes(self) -> tuple[int, int, int]:
        """See `FlatStorage.held_bytes`; what else it takes are slots, scratch, and where sums arrive."""
        parameters = sum(array.nbytes for array in (self.data if self.stage == 3 else self._data))
        gradients = sum(array.nbytes for array in (self._grads if self.stage == 1 else self.grads))
        return parameters, gradients, sum(room.nbytes for room in self._rooms) + self.communication_bytes

    # ---- gradients ----

    def _forget(self) -> None:
        super()._forget()
        self._fresh = [True] * len(self.data)

    @property
    def has_gradients(self) -> bool:
        """See `FlatStorage.has_gradients`."""
        return super().has_gradients if self.stage == 1 else not all(self._fresh)

    def _finish(self) -> None:
        if self.stage == 1:
            super()._finish()
            return
        self.check_places()
        for i, fresh in enumerate(self._fresh):
            if fresh:
                self.grads[i][...] = 0

    def reduce(self, number: int) -> None:
        """Sum a unit's gradients over the ranks, and add this rank's part of the sum to what it has. Collective."""
        begin = clock.now()
        pieces = self._pieces[number]
        numbers = [i for i, span in enumerate(self.spans) if span.buffer in pieces]
        if any(self.spans[i].parameter.requires_grad for i in numbers):
            ends = dict.fromkeys(pieces, 0)
            for i in numbers:
                span = self.spans[i]
                span.parameter.finish_gradient()
                self._grads[span.buffer][ends[span.buffer] : span.start] = 0  # a gap, where scratch holds anything
                ends[span.buffer] = span.stop
                if self.stage > 1:
                    span.parameter.grad = None
            for i, end in ends.items():
                self._grads[i][end:] = 0
            self._wait_for_others()
            for i in ends:
                self._sum(i)
            self._wait_for_others()
        self._seconds += clock.now() - begin

    def _sum(self, i: int) -> None:
        """Sum one of the whole arrays, and put this rank's part where it belongs."""
        whole, own, place = self._grads[i], self.own[i], self.grads[i]
        fresh = self._fresh[i] and self.stage > 1
        replaces = fresh or self.stage == 1
        self._fresh[i] = False
        if self.ranks.size > 1 and whole.size:
            self._count(whole)
        if self._window is not None:
            self._window.sum(i, own, place, replaces)
            return
        arrived = whole[own.start : own.stop]
        if self.ranks.size > 1 and whole.size:
            pending = self._sums[i]
            with timeline.span(REDUCE_SCATTER.name, "collective", timeline.REDUCE):
                if pending is not None:
                    pending.run()
                else:
                    arrived = place if fresh else self._arrived[: len(own)]
                    counts = [len(each) for each in split(whole.size, self.ranks.size)]
                    self._group.comm.reduce_scatter(whole, arrived, counts)
        if not replaces:
            namespace(place).add(place, arrived, out=place)
        elif arrived is not place:
            place[...] = arrived

    def _wait_for_others(self) -> None:
        """With arrays in shared memory, wait for the others: nobody may read too early, or write too early again."""
        if self._window is not None:
            with timeline.span("other ranks", "waiting", timeline.WAITING):
                self._window.barrier.run()

    # ---- parameters ----

    def connect(self, group: Group, algorithm: str = AUTO) -> None:
        """Make ready what gathers and sums. Collective.

        Args:
            group: the same ranks, for these messages alone.
            algorithm: "shared", which moves the arrays to memory that a node's ranks share, "native", "ring" or "tree";
                "auto" is "shared" for arrays in the host's memory and ranks of one node, else MPI's own.

        Raises:
            UsageError: for another one, and for "shared" where there is no such memory.
        """
        self._group, self._connected = group, True
        one_node = len(set(group.nodes())) == 1 and not any(map(is_device, self._data)) and self._store is None
        if algorithm not in (AUTO, SHARED_MEMORY, NATIVE, "ring", "tree"):
            raise UsageError(
                f"ZeRO scatters sums and gathers parts, which {algorithm!r} does not; choose auto, shared, native, "
                "ring or tree"
            )
        if algorithm == SHARED_MEMORY and not one_node:
            raise UsageError(
                "ZeRO goes through shared memory where all ranks that share a model are on one node, with arrays in "
                "the host's memory that stay there; choose native, ring or tree"
            )
        if one_node and group.size > 1 and algorithm in (AUTO, SHARED_MEMORY):
            try:
                own = [len(place) * whole.itemsize for place, whole in zip(self.own, self._grads, strict=True)]
                self._window = NodeArrays(group, max(own, default=0))
                self._share(self._window)
                return
            except DeviceError:
                self._window = None
                if algorithm == SHARED_MEMORY:
                    raise
        self._bind_messages(group, NATIVE if algorithm in (AUTO, SHARED_MEMORY) else algorithm)

    def _share(self, window: NodeArrays) -> None:
        """Move what others read to memory that the ranks share; collective."""
        lengths, dtype = [len(whole) for whole in self._data], self.data[0].dtype if self.data else np.dtype("f4")
        self._rooms = []
        grads = self._lay_out(lengths, dtype, window.memory.allocate, self.stage >= 2)
        if self.stage == 3:
            data = window.memory.common_all([(length, dtype) for length in lengths])
            for whole, own, part_of in zip(data, self.own, self.data, strict=True):
                whole[own.start : own.stop] = part_of
        else:
            data = self._lay_out(lengths, dtype, window.memory.allocate, 0)
            for new, old in zip(data, self._data, strict=True):
                new[...] = old
        window.memory.barrier()
        self.stands_once = self.stage == 3
        self._settle(data, grads)
        window.everyones = (
            ([] if self.stage == 3 else [window.memory.parts(whole) for whole in data]),
            [window.memory.parts(whole) for whole in grads],
        )

    def _bind_messages(self, group: Group, name: str) -> None:
        bind = partial(group.bind, algorithm=name)
        alone = group.size == 1
        self._gathers = [
            None if alone or not whole.size else bind(whole, tag=i, operation=ALL_GATHER.name)
            for i, whole in enumerate(self._data)
        ]
        # Bound, MPI's own would keep a copy of each array that it sums; called, it writes the sum where it belongs.
        called = [
            alone or not whole.size or (name == NATIVE and not is_device(whole) and whole.nbytes <= MAX_MESSAGE_BYTES)
            for whole in self._grads
        ]
        self._sums = [
            None if each else bind(whole, tag=len(called) + i, operation=REDUCE_SCATTER.name)
            for i, (whole, each) in enumerate(zip(self._grads, called, strict=True))
        ]
        longest = max((len(own) for own, each in zip(self.own, called, strict=True) if each), default=0)
        self._arrived = np.empty(0 if alone else longest, self.data[0].dtype) if self.data else np.empty(0)

    @property
    def communication_bytes(self) -> int:
        """The bytes of the array in which a sum arrives that cannot be written where it belongs."""
        return int(self._arrived.nbytes) + (0 if self._window is None else self._window.nbytes)

    def finish_update(self) -> None:
        """Let every rank have all new parameters; in stage 3, forget what was gathered of the old ones."""
        if not self._connected:
            raise UsageError("nothing puts the ranks' parts together; make a ShardedDataParallel of this model first")
        begin = clock.now()
        self._standing.clear()
        self._wait_for_others()
        if self._window is not None and self.stage < 3:
            for i, whole in enumerate(self._data):
                self._count(whole)
                self._window.gather(i, whole)
        for whole, pending in zip(self._data, self._gathers, strict=False):
            if pending is not None and self.stage < 3:
                self._count(whole)
                with timeline.span(ALL_GATHER.name, "collective", timeline.REDUCE):
                    pending.run()
        self._seconds += clock.now() - begin

    def enter(self, number: int, following: int | None = None) -> None:
        """Let a unit's parameters be in their places, and begin to gather the one that comes next. Collective.

        Args:
            number: the unit's.
            following: the next one's, whose slot is free; None if there is none.
        """
        if self.stage < 3 or self._window is not None:
            return
        begin = clock.now()
        self._start(number)
        self._wait(number)
        if following is not None:
            self._start(following)
        self._seconds += clock.now() - begin

    def leave(self, number: int) -> None:
        """Let another unit have a unit's slot. If it was asked for and nobody came, it is waited for."""
        if number in self._standing:
            self._wait(number)
            del self._standing[number]

    def _start(self, number: int) -> None:
        if number in self._standing:
            return
        if number != SHARED:  # who comes again out of turn finds others there
            for other in [each for each in self._standing if each != SHARED and (each - number) % 2 == 0]:
                self.leave(other)
        self._standing[number] = False
        for i in self._pieces[number]:
            own, mine = self.own[i], self.data[i]
            place = self._data[i][own.start : own.stop]
            if isinstance(mine, StoredArray):
                mine.bring(place)
            else:
                place[...] = mine
                self._begin_gather(i)

    def _begin_gather(self, i: int) -> None:
        """Begin to gather an array of which this rank's part is in its place."""
        pending = self._gathers[i]
        if pending is not None:
            self._count(self._data[i])
            pending.start()

    def _wait(self, number: int) -> None:
        if not self._standing[number]:
            for i in self._pieces[number]:
                mine = self.data[i]
                if isinstance(mine, StoredArray):
                    with timeline.span("out of memory", "waiting", timeline.WAITING):
                        mine.arrive()
                    self._begin_gather(i)
            with timeline.span(ALL_GATHER.name, "collective", timeline.REDUCE):
                for i in self._pieces[number]:
                    pending = self._gathers[i]
                    if pending is not None:
                        pending.wait()
            self._standing[number] = True

    # ---- what it takes ----

    def _count(self, whole: Array) -> None:
        self._calls += 1
        self.sent_bytes += int(whole.nbytes)

    def take_traffic(self) -> Traffic:
        """Return what was exchanged since the last call: the bytes of whole arrays, of which (N - 1) / N are sent."""
        traffic = Traffic(self._seconds, 0.0, self.sent_bytes, self._calls, nan if self._calls else 0.0)
        self._seconds, self._calls, self.sent_bytes = 0.0, 0, 0
        return traffic

    def disconnect(self) -> None:
        """Give back what MPI keeps, and move to memory of this rank's own. Collective."""
        self._connected = False
        for pending in [*self._gathers, *self._sums]:
            if pending is not None:
                pending.free()
        self._gathers, self._sums = [], []
        window, self._window = self._window, None
        if window is not None:
            self._rooms, self.stands_once = [], False
            grads = self._lay_out([len(whole) for whole in self._grads], self.data[0].dtype, np.zeros, self.stage >= 2)
            if self.stage == 3:
                self.data = [own.copy() for own in self.data]
                data = [np.broadcast_to(np.zeros((), whole.dtype), whole.shape) for whole in self._data]
            else:
                data = [whole.copy() for whole in self._data]
            self._settle(data, grads)
            window.free()
        self._group.free()


def sharded(
    model: Module, ranks: Group, stage: int = 3, unit_bytes: int | None = None, store: Store | None = None
) -> Callable[..., ShardedStorage]:
    """Return what makes a model's storage in `Module.initialize`.

    Args:
        model, ranks, stage, unit_bytes, store: see `ShardedStorage`.
    """
    return partial(ShardedStorage, model=model, ranks=ranks, stage=stage, unit_bytes=unit_bytes, store=store)
