"""The executor: one loop over the instructions of a step's program, for every layout.

    full model       F0 B0 F1 B1 ...           a program of one stage; without B for inference

    rank 0 of 3      F0 F1 F2 .  .  .  .  .  B0--- F3 B1--- ...       1F1B; the order is the
    rank 1 of 3      .  F0 F1 .  .  B0--- F2 B1--- F3 ...             schedule's (see `schedule`)
    rank 2 of 3      .  .  F0 B0--- F1 B1--- F2 B2--- F3 ...

Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream", 2019, and "Efficient large-scale
language model training on GPU clusters using Megatron-LM", 2021. Receives are posted one ahead,
sends travel while the rank computes, and every microbatch has buffers of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import nnmpi.base.clock as clock
import nnmpi.base.timeline as timeline
from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.recording import active, record_call, record_note, recorded_input
from nnmpi.comm.point_to_point import Messages
from nnmpi.comm.synchrony.slow import NOT_SLOW, Slow
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.replayed import Replay
from nnmpi.compose.stats import PassReport
from nnmpi.memory.store import Store
from nnmpi.nn.chain import ModelPart, stashed_at
from nnmpi.nn.module import repeatable
from nnmpi.parallel.pipeline.boundary import BoundaryArrays, InputKey, StageBoundary
from nnmpi.parallel.pipeline.stage import RunStage, Stage, StageCost, run_chain
from nnmpi.parallel.zero.storage import COMMON, ShardedStorage
from nnmpi.schedule.check import check
from nnmpi.schedule.lower import SegmentHome, lower, offload, shard_weights, split_stages
from nnmpi.schedule.schedule import (
    COMPUTE,
    RECEIVES,
    SENDS,
    USES,
    Home,
    Instruction,
    Instructions,
    Kind,
    Schedule,
    parts,
    peak_saved,
)
from nnmpi.schedule.schedules import INFERENCE, Generator, make
from nnmpi.tensor.sharded import gather_shards
from nnmpi.tensor.tensor import Tensor

SERIAL = "1f1b"  # 1F1B on one rank: each forward, then its backward


@lru_cache(maxsize=64)  # simulated ranks, and replicas among them, share it
def _executable(
    name: Generator,
    ranks: int,
    microbatches: int,
    virtual: int,
    home: Home,
    counts: tuple[int, ...],
    zero: int,
) -> Schedule:
    schedule = lower(split_stages(make(name, ranks, microbatches, virtual, home), counts))
    if zero > 1:
        schedule = shard_weights(schedule, gathers=zero > 2)
    check(schedule, trains=name != INFERENCE)
    return schedule


class PassProgram(NamedTuple):
    """A rank's instructions in order.

    Omitted are the update after a pass, since the caller does it, and in a full model the
    reductions, since hooks start them when gradients are final.

    Attributes:
        receives: (kind, stage) -> the microbatches received, in order.
        weight: the cost of the instructions, in forward passes of a stage.
    """

    items: tuple[Instructions, ...]
    receives: Mapping[tuple[Kind, int], tuple[int, ...]]
    schedule: Schedule
    weight: float


@lru_cache(maxsize=256)
def _program(rank: int, moved: frozenset[int], *shape: Any) -> PassProgram:
    schedule = _executable(*shape)
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
    return PassProgram(
        items,
        {channel: tuple(numbers) for channel, numbers in receives.items()},
        schedule,
        sum(_WEIGHTS.get(op.kind, 0.0) for item in items for op in item),
    )


class PassHandler:
    """The executor's client: computes losses, and handles gradients. By default it does nothing.

    Attributes:
        length: the length of full sequences, if this rank has only some of their positions.
        slow: minimum times and stragglers in training.
        poll: called before each backward pass on a rank that also serves others; None on other
            ranks.
    """

    length: int = 0
    slow: Slow = NOT_SLOW
    poll: Callable[[], None] | None = None

    def mode(self, microbatch: int, again: bool) -> AbstractContextManager[Any]:
        """Return the mode for a forward; `again` for a recomputation."""
        raise NotImplementedError

    def run_uncut(self, x: Tensor, microbatch: int) -> Tensor:
        """Return `Executor.end` of the model's result; used if the model is not cut."""
        raise NotImplementedError

    def head(self, result: Tensor, microbatch: int) -> Tensor:
        """Return the last stage's output for the model's result: the scalar to differentiate."""
        raise NotImplementedError

    def begin_backward(self, microbatch: int) -> None:
        """A microbatch's backward begins."""

    def end_backward(self, microbatch: int) -> None:
        """A microbatch's backward has ended."""

    def reduce(self, stage: int, microbatch: int | None) -> None:
        """Start the sum of a stage's final gradients over the replicas, without waiting.

        Args:
            microbatch: the one whose gradients they are, if the schedule updates after every
                microbatch; otherwise None.
        """

    def progress(self) -> None:
        """Poll the sums in flight; called after every item of the program."""

    def step(self, stage: int, microbatch: int) -> None:
        """Update a stage's parameters, in schedules that update after every microbatch."""

    def pace(self, computed_s: float, share: float, waited_s: float) -> float:
        """Slow down this share of a step; return the seconds waited. See `Slow.wait`."""
        return 0.0

    def abort(self) -> None:
        """An exception has ended the pass."""


class Executor:
    """Runs this rank's stages of a model, instruction by instruction. Collective to make.

    Args:
        caller: the client.
        arrangement: the model's distribution over the ranks.
        backend: of the arrays.
        replay: records and replays passes; None to run each eagerly.
        synchronous_sends: let no message leave before its receive is posted (for tests; see
            `comm.point_to_point`).

    Attributes:
        stages: this rank's, by number; or their segments, see `Arrangement.segments`.
        count: the number of stages altogether.
        moved: the stages whose saved arrays are moved to a store between forward and backward.
    """

    def __init__(
        self,
        caller: PassHandler,
        arrangement: Arrangement,
        backend: Backend,
        replay: Replay | None = None,
        synchronous_sends: bool = False,
    ) -> None:
        self._caller = caller
        layout, mesh = arrangement.layout, arrangement.mesh
        self._sequence = arrangement.sequence
        self._world = mesh.world.comm.world
        self._replay, self._cuts_classes = replay, arrangement.classes > 0
        self._passes, self._messages = 0, None
        self._label = f"d{mesh.coordinates.d}t{mesh.coordinates.t}" + (
            f"s{mesh.coordinates.s}" if mesh.sp.size > 1 else ""
        )
        self._boundaries: dict[int, StageBoundary] = {}
        self.rank, self.ranks = mesh.pp.rank, mesh.pp.size
        segments = tuple(chain.from_iterable(arrangement.segments))
        self.count = len(segments) or 1
        self._counts = tuple(map(len, arrangement.segments)) or (1,)
        self._stage_home = layout.home
        self._home: Home = SegmentHome(layout.home, tuple(accumulate(self._counts)))
        self._zero = layout.zero if segments else 0
        self._model, self._backend = arrangement.model, backend
        self._schedule: Generator = SERIAL
        self.stages = {0: Stage(self._run_uncut, caller.mode)}
        if segments:
            self._schedule = layout.schedule if self.ranks > 1 else SERIAL
            self.stages = {
                number: self._make_stage(arrangement, number, segments[number].start)
                for number in arrangement.own_segments
            }
        if self.ranks > 1:
            self._messages = Messages(mesh.pp, synchronous_sends)
            boundaries = {
                s for stage in self.stages for s in (stage - 1, stage) if 0 <= s < self.count - 1
            }
            for s in sorted(boundaries):
                for peer in {self._home(s, self.ranks), self._home(s + 1, self.ranks)} - {
                    self.rank
                }:
                    self._boundaries[s] = StageBoundary(self._messages, peer, s, backend)
        self.save_memory(self.recomputed)
        self._unit_of = {number: unit for unit, number in enumerate(self.stages)}
        # By (stage that uses them, microbatch). If another rank has the stage, they wait to be
        # sent.
        self._values: dict[tuple[int, int], BoundaryArrays] = {}
        self._grads: dict[tuple[int, int], Sequence[Array]] = {}
        self._timeline: timeline.Timeline | None = None
        self._actions: dict[Kind, Callable[[int, Any], None]] = {
            Kind.F: self._forward,
            Kind.B: partial(self._backward, halves=False),
            Kind.I: partial(self._backward, halves=True),
            Kind.W: lambda stage, microbatch: self.stages[stage].finish(microbatch),
            Kind.SEND_ACT: partial(self._send, Kind.SEND_ACT),
            Kind.RECV_ACT: partial(record_call, self._receive, Kind.RECV_ACT),
            Kind.SEND_GRAD: partial(self._send, Kind.SEND_GRAD),
            Kind.RECV_GRAD: partial(record_call, self._receive, Kind.RECV_GRAD),
            Kind.OUT: self._send_out,
            Kind.DROP: lambda stage, microbatch: self.stages[stage].drop(microbatch),
            Kind.IN: lambda stage, microbatch: self.stages[stage].bring_in(microbatch),
            Kind.GATHER: partial(record_call, self._gather),
            Kind.FREE: partial(record_call, self._free),
            Kind.REDUCE: partial(record_call, self._reduce),
            Kind.STEP: partial(record_call, self._caller.step),
        }

    def _run_uncut(
        self, tensors: Sequence[Tensor], single: bool, microbatch: int
    ) -> tuple[list[Tensor], bool]:
        return [self._caller.run_uncut(self._to_sharded(tensors[0]), microbatch)], True

    def _make_stage(self, arrangement: Arrangement, number: int, first: int) -> Stage:
        is_last, layers = number == self.count - 1, arrangement.own_segments[number]
        stashed = stashed_at(arrangement.layers, first)
        run = run_chain(number, layers, stashed, self.end if is_last else None)
        run = run if self._sequence is None else self._for_positions(run, is_last)
        recomputes = arrangement.layout.activation_memory is not None
        if recomputes:
            run = partial(repeatable, ModelPart(arrangement.model, layers), {}, run)
        return Stage(run, self._caller.mode, is_last, recomputes, is_cut=True)

    def _for_positions(self, chain: RunStage, is_last: bool) -> RunStage:
        """Return the chain with inputs marked as this rank's positions of sequences.

        Its outputs are plain tensors again, as messages between stages need them.
        """

        def run(
            tensors: Sequence[Tensor], single: bool, microbatch: int
        ) -> tuple[list[Tensor], bool]:
            outputs, single = chain(list(map(self._to_sharded, tensors)), single, microbatch)
            return (outputs if is_last else list(map(self._to_local, outputs))), single

        return run

    def _to_sharded(self, x: Tensor) -> Tensor:
        """Mark a stage's input as this rank's positions, under sequence parallelism."""
        return x if self._sequence is None else self._sequence.as_sharded(x, self._caller.length)

    def _to_local(self, x: Tensor) -> Tensor:
        return x if self._sequence is None else self._sequence.as_local(x, self._caller.length)

    def end(self, result: Tensor, microbatch: int) -> Tensor:
        """Return the head's output for the model's result, gathered if it is sharded."""
        result = self._to_local(result)
        return self._caller.head(
            result if self._cuts_classes else gather_shards(result), microbatch
        )

    def schedule_for(self, microbatches: int) -> Schedule:
        """Return the checked schedule for this many microbatches, with transfers.

        Raises:
            UsageError, ScheduleError: when the schedule does not support this many, or is wrong.
        """
        return _executable(*self._shape(self._schedule, microbatches))

    def _shape(self, name: Generator, microbatches: int) -> tuple[Any, ...]:
        virtual = len(self._counts) // self.ranks
        home = self._stage_home
        return name, self.ranks, microbatches, virtual, home, self._counts, self._zero

    def run(
        self,
        inputs: Sequence[Array],
        seeds: Sequence[Array] = (),
        kind: tuple[Any, ...] = (),
        refusal: str = "",
    ) -> PassReport:
        """Run microbatches forward, and backward given seeds, by this rank's program. Collective.

        Args:
            inputs: every microbatch's input, on all ranks (beyond the first stage only its shape is
                used).
            seeds: every microbatch's gradient of the last stage's scalar; empty for inference.
            kind, refusal: see `Replay.run_or_replay`.
        """
        begin = clock.now()
        self._passes += 1
        name = self._schedule if seeds else INFERENCE
        self._asked = self._shape(name, len(inputs))
        moved = self.moved if seeds else frozenset[int]()
        self._now = _program(self.rank, moved, *self._asked)
        self._inputs, self._seeds, self._report = inputs, seeds, PassReport(len(inputs))
        self._timeline = timeline.current()
        if self._zero > 1:
            self._storage.in_program = True
        try:
            if self._boundaries:
                self._begin_messages(self._now, inputs)
            if self._replay is None:
                self._loop()
            else:
                self._replay.run_or_replay(kind, self._loop, refusal)
            if self._boundaries:
                self._drain()
            if self._zero > 2:
                self._storage.release(COMMON)
        except BaseException:
            self._values.clear()
            self._grads.clear()
            for stage in self.stages.values():
                stage.clear()
            self._caller.abort()
            raise
        finally:
            if self._zero > 1:
                self._storage.in_program = False
        self._report.total_s = clock.now() - begin
        return self._report

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure each stage's microbatches in the block."""
        for stage in self.stages.values():
            stage.measures, stage.cost = True, StageCost()
        try:
            yield
        finally:
            for stage in self.stages.values():
                stage.measures = False

    def peak_bytes(self, most: int) -> int:
        """Return the peak bytes of activations in the last pass, which was measured.

        Args:
            most: of a microbatch of an uncut model.
        """
        if self.count == 1:
            return most
        costs = {number: stage.cost for number, stage in self.stages.items()}
        return int(self.peak_of(costs, self.recomputed, self.moved))

    def peak_of(
        self, costs: Mapping[int, StageCost], again: Collection[int], moved: Collection[int] = ()
    ) -> float:
        """Return the peak bytes of a pass like the last one, for a choice of stages.

        A stage's outputs are the next one's inputs if that is on this rank; the data are no
        activations.

        Args:
            again: the stages that are recomputed.
            moved: those whose saved arrays are moved to a store meanwhile.
        """
        waiting = {number: cost.inputs * (number > 0) for number, cost in costs.items()}
        staying = {
            number: waiting[number] + cost.outputs * (number + 1 not in costs)
            for number, cost in costs.items()
        }
        saved = {number: staying[number] + cost.inner for number, cost in costs.items()}
        schedule = _executable(*self._asked)
        if moved:  # not checked: many choices are tried
            schedule = offload(schedule, self.rank, moved)
        left = {number: waiting[number] for number in again}
        return peak_saved(schedule, self.rank, saved, left, staying)

    @property
    def recomputed(self) -> frozenset[int]:
        """The stages that are recomputed."""
        return frozenset(number for number, stage in self.stages.items() if stage.recomputes)

    def save_memory(
        self, again: Collection[int], moved: Collection[int] = (), store: Store | None = None
    ) -> None:
        """Recompute some stages from now on, and move what others save to a store meanwhile."""
        for number, stage in self.stages.items():
            stage.recomputes = number in again
        self.moved, self._store_of_saved = frozenset(moved), store

    def free(self) -> None:
        """Free the communicator. Collective."""
        if self._messages is not None:
            self._messages.free()

    def _loop(self) -> None:
        """Carry out the instructions in their order.

        The loop may be recorded. So all work besides computation on arrays goes through `record_call`,
        and inputs from outside through `recorded_input`; a replay repeats both.
        """
        paced = self._now.schedule.trains and bool(self._caller.slow)
        watched = paced or self._messages is not None or self._timeline is not None
        for item in self._now.items:
            for op in item:
                kind, stage, microbatch = op.kind, op.stage, op.microbatch
                if self._boundaries and kind in USES and microbatch is not None:
                    self._wait_for_message(USES[kind], stage, microbatch)
                if self._zero > 2 and kind in COMPUTE:
                    record_call(self._wait_for_weights, stage)
                if watched:
                    record_call(self._begin, kind)
                self._actions[kind](stage, microbatch)
                if paced and kind in _WEIGHTS:
                    record_call(self.pace)
                if watched:
                    # the peak is after a forward: backwards only free memory
                    stages = self.stages.values() if kind is Kind.F else ()
                    record_call(self._end, op, sum(entry.live for entry in stages))
                if stage == 0 and kind in _LAST:
                    record_call(self._caller.end_backward, microbatch)
            if self._messages is not None:
                record_call(self._progress)

    def _progress(self) -> None:
        # A second thread that calls MPI instead was slower: 0.65 ms against 0.47.
        assert self._messages is not None
        self._messages.progress()
        self._caller.progress()

    def _begin(self, kind: Kind) -> None:
        self._began, self._paused_s, self._collective_s = clock.now(), 0.0, self._world.collective_s
        self._share = _WEIGHTS.get(kind, 0.0) / (self._now.weight or 1.0)

    def pace(self, part: float = 1.0) -> None:
        """Wait until the current instruction has lasted for this part of its slowed-down time."""
        met_s = self._world.collective_s - self._collective_s
        computed_s = clock.now() - self._began - self._paused_s - met_s
        self._paused_s += self._caller.pace(computed_s, self._share * part, self._paused_s)

    def _end(self, instruction: Instruction, live: int) -> None:
        """Note the time and memory of an instruction."""
        kind, report, begin, end = instruction.kind, self._report, self._began, clock.now()
        if kind in COMPUTE:
            report.samples.append((instruction, end - begin))
            report.compute_s += end - begin
            report.peak_live = max(report.peak_live, live)
        elif kind in SENDS:
            self._world.collective_s += end - begin
        is_shown = kind in _STYLES and kind not in RECEIVES
        if is_shown and not (self._zero > 1 and kind is Kind.REDUCE):  # the collective shows itself
            self._show(instruction, begin, end)

    def _show(self, instruction: Instruction, begin_s: float, end_s: float) -> None:
        if self._timeline is not None:
            category, track = _STYLES[instruction.kind]
            sends, takes = self._arrow(instruction)
            self._timeline.add(
                str(instruction), category, track, begin_s, end_s, None, sends, takes
            )

    # ---- weights and gradients that replicas share out ----

    @property
    def _storage(self) -> ShardedStorage:
        storage = self._model.storage
        assert isinstance(storage, ShardedStorage)
        return storage

    def _gather(self, stage: int, microbatch: int) -> None:
        self._storage.start(COMMON)
        self._storage.start(self._unit_of[stage])

    def _wait_for_weights(self, stage: int) -> None:
        self._storage.acquire(COMMON)
        self._storage.acquire(self._unit_of[stage])

    def _free(self, stage: int, microbatch: int) -> None:
        self._storage.release(self._unit_of[stage])

    def _reduce(self, stage: int, microbatch: int | None) -> None:
        if self._zero > 1:
            self._storage.reduce(self._unit_of[stage])
        else:
            self._caller.reduce(stage, microbatch)

    # ---- computing ----

    def _send_out(self, stage: int, microbatch: int) -> None:
        assert self._store_of_saved is not None
        self.stages[stage].send_out(microbatch, self._store_of_saved, self._backend)

    def _forward(self, stage: int, microbatch: int) -> None:
        if stage:
            values = self._values.pop((stage, microbatch))
        else:
            values = BoundaryArrays((recorded_input(lambda: self._inputs[microbatch]),), (False,))
        outputs = self.stages[stage].forward(microbatch, values, self._now.schedule.trains)
        if stage < self.count - 1:
            self._values[stage + 1, microbatch] = outputs

    def _backward(self, stage: int, microbatch: int, halves: bool) -> None:
        if stage == self.count - 1:
            if self._caller.poll is not None:
                record_call(self._caller.poll)
            record_note(self._caller.begin_backward, microbatch)
            grads: Sequence[Array] = [recorded_input(lambda: self._seeds[microbatch])]
        else:
            grads = self._grads.pop((stage, microbatch))
        grads_back = self.stages[stage].backward(microbatch, grads, halves)
        if stage:
            self._grads[stage - 1, microbatch] = grads_back

    # ---- messages ----

    def _begin_messages(self, program: PassProgram, inputs: Sequence[Array]) -> None:
        """Post each channel's first receive; a channel is a kind and a stage.

        From then on one receive per channel is posted ahead of its use, so that its message can
        travel during computation. Posting all would need a buffer for each. Within a channel,
        receives are posted in the program's order, which is the order of the sends: MPI pairs them
        correctly.
        """
        self._keys: list[InputKey] = [(tuple(x.shape), program.schedule.trains) for x in inputs]
        self._to_post = {channel: deque(result) for channel, result in program.receives.items()}
        self._posted: dict[tuple[Kind, int, int], Callable[[], BoundaryArrays]] = {}
        # A channel's receives are posted one ahead, so its last message can leave before the next
        # one is sent: waiting for it in `send` cannot deadlock.
        self._waits = all(
            end.is_agreed(key) for end in self._boundaries.values() for key in self._keys
        )
        for kind, stage in self._to_post:
            self._post_ahead(kind, stage)

    def _drain(self) -> None:
        """Wait until all messages have left."""
        assert self._messages is not None
        waited = clock.now()
        self._messages.drain()
        for boundary in self._boundaries.values():
            boundary.drop_sent()
        self._received = BoundaryArrays((), ())  # frees the last received arrays
        end = clock.now()
        if self._timeline is not None:
            self._timeline.add("last sends", "waiting", timeline.WAITING, waited, end)
        self._world.collective_s += end - waited

    def _send(self, kind: Kind, stage: int, microbatch: int) -> None:
        if kind is Kind.SEND_ACT:
            values = self._values.pop((stage + 1, microbatch))
        else:
            stage -= 1
            values = BoundaryArrays(tuple(self._grads.pop((stage, microbatch))), ())
        record_call(self._send_over, kind, stage, microbatch, active() is not None, *values)

    def _send_over(
        self, kind: Kind, boundary: int, microbatch: int, copy: bool, *values: Any
    ) -> None:
        """Send arrays over a boundary.

        Args:
            copy: send copies, since a replay reuses the arrays' memory while the message travels.
        """
        outgoing, boundary_ = BoundaryArrays(*values), self._boundaries[boundary]
        if copy:
            outgoing = outgoing._replace(
                arrays=tuple(item.copy(order="K") for item in outgoing.arrays)
            )
        if kind is Kind.SEND_ACT:
            sent = boundary_.send(self._keys[microbatch], outgoing, self._waits)
        else:
            sent = boundary_.send_back(outgoing.arrays, self._waits)
        instruction = kind.at(boundary + (kind is Kind.SEND_GRAD), microbatch)
        self._report.sent.append((instruction, [array.nbytes for array in sent]))

    def _receive(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Post this receive unless it is posted ahead, then the channel's next one.

        Nothing is posted for the first microbatch of a shape, whose message brings the signature
        that later receives need, nor for those behind it: they are received where they are used, so
        that a pass waits for messages there alone, which is the order that `check` proves.
        """
        if microbatch in self._to_post[kind, stage]:
            self._post_ahead(kind, stage)
        if microbatch not in self._to_post[kind, stage]:
            self._post_ahead(kind, stage)

    def _wait_for_message(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Wait for a receive's arrays, unless they come from a stage of this rank.

        Args:
            kind: of the receive.
        """
        if (kind, stage) not in self._now.receives:
            return
        record_call(self._wait, kind, stage, microbatch)
        arrays = [
            recorded_input(lambda i: self._received.arrays[i], i)
            for i in range(len(self._received.arrays))
        ]
        if kind is Kind.RECV_ACT:
            self._values[stage, microbatch] = self._received._replace(arrays=tuple(arrays))
        else:
            self._grads[stage, microbatch] = arrays

    def _wait(self, kind: Kind, stage: int, microbatch: int) -> None:
        begin = clock.now()
        if (kind, stage, microbatch) not in self._posted:
            self._post_next(kind, stage)
        self._received = self._posted.pop((kind, stage, microbatch))()
        end = clock.now()
        self._report.wait_s += end - begin
        self._show(kind.at(stage, microbatch), begin, end)

    def _post_ahead(self, kind: Kind, stage: int) -> None:
        """Post a stage's next receive of this kind, if its signature is agreed."""
        receives = self._to_post[kind, stage]
        if receives and self._boundary(kind, stage).is_agreed(self._keys[receives[0]]):
            self._post_next(kind, stage)

    def _post_next(self, kind: Kind, stage: int) -> None:
        microbatch = self._to_post[kind, stage].popleft()
        self._posted[kind, stage, microbatch] = self._boundary(kind, stage).expect(
            self._keys[microbatch], back=kind is not Kind.RECV_ACT
        )

    def _boundary(self, kind: Kind, stage: int) -> StageBoundary:
        return self._boundaries[stage - 1 if kind is Kind.RECV_ACT else stage]

    def _arrow(self, instruction: Instruction) -> tuple[str, str]:
        """Return the trace's names of the messages that an instruction sends and receives."""
        is_send = instruction.kind in SENDS
        is_gradient = instruction.kind in (Kind.SEND_GRAD, Kind.RECV_GRAD)
        if not is_send and instruction.kind not in RECEIVES:
            return "", ""
        boundary = instruction.stage - (1 if is_gradient == is_send else 0)
        kind = "grad" if is_gradient else "act"
        name = f"{self._label}/{self._passes}/{boundary}/{kind}/{instruction.microbatch}"
        return (name, "") if is_send else ("", name)


# The weights of instructions in a step's time: a backward multiplies two matrices where a forward
# multiplies one.
_WEIGHTS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
_LAST = (Kind.B, Kind.I)
_STYLES = {
    Kind.F: ("forward", timeline.COMPUTE),
    **dict.fromkeys((Kind.B, Kind.I, Kind.W), ("backward", timeline.COMPUTE)),
    Kind.SEND_ACT: ("activation", timeline.SEND),
    Kind.RECV_ACT: ("activation", timeline.RECEIVE),
    Kind.SEND_GRAD: ("gradient", timeline.SEND),
    Kind.RECV_GRAD: ("gradient", timeline.RECEIVE),
    Kind.DROP: ("activations out", timeline.WAITING),
    Kind.REDUCE: ("reduce", timeline.REDUCE),
    Kind.STEP: ("update", timeline.COMPUTE),
}
