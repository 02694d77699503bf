"""A pass: one batch's walk over the instructions of this rank's program, for every layout.

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
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import nnmpi.base.clock as clock
import nnmpi.base.timeline as timeline
from nnmpi.backend.array import Array
from nnmpi.backend.memory import Meter
from nnmpi.backend.recording import active, call
from nnmpi.comm.synchrony.slow import NOT_SLOW, Slow
from nnmpi.compose.activations import ActivationLimit
from nnmpi.compose.executor import WEIGHTS, Executor, RankProgram
from nnmpi.compose.stats import PassReport
from nnmpi.memory.fitting import StageCost, peak_of_stages
from nnmpi.parallel.pipeline.boundary import BoundaryArrays, InputKey, StageBoundary
from nnmpi.parallel.pipeline.stage import Flight, Visit
from nnmpi.parallel.zero.storage import COMMON
from nnmpi.schedule.schedule import COMPUTE, RECEIVES, SENDS, USES, Instruction, Kind
from nnmpi.tensor.tensor import Tensor


class Inbox:
    """A pass's messages from other stages. A channel is a kind of receive, and its stage.

    One receive per channel is posted ahead of its use, so that its message can travel during
    computation. Posting all would need a buffer for each. Within a channel, receives are posted in
    the program's order, which is the order of the sends: MPI pairs them correctly.

    Args:
        program: the rank's.
        boundaries: of its stages, by the number of the stage before them.
        keys: of the microbatches' inputs.

    Attributes:
        waits: whether a send may wait until the channel's last message has left: as the other
            rank's receives are posted one ahead, that cannot deadlock.
    """

    def __init__(
        self,
        program: RankProgram,
        boundaries: Mapping[int, StageBoundary],
        keys: Sequence[InputKey],
    ) -> None:
        self._boundaries, self.keys = boundaries, keys
        self._left = {channel: deque(numbers) for channel, numbers in program.receives.items()}
        self._posted: dict[tuple[Kind, int, int], Callable[[], BoundaryArrays]] = {}
        self.waits = all(end.is_agreed(key) for end in boundaries.values() for key in keys)
        for kind, stage in self._left:
            self._post_ahead(kind, stage)

    def post(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Post this receive unless it is posted ahead, then the channel's next one.

        Nothing is posted for the first microbatch of a shape, whose message brings the signature
        that later receives need, nor for those behind it: they are received where they are used, so
        that a pass waits for messages there alone, which is the order that `check` proves.
        """
        if microbatch in self._left[kind, stage]:
            self._post_ahead(kind, stage)
        if microbatch not in self._left[kind, stage]:
            self._post_ahead(kind, stage)

    def take(self, kind: Kind, stage: int, microbatch: int) -> BoundaryArrays:
        """Wait for a message; return its arrays."""
        if (kind, stage, microbatch) not in self._posted:
            self._post_next(kind, stage)
        return self._posted.pop((kind, stage, microbatch))()

    def _post_ahead(self, kind: Kind, stage: int) -> None:
        """Post a channel's next receive, if its signature is agreed."""
        left = self._left[kind, stage]
        if left and self._boundary(kind, stage).is_agreed(self.keys[left[0]]):
            self._post_next(kind, stage)

    def _post_next(self, kind: Kind, stage: int) -> None:
        microbatch = self._left[kind, stage].popleft()
        self._posted[kind, stage, microbatch] = self._boundary(kind, stage).expect(
            self.keys[microbatch], back=kind is not Kind.RECV_ACT
        )

    def _boundary(self, kind: Kind, stage: int) -> StageBoundary:
        return self._boundaries[stage - 1 if kind is Kind.RECV_ACT else stage]


_Op: TypeAlias = Any  # an Instruction; those that compute or send have a number as microbatch
_Call: TypeAlias = Callable[["Pass", _Op], None]


class Pass:
    """One batch through this rank's stages: forward, and backward if it trains.

    It lives for one batch. A subclass says how a microbatch is computed, and what becomes of its
    gradients; by default nothing. A pass may be recorded, and a recording outlives it. So all work
    besides computation on arrays goes through `do`, which a recording repeats on a later pass.

    Args:
        executor: runs it.
        inputs: every microbatch's input, on all ranks (beyond the first stage only its shape is
            used).
        seeds: every microbatch's gradient of the last stage's scalar; empty for inference.
        length, size: see `Visit`.

    Attributes:
        meter: measures what microbatches cost, if there is one.
        costs: of the largest measured microbatch, by stage.
        report: times, messages and microbatches in memory.
        slow: minimum times and stragglers in training.
        poll: called before each backward pass on a rank that also serves others; None on other
            ranks.
        adds: see `Visit`.
    """

    slow: Slow = NOT_SLOW
    poll: Callable[[], None] | None = None
    adds = False

    def __init__(
        self,
        executor: Executor,
        inputs: Sequence[Array],
        seeds: Sequence[Array] = (),
        length: int = 0,
        size: int = 0,
    ) -> None:
        self.executor, self.inputs, self.length, self.size = executor, inputs, length, size
        self._seeds = seeds
        self.meter: Meter | None = None
        self.costs = dict[int, StageCost]()
        self.report = PassReport(len(inputs))
        # By (stage that uses them, microbatch). If another rank has the stage, they wait to be
        # sent.
        self._values: dict[tuple[int, int], BoundaryArrays] = {}
        self._grads: dict[tuple[int, int], Sequence[Array]] = {}
        self._flights: dict[tuple[int, int], Flight] = {}
        self._timeline = timeline.current()

    # ---- for subclasses ----

    def mode(self, microbatch: int, recomputing: bool) -> AbstractContextManager[Any]:
        """Return the mode for a forward; `recomputing` for a recomputation."""
        raise NotImplementedError

    def head(self, microbatch: int, result: Tensor) -> Tensor:
        """Return the last stage's output for the model's result: the scalar to differentiate.

        Args:
            result: as the last layer returns it; see `Executor.whole`.
        """
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

    # ---- the walk ----

    def do(self, method: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Call a method of the pass; a recording calls it on the pass that is replayed.

        Args:
            how: as for `recording.call`.
        """
        return method(self, *args) if active() is None else call(self.late(method), args, **how)

    def late(self, method: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        """Return the call that `do` makes, for others to make it."""
        replay = self.executor.replay
        # a recording that kept this pass would send its messages and read its labels for ever
        if active() is None or replay is None:
            return partial(method, self, *args)
        return partial(replay.on_pass, method, *args)

    def run(self, kind: tuple[Any, ...] = (), refusal: str = "") -> PassReport:
        """Do the pass by this rank's program. Collective.

        Args:
            kind, refusal: see `Replay.takes`.
        """
        executor, replay, begin = self.executor, self.executor.replay, clock.now()
        executor.passes += 1
        self._program = executor.program(len(self.inputs), bool(self._seeds))
        self._paced = self._program.trains and bool(self.slow)
        # a trace may begin or end between two passes, and what it notes is a part of a recording
        self._watched = self._paced or executor.messages is not None or self._timeline is not None
        try:
            with executor.gathering() if executor.zero > 1 else nullcontext():
                if executor.boundaries:
                    keys = [(tuple(x.shape), self._program.trains) for x in self.inputs]
                    self._inbox = Inbox(self._program, executor.boundaries, keys)
                key = (self._paced, self._watched, *kind)
                if replay is None or not replay.takes(key, self, refusal):
                    self.walk()
                    if replay is not None:
                        replay.inspect()
                if executor.boundaries:
                    self._drain()
        except BaseException:
            for held in (self._values, self._grads, self._flights):
                held.clear()
            self.abort()
            raise
        self.report.total_s = clock.now() - begin
        return self.report

    def walk(self) -> None:
        """Carry out the instructions in their order."""
        made, key = self.executor.calls, (self._watched, self._paced)
        calls = made.get(key) or made.setdefault(key, _calls(self))
        for item in self._program.items:
            for op in item:
                for act in calls[op.kind]:
                    act(self, op)
            if self.executor.messages is not None:
                self.do(Pass._progress)

    def _progress(self) -> None:
        # A second thread that calls MPI instead was slower: 0.65 ms against 0.47.
        assert self.executor.messages is not None
        self.executor.messages.progress()
        self.progress()

    def _begin(self, op: _Op) -> None:
        self._began, self._paused_s = clock.now(), 0.0
        self._collective_s = self.executor.world.collective_s
        self._share = WEIGHTS.get(op.kind, 0.0) / (self._program.weight or 1.0)

    def pace_instruction(self, part: float = 1.0) -> None:
        """Wait until the current instruction has lasted for this part of its slowed-down time."""
        met_s = self.executor.world.collective_s - self._collective_s
        computed_s = clock.now() - self._began - self._paused_s - met_s
        self._paused_s += self.pace(computed_s, self._share * part, self._paused_s)

    def _end(self, op: _Op) -> None:
        # the peak is after a forward: backwards only free memory. A replay has no flights to count.
        self.do(Pass._note, op, len(self._flights) if op.kind is Kind.F else 0)

    def _note(self, instruction: Instruction, live: int) -> None:
        """Note the time and memory of an instruction."""
        kind, report, begin, end = instruction.kind, self.report, self._began, clock.now()
        if kind in COMPUTE:
            report.samples.append((instruction, end - begin))
            report.compute_s += end - begin
            report.peak_live = max(report.peak_live, live)
        is_shown = kind in _STYLES and kind not in RECEIVES
        # a collective shows itself
        if is_shown and not (self.executor.zero > 1 and kind is Kind.REDUCE):
            self._show(instruction, begin, end)

    def _show(self, instruction: Instruction, begin_s: float, end_s: float) -> None:
        if self._timeline is not None:
            category, track = _STYLES[instruction.kind]
            sends, takes = self._arrow(instruction)
            self._timeline.add(
                str(instruction), category, track, begin_s, end_s, None, sends, takes
            )

    # ---- memory ----

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure what microbatches cost, if the pass runs in the block."""
        before = self.meter
        with self.executor.backend.meter() if before is None else nullcontext(before) as self.meter:
            yield
        self.meter, self.executor.costs = before, self.costs

    @contextmanager
    def fitting(self, limit: ActivationLimit) -> Iterator[None]:
        """Fit segments into a limit by the pass in the block, if it is the largest so far."""
        executor = self.executor
        if self.size <= limit.size:
            yield
            return
        # Until their costs are known all are recomputed. The costs are measured, since a pass took
        # up to 2.7 times what its operations save.
        executor.save_memory(executor.stages)
        with self.measuring():
            yield
        executor.save_memory(*limit.fit(self.costs, self.peak_of, len(self.inputs), self.size))

    def peak_bytes(self) -> int:
        """Return the peak bytes of activations of the pass, which was measured."""
        executor = self.executor
        if not self.inputs:
            return 0
        return int(self.peak_of(self.costs, executor.recomputed, executor.moved))

    def peak_of(
        self,
        costs: Mapping[int, StageCost],
        recomputed: Collection[int],
        moved: Collection[int] = (),
    ) -> float:
        """Return the peak bytes of a pass like this one; see `peak_of_stages`."""
        return peak_of_stages(costs, self._program.schedule, self.executor.rank, recomputed, moved)

    # ---- weights and gradients that replicas share out ----

    def _gather(self, op: _Op) -> None:
        self.executor.storage.start(COMMON)
        self.executor.storage.start(self.executor.unit_of[op.stage])

    def _wait_for_weights(self, op: _Op) -> None:
        self.executor.storage.acquire(COMMON)
        self.executor.storage.acquire(self.executor.unit_of[op.stage])

    def _free(self, op: _Op) -> None:
        self.executor.storage.release(self.executor.unit_of[op.stage])

    def _reduce(self, op: _Op) -> None:
        if self.executor.zero > 1:
            self.executor.storage.reduce(self.executor.unit_of[op.stage])
        else:
            self.reduce(op.stage, op.microbatch)

    # ---- computing ----

    def visit(self, microbatch: int) -> Visit:
        """Return how stages compute a microbatch."""
        mode, end = partial(self.mode, microbatch), partial(self.head, microbatch)
        return Visit(mode, end, self.length, self.size, self.adds)

    def outputs(self, microbatch: int) -> Sequence[Tensor]:
        """Return the outputs of all stages for a microbatch in flight, if they are in memory."""
        return [
            output
            for (_, number), flight in self._flights.items()
            for output in flight.outputs
            if number == microbatch
        ]

    def _forward(self, op: _Op) -> None:
        stage, microbatch = op.stage, op.microbatch
        if stage:
            values = self._values.pop((stage, microbatch))
        else:
            data = self.do(Pass._input, microbatch, when="before")
            values = BoundaryArrays((data,), (False,))
        flight = Flight(self.executor.stages[stage], self.visit(microbatch), self.meter)
        outputs = flight.forward(values)
        if self._program.trains:
            self._flights[stage, microbatch] = flight
        if stage < self.executor.count - 1:
            self._values[stage + 1, microbatch] = outputs

    def _input(self, microbatch: int) -> Array:
        return self.inputs[microbatch]

    def _seed(self, microbatch: int) -> Array:
        return self._seeds[microbatch]

    def _backward(self, op: _Op) -> None:
        stage, microbatch, halves = op.stage, op.microbatch, op.kind is Kind.I
        if stage == self.executor.count - 1:
            if self.poll is not None:
                call(self.poll)
            self.do(type(self).begin_backward, microbatch, writes=())
            grads: Sequence[Array] = [self.do(Pass._seed, microbatch, when="before")]
        else:
            grads = self._grads.pop((stage, microbatch))
        grads_back = self._flights[stage, microbatch].backward(grads, halves)
        if not halves:
            self._land(op)
        if stage:
            self._grads[stage - 1, microbatch] = grads_back

    def _land(self, op: _Op) -> None:
        """End a microbatch's flight, after a second half if its backward is halved."""
        flight = self._flights.pop((op.stage, op.microbatch))
        flight.finish()
        if self.meter is not None:
            most = self.costs.get(op.stage, flight.cost)
            self.costs[op.stage] = StageCost(*map(max, most, flight.cost))

    def _send_out(self, op: _Op) -> None:
        executor = self.executor
        assert executor.store is not None
        self._flights[op.stage, op.microbatch].send_out(executor.store, executor.backend)

    # ---- messages ----

    def _drain(self) -> None:
        """Wait until all messages have left."""
        executor, waited = self.executor, clock.now()
        assert executor.messages is not None
        executor.messages.drain()
        for boundary in executor.boundaries.values():
            boundary.drop_sent()
        if self._timeline is not None:
            self._timeline.add("last sends", "waiting", timeline.WAITING, waited, clock.now())

    def _send(self, op: _Op) -> None:
        if op.kind is Kind.SEND_ACT:
            values = self._values.pop((op.stage + 1, op.microbatch))
        else:
            values = BoundaryArrays(tuple(self._grads.pop((op.stage - 1, op.microbatch))), ())
        self.do(Pass._send_over, op, active() is not None, *values)

    def _send_over(self, op: _Op, copy: bool, *values: Any) -> None:
        """Send arrays over a boundary.

        Args:
            copy: send copies, since a replay reuses the arrays' memory while the message travels.
        """
        outgoing, is_forward = BoundaryArrays(*values), op.kind is Kind.SEND_ACT
        end, inbox = self.executor.boundaries[op.stage - (not is_forward)], self._inbox
        if copy:
            outgoing = outgoing._replace(
                arrays=tuple(item.copy(order="K") for item in outgoing.arrays)
            )
        if is_forward:
            sent = end.send(inbox.keys[op.microbatch], outgoing, inbox.waits)
        else:
            sent = end.send_back(outgoing.arrays, inbox.waits)
        self.report.sent.append((op, [array.nbytes for array in sent]))

    def _receive(self, op: _Op) -> None:
        self._inbox.post(op.kind, op.stage, op.microbatch)

    def _take(self, op: _Op) -> None:
        """Wait for the arrays that an instruction uses, if another rank's stage sends them."""
        kind, where = USES[op.kind], (op.stage, op.microbatch)
        if (kind, op.stage) not in self._program.receives:
            return
        self.do(Pass._wait, kind.at(*where))
        arrays = tuple(
            self.do(Pass._arrived, i, when="before") for i in range(len(self._received.arrays))
        )
        if kind is Kind.RECV_ACT:
            self._values[where] = self._received._replace(arrays=arrays)
        else:
            self._grads[where] = arrays

    def _arrived(self, number: int) -> Array:
        return self._received.arrays[number]

    def _wait(self, op: _Op) -> None:
        begin = clock.now()
        self._received = self._inbox.take(op.kind, op.stage, op.microbatch)
        end = clock.now()
        self.report.wait_s += end - begin
        self._show(op, begin, end)

    def _arrow(self, instruction: Instruction) -> tuple[str, str]:
        """Return the trace's names of the messages that an instruction sends and receives."""
        is_send = instruction.kind in SENDS
        is_gradient = instruction.kind in (Kind.SEND_GRAD, Kind.RECV_GRAD)
        if not is_send and instruction.kind not in RECEIVES:
            return "", ""
        boundary = instruction.stage - (1 if is_gradient == is_send else 0)
        kind, executor = "grad" if is_gradient else "act", self.executor
        name = f"{executor.label}/{executor.passes}/{boundary}/{kind}/{instruction.microbatch}"
        return (name, "") if is_send else ("", name)


def _recorded(method: Callable[..., None]) -> _Call:
    """Return the call that is one call of a recording."""
    return lambda now, op: now.do(method, op)


def _end_backward(now: Pass, op: _Op) -> None:
    if not op.stage:  # by the first stage a microbatch is through
        now.do(type(now).end_backward, op.microbatch)


_ACTIONS: dict[Kind, _Call] = {
    Kind.F: Pass._forward,
    **dict.fromkeys((Kind.B, Kind.I), Pass._backward),
    Kind.W: Pass._land,
    **dict.fromkeys(SENDS, Pass._send),
    **dict.fromkeys(RECEIVES, _recorded(Pass._receive)),
    Kind.OUT: Pass._send_out,
    Kind.DROP: lambda now, op: now._flights[op.stage, op.microbatch].drop(),
    Kind.IN: lambda now, op: now._flights[op.stage, op.microbatch].bring_in(),
    Kind.GATHER: _recorded(Pass._gather),
    Kind.FREE: _recorded(Pass._free),
    Kind.REDUCE: _recorded(Pass._reduce),
    Kind.STEP: lambda now, op: now.do(type(now).step, op.stage, op.microbatch),
}


# The way of an instruction: what is done, for which kinds, in which passes. A pass has one more
# observer by one more row. Messages are waited for before an instruction's time begins, and end a
# microbatch after it.
_WAY: tuple[tuple[Callable[[Pass], object], Container[Kind], _Call | None], ...] = (
    (lambda now: now.executor.boundaries, USES, Pass._take),
    (lambda now: now.executor.zero > 2, COMPUTE, _recorded(Pass._wait_for_weights)),
    (lambda now: now._watched, _ACTIONS, _recorded(Pass._begin)),
    (lambda now: True, _ACTIONS, None),  # its action
    (lambda now: now._paced, WEIGHTS, lambda now, op: now.do(Pass.pace_instruction)),
    (lambda now: now._watched, _ACTIONS, Pass._end),
    (lambda now: True, (Kind.B, Kind.I), _end_backward),
)


def _calls(now: Pass) -> dict[Kind, list[_Call]]:
    """Return what passes like this one do at each kind of instruction.

    The executor keeps it: to make it for each pass took 20 to 30 us.
    """
    rows = [(kinds, call) for holds, kinds, call in _WAY if holds(now)]
    return {
        kind: [call or action for kinds, call in rows if kind in kinds]
        for kind, action in _ACTIONS.items()
    }


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
