"""What every pass of a model shares: this rank's stages, their programs, and the ways between them.

Executor     made once: stages, boundaries, checked programs
Pass         one batch, instruction by instruction (see `compose.walk`)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, NamedTuple

from nnmpi.backend.backend import Backend
from nnmpi.comm.point_to_point import Messages
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.replayed import Replay
from nnmpi.memory.fitting import StageCost
from nnmpi.memory.store import Store
from nnmpi.nn.chain import ModelPart, stashed_at
from nnmpi.nn.module import run_with_kept_buffers
from nnmpi.parallel.pipeline.boundary import StageBoundary
from nnmpi.parallel.pipeline.stage import Outputs, RunStage, Stage, Visit, run_chain
from nnmpi.parallel.zero.storage import COMMON, ShardedStorage
from nnmpi.schedule.check import check
from nnmpi.schedule.lower import SegmentHome, lower, offload, shard_weights, split_stages
from nnmpi.schedule.schedule import RECEIVES, Home, Instructions, Kind, Schedule, parts
from nnmpi.schedule.schedules import INFERENCE, Generator, make, row_of
from nnmpi.tensor.sharded import gather_shards
from nnmpi.tensor.tensor import Tensor

SERIAL = "1f1b"  # 1F1B on one rank: each forward, then its backward

# The weights of instructions in a step's time: a backward multiplies two matrices where a forward
# multiplies one.
WEIGHTS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


@lru_cache(maxsize=64)  # simulated ranks, and replicas among them, share it
def executable(
    name: Generator,
    ranks: int,
    microbatches: int,
    virtual: int,
    home: Home,
    counts: tuple[int, ...],
    zero: int,
) -> Schedule:
    """Return a checked schedule with transfers, and ZeRO's gathers and sums.

    Args:
        name, ranks, microbatches, virtual, home: see `make`.
        counts: the segments of each stage.
        zero: the stage of ZeRO that the program carries out.

    Raises:
        UsageError, ScheduleError: when it does not support these, or is wrong.
    """
    schedule = lower(split_stages(make(name, ranks, microbatches, virtual, home), counts))
    if zero > 1:
        schedule = shard_weights(schedule, gathers=zero > 2)
    check(schedule, trains=row_of(name).trains)
    return schedule


class RankProgram(NamedTuple):
    """A rank's instructions in order.

    Omitted are the update after a pass, since the caller does it, and in a full model the
    reductions, since hooks start them when gradients are final.

    Attributes:
        receives: (kind, stage) -> the microbatches received, in order.
        schedule: of all ranks, without offloading.
        trains: whether it has backward passes.
        weight: the cost of the instructions, in forward passes of a stage.
    """

    items: tuple[Instructions, ...]
    receives: Mapping[tuple[Kind, int], tuple[int, ...]]
    schedule: Schedule
    trains: bool
    weight: float


@lru_cache(maxsize=256)
def _program(rank: int, moved: frozenset[int], *shape: Any) -> RankProgram:
    original = schedule = executable(*shape)
    if moved:
        schedule = offload(schedule, rank, moved)
        check(schedule)
    left_out = {Kind.STEP} if schedule.stages > 1 else {Kind.STEP, Kind.REDUCE}
    items_of_rank = (parts(item) for item in schedule.programs[rank])
    items = tuple(
        item
        for item in items_of_rank
        if any(op.microbatch is not None or op.kind not in left_out for op in item)
    )
    receives: dict[tuple[Kind, int], list[int]] = {}
    for op in schedule.instructions(rank):
        if op.kind in RECEIVES and op.microbatch is not None:
            receives.setdefault((op.kind, op.stage), []).append(op.microbatch)
    return RankProgram(
        items,
        {channel: tuple(numbers) for channel, numbers in receives.items()},
        original,
        schedule.trains,
        sum(WEIGHTS.get(op.kind, 0.0) for item in items for op in item),
    )


class Executor:
    """This rank's stages of a model, and the programs over them. Collective to make.

    Args:
        arrangement: the model's distribution over the ranks.
        backend: of the arrays.
        run: runs a model that is not cut, as its only stage.
        replay: records and replays passes; None to run each eagerly.
        synchronous_sends: let no message leave before its receive is posted (for tests; see
            `comm.point_to_point`).

    Attributes:
        stages: this rank's, by number; or their segments, see `Arrangement.segments`.
        count: the number of stages altogether.
        counts: the segments of each stage of the layout.
        boundaries: to other ranks, by the number of the stage before them.
        messages: between the ranks of a pipeline.
        zero: the stage of ZeRO that the program carries out; 0 for none.
        storage: the model's, if that is 2 or 3.
        unit_of: the number of a stage's unit there.
        recomputed: the stages that are recomputed.
        moved: the stages whose saved arrays are moved to a store between forward and backward.
        store: it.
        passes: the number of passes so far.
        costs: what a microbatch costs each stage, by the last pass that was measured.
        calls: what passes do at each kind of instruction, see `compose.walk`.
        label: of this rank's pipeline, in traces.
    """

    storage: ShardedStorage
    store: Store | None = None
    moved: frozenset[int] = frozenset()
    costs: Mapping[int, StageCost] = MappingProxyType({})

    def __init__(
        self,
        arrangement: Arrangement,
        backend: Backend,
        run: RunStage,
        replay: Replay | None = None,
        synchronous_sends: bool = False,
    ) -> None:
        layout, mesh = arrangement.layout, arrangement.mesh
        if "storage" in vars(arrangement.model):
            arrangement.model.storage.check.tell(arrangement)
        self._sequence = arrangement.sequence
        self.world, self.backend, self.replay = mesh.world.comm.world, backend, replay
        self._cuts_classes = arrangement.classes > 0
        self.label = f"d{mesh.coordinates.d}t{mesh.coordinates.t}" + (
            f"s{mesh.coordinates.s}" if mesh.sp.size > 1 else ""
        )
        self.passes, self.calls = 0, dict[tuple[bool, bool], Any]()
        self.rank, self.ranks = mesh.pp.rank, mesh.pp.size
        segments = tuple(chain.from_iterable(arrangement.segments))
        self.count = len(segments) or 1
        self.counts = tuple(map(len, arrangement.segments)) or (1,)
        self._stage_home = layout.home
        self.zero = layout.zero if segments else 0
        if self.zero > 1:
            assert isinstance(arrangement.model.storage, ShardedStorage)
            self.storage = arrangement.model.storage
        self._schedule: Generator = SERIAL
        self.base = tuple(item for _, item in arrangement.model.named_base())
        self.stages = {0: Stage(self._for_positions(run, True), base=self.base)}
        if segments:
            self._schedule = layout.pipeline if self.ranks > 1 else SERIAL
            self.stages = {
                number: self._make_stage(arrangement, number, segments[number].start)
                for number in arrangement.own_segments
            }
        self.unit_of = {number: unit for unit, number in enumerate(self.stages)}
        self.messages: Messages | None = None
        self.boundaries: dict[int, StageBoundary] = {}
        if self.ranks > 1:
            self.messages = Messages(mesh.pp, synchronous_sends)
            home = SegmentHome(layout.home, tuple(accumulate(self.counts)))
            inner = {
                s for stage in self.stages for s in (stage - 1, stage) if 0 <= s < self.count - 1
            }
            for s in sorted(inner):
                for peer in {home(s, self.ranks), home(s + 1, self.ranks)} - {self.rank}:
                    self.boundaries[s] = StageBoundary(self.messages, peer, s, backend)

    def _make_stage(self, arrangement: Arrangement, number: int, first: int) -> Stage:
        is_last, layers = number == self.count - 1, arrangement.own_segments[number]
        run = run_chain(number, layers, stashed_at(arrangement.layers, first), is_last)
        run = self._for_positions(run, is_last)
        recomputes = arrangement.layout.activation_memory is not None
        if recomputes:
            run = partial(run_with_kept_buffers, ModelPart(arrangement.model, layers), {}, run)
        return Stage(run, is_last, recomputes, is_cut=True, base=self.base)

    def _for_positions(self, chain: RunStage, is_last: bool) -> RunStage:
        """Return the chain, under sequence parallelism with inputs marked as this rank's positions.

        Its outputs are plain tensors again, as messages between stages need them.
        """
        if self._sequence is None:
            return chain
        to_local, to_sharded = self._sequence.as_local, self._sequence.as_sharded

        def run(tensors: Sequence[Tensor], single: bool, visit: Visit) -> Outputs:
            inputs = [to_sharded(x, visit.length) for x in tensors]
            outputs, single = chain(inputs, single, visit)
            return (outputs if is_last else [to_local(y, visit.length) for y in outputs]), single

        return run

    def whole(self, result: Tensor, length: int) -> Tensor:
        """Return the model's result, gathered if its features are sharded.

        Args:
            length: of full sequences, if this rank has only some of their positions.
        """
        if self._sequence is not None:
            result = self._sequence.as_local(result, length)
        return result if self._cuts_classes else gather_shards(result)

    def schedule_for(self, microbatches: int) -> Schedule:
        """Return the checked schedule for this many microbatches, with transfers.

        Raises:
            UsageError, ScheduleError: when the schedule does not support this many, or is wrong.
        """
        return self.program(microbatches, True).schedule

    def program(self, microbatches: int, trains: bool) -> RankProgram:
        """Return this rank's checked program; see `schedule_for`."""
        name, virtual = self._schedule if trains else INFERENCE, len(self.counts) // self.ranks
        moved = self.moved if trains else frozenset()  # inference saves nothing to move
        shape = self.ranks, microbatches, virtual, self._stage_home, self.counts, self.zero
        return _program(self.rank, moved, name, *shape)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Let the program in the block gather and free what ZeRO 2 and 3 shard."""
        self.storage.in_program = True
        try:
            yield
            if self.zero > 2:
                self.storage.release(COMMON)
        finally:
            self.storage.in_program = False

    @property
    def recomputed(self) -> frozenset[int]:
        """The stages that are recomputed."""
        return frozenset(number for number, stage in self.stages.items() if stage.recomputes)

    def save_memory(
        self, recomputed: Collection[int], moved: Collection[int] = (), store: Store | None = None
    ) -> None:
        """Recompute some stages from now on, and move what others save to a store meanwhile."""
        for number, stage in self.stages.items():
            stage.recomputes = number in recomputed
        self.moved, self.store = frozenset(moved), store

    def free(self) -> None:
        """Free the communicator. Collective."""
        if self.messages is not None:
            self.messages.free()
