"""Pipeline parallelism: a chain of stages on the ranks of a group, fed microbatch after microbatch.

    rank 0   F0 F1 F2 .  .  .  .  B0--- F3 B1--- ...       what is done when is the schedule's business (see
    rank 1   .  F0 F1 .  .  B0--- F2 B1--- F3 ...          `schedule`; this is 1F1B). This module carries out its
    rank 2   .  .  F0 B0--- F1 B1--- F2 B2--- F3 ...       instructions, one after the other

Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream", 2019, and "Efficient large-scale language model training on
GPU clusters using Megatron-LM", 2021. Receives are posted one ahead, sends are on their way while the rank computes,
and every microbatch has buffers of its own.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from nnmpi import clock, timeline
from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import Messages
from nnmpi.parallel.pipeline.boundary import BoundaryArrays, InputKey, StageBoundary
from nnmpi.parallel.pipeline.pass_report import PassReport
from nnmpi.parallel.pipeline.stage import Stage
from nnmpi.schedule.check import check
from nnmpi.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind, parts
from nnmpi.schedule.lower import lower
from nnmpi.schedule.registry import Generator, make
from nnmpi.schedule.schedule import Schedule

INFERENCE = "inference"


@lru_cache(maxsize=64)  # all simulated ranks, and all replicas there, have the same one
def _executable(name: Generator, ranks: int, microbatches: int, virtual: int) -> Schedule:
    schedule = lower(make(name, ranks, microbatches, virtual))
    check(schedule)
    return schedule


class GradientSink:
    """What becomes of the parameters' gradients: so a pipeline need not know data parallelism. Here nothing."""

    def reduce(self, stage: int, microbatch: int | None) -> None:
        """The gradients of a stage are final: begin their sum over the replicas, but do not wait for it.

        Where the schedule updates after every microbatch they are those of this microbatch, else of all.
        """

    def progress(self) -> None:
        """Let sums that are under way move on; called after every item of the program."""

    def step(self, stage: int, microbatch: int | None) -> None:
        """Update a stage's parameters; called only where the schedule updates after every microbatch."""


class Pipeline:
    """This rank's stages of a pipeline. Making one is collective over the group.

    Args:
        group: the ranks of the pipeline; stage s is on rank s % size.
        stages: this rank's, by number.
        count: the number of stages altogether.
        schedule: one of `schedule.registry.SCHEDULES`, for training, or one's own.
        sink: takes the gradients.
        backend: where the arrays live.
        synchronous_sends: let no message leave before its receive is posted (for tests; see `comm.point_to_point`).
        label: tells this pipeline from its replicas in a trace.

    Attributes:
        messages: between the ranks.
    """

    def __init__(
        self,
        group: Group,
        stages: Mapping[int, Stage],
        count: int,
        schedule: Generator,
        sink: GradientSink,
        backend: Backend,
        synchronous_sends: bool = False,
        label: str = "",
    ) -> None:
        self.group, self.stages, self.count, self.schedule = group, dict(stages), count, schedule
        self.sink, self.backend, self.label = sink, backend, label
        self.messages = Messages(group, synchronous_sends)
        self._passes = 0
        boundaries = (
            {s for stage in stages for s in (stage - 1, stage) if 0 <= s < count - 1} if group.size > 1 else set()
        )
        self._boundaries = {s: StageBoundary(self.messages, self._peer(s), s, backend) for s in sorted(boundaries)}

    def plan(self, microbatches: int, name: str | None = None) -> Schedule:
        """Return the schedule for so many microbatches, with transfers, after it has been checked.

        Raises:
            UsageError, ScheduleError: when the schedule cannot have so many, or is wrong.
        """
        return _executable(name or self.schedule, self.group.size, microbatches, self.count // self.group.size)

    def train(self, inputs: Sequence[Array], seeds: Sequence[Array]) -> PassReport:
        """Take microbatches forward and backward, as the schedule says; collective.

        Args:
            inputs: every microbatch's input, on all ranks (only its shape matters beyond the first stage).
            seeds: every microbatch's gradient of the last stage's scalar.
        """
        return self._run(self.plan(len(inputs)), inputs, seeds)

    def infer(self, inputs: Sequence[Array]) -> PassReport:
        """Take microbatches forward only; collective. The last stage's head sees the results."""
        return self._run(self.plan(len(inputs), INFERENCE), inputs, ())

    def free(self) -> None:
        """Give the communicator back to MPI. Collective."""
        self.messages.free()

    def _peer(self, boundary: int) -> int:
        """Return the rank at the other end of the boundary after a stage."""
        before, after = boundary % self.group.size, (boundary + 1) % self.group.size
        return after if before == self.group.rank else before

    def _run(self, schedule: Schedule, inputs: Sequence[Array], seeds: Sequence[Array]) -> PassReport:
        self._passes += 1
        try:
            return _Pass(self, schedule, inputs, seeds, self._boundaries, f"{self.label}/{self._passes}").run()
        except BaseException:
            for stage in self.stages.values():
                stage.clear()
            raise


class _Pass:
    """One pass through the pipeline: the values between its instructions, and what each instruction does."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        inputs: Sequence[Array],
        seeds: Sequence[Array],
        boundaries: Mapping[int, StageBoundary],
        label: str,
    ) -> None:
        self._stages, self._last, self._sink = pipeline.stages, pipeline.count - 1, pipeline.sink
        self._schedule, self._boundaries, self._messages, self._label = schedule, boundaries, pipeline.messages, label
        self._program = schedule.programs[pipeline.group.rank]
        self._trains = schedule.trains
        self._keys: list[InputKey] = [(tuple(x.shape), self._trains) for x in inputs]
        self._seeds = seeds
        self._values = (
            {(0, m): BoundaryArrays((x,), (False,)) for m, x in enumerate(inputs)} if 0 in self._stages else {}
        )
        self._results: dict[tuple[int, int], BoundaryArrays] = {}
        self._grads: dict[tuple[int, int], list[Array]] = {}
        self._input_grads: dict[tuple[int, int], list[Array]] = {}
        self._coming: dict[tuple[Kind, int], deque[int]] = {}
        self._posted: dict[tuple[Kind, int, int], Callable[[], Any]] = {}
        # Where a message's receive is posted ahead, the one before it has left or can leave when it is sent.
        self._waits = all(end.is_agreed(key) for end in boundaries.values() for key in self._keys)
        self._report = PassReport(len(inputs))
        self._timeline = timeline.current()
        self._actions: dict[Kind, Callable[[int, Any], None]] = {
            Kind.F: self._forward,
            Kind.B: partial(self._go_back, halves=False),
            Kind.I: partial(self._go_back, halves=True),
            Kind.W: self._weight_half,
            Kind.SEND_ACT: self._send_activation,
            Kind.RECV_ACT: partial(self._receive, Kind.RECV_ACT),
            Kind.SEND_GRAD: self._send_gradient,
            Kind.RECV_GRAD: partial(self._receive, Kind.RECV_GRAD),
            Kind.REDUCE: self._sink.reduce,
            Kind.STEP: self._step,
        }

    def run(self) -> PassReport:
        """Carry out this rank's program."""
        begin = clock.now()
        for item in self._program:
            for one in parts(item):
                if one.kind in (Kind.RECV_ACT, Kind.RECV_GRAD) and one.microbatch is not None:
                    self._coming.setdefault((one.kind, one.stage), deque()).append(one.microbatch)
        # Post one receive for each kind and stage ahead of its use, so that its message can travel during computation.
        # Not all: each has a buffer of its own. A channel's receives are posted in the program's order, only earlier,
        # and that is the order of its sends: so MPI pairs them as before.
        for kind, stage in self._coming:
            self._post_next(kind, stage)
        for item in self._program:
            for one in parts(item):
                self._do(one)
            self._messages.progress()
            self._sink.progress()
        waited = clock.now()
        self._messages.drain()
        for boundary in self._boundaries.values():
            boundary.let_go()
        end = clock.now()
        if self._timeline is not None:
            self._timeline.add("last sends", "waiting", timeline.WAITING, waited, end)
        self._report.transfer_s += end - waited
        self._report.total_s = end - begin
        return self._report

    def _do(self, one: Instruction) -> None:
        """Carry out one instruction, and wait here for what it works on.

        The instruction that receives it may stand long before this one, so that the message travels meanwhile.
        """
        if one.kind in _USES and one.microbatch is not None:
            self._arrive(_USES[one.kind], one.stage, one.microbatch)
        begin = clock.now()
        self._actions[one.kind](one.stage, one.microbatch)
        end = clock.now()
        report = self._report
        if one.kind in COMPUTE:
            report.samples.append((one, end - begin))
            report.compute_s += end - begin
            report.peak_live = max(report.peak_live, sum(stage.live for stage in self._stages.values()))
        elif one.kind in SENDS:
            report.transfer_s += end - begin
        if one.kind not in RECEIVES and (one.kind is not Kind.STEP or one.microbatch is not None):
            self._show(one, begin, end)

    def _show(self, one: Instruction, begin_s: float, end_s: float) -> None:
        if self._timeline is not None:
            category, track = _LOOKS[one.kind]
            sends, takes = self._arrow(one)
            self._timeline.add(str(one), category, track, begin_s, end_s, None, sends, takes)

    # ---- computing ----

    def _forward(self, stage: int, microbatch: int) -> None:
        values = self._values.pop((stage, microbatch))
        result = self._stages[stage].forward(microbatch, values, keep=self._trains)
        if stage == self._last:
            return
        if self._schedule.is_cut(stage):
            self._results[stage, microbatch] = result
        else:
            self._values[stage + 1, microbatch] = result

    def _weight_half(self, stage: int, microbatch: int) -> None:
        self._stages[stage].finish(microbatch)

    def _go_back(self, stage: int, microbatch: int, halves: bool) -> None:
        grads = [self._seeds[microbatch]] if stage == self._last else self._grads.pop((stage, microbatch))
        result = self._stages[stage].backward(microbatch, grads, halves)
        if stage == 0:
            return
        if self._schedule.is_cut(stage - 1):
            self._input_grads[stage, microbatch] = result
        else:
            self._grads[stage - 1, microbatch] = result

    def _step(self, stage: int, microbatch: int | None) -> None:
        if microbatch is not None:  # one update of everything is done by whoever called, after the pass
            self._sink.step(stage, microbatch)

    # ---- messages ----

    def _send_activation(self, stage: int, microbatch: int) -> None:
        values = self._results.pop((stage, microbatch))
        self._note_sent(self._boundaries[stage].send(self._keys[microbatch], values, self._waits))

    def _send_gradient(self, stage: int, microbatch: int) -> None:
        grads = self._input_grads.pop((stage, microbatch))
        self._note_sent(self._boundaries[stage - 1].send_back(grads, self._waits))

    def _note_sent(self, sent: Sequence[Array]) -> None:
        report, nbytes = self._report, sum(array.nbytes for array in sent)
        report.sent_bytes, report.messages = report.sent_bytes + nbytes, report.messages + len(sent)

    def _receive(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Make sure that this receive is posted, and the next one between the two stages.

        For the first microbatch of some shape it waits: the message must tell what the next ones look like.
        """
        if (kind, stage, microbatch) not in self._posted:
            self._coming[kind, stage].popleft()
            known = self._boundary(kind, stage).is_agreed(self._keys[microbatch])
            self._posted[kind, stage, microbatch] = self._expect(kind, stage, microbatch)
            if not known:
                self._arrive(kind, stage, microbatch)
        self._post_next(kind, stage)

    def _arrive(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Wait for what a receive brings, unless it was waited for before."""
        wait = self._posted.pop((kind, stage, microbatch), None)
        if wait is None:
            return
        begin = clock.now()
        result = wait()
        end = clock.now()
        self._report.wait_s += end - begin
        self._show(kind.at(stage, microbatch), begin, end)
        if kind is Kind.RECV_ACT:
            self._values[stage, microbatch] = result
        else:
            self._grads[stage, microbatch] = result

    def _post_next(self, kind: Kind, stage: int) -> None:
        """Post the next receive that a stage has of this kind, if it is known what will come."""
        coming = self._coming[kind, stage]
        if coming and self._boundary(kind, stage).is_agreed(self._keys[coming[0]]):
            microbatch = coming.popleft()
            self._posted[kind, stage, microbatch] = self._expect(kind, stage, microbatch)

    def _boundary(self, kind: Kind, stage: int) -> StageBoundary:
        """Return this end of the boundary that a stage receives through."""
        return self._boundaries[stage - 1 if kind is Kind.RECV_ACT else stage]

    def _expect(self, kind: Kind, stage: int, microbatch: int) -> Callable[[], Any]:
        boundary, key = self._boundary(kind, stage), self._keys[microbatch]
        return boundary.expect(key) if kind is Kind.RECV_ACT else boundary.expect_back(key)

    def _arrow(self, one: Instruction) -> tuple[str, str]:
        """Return the names of the messages that an instruction sends and takes, for the trace."""
        if one.kind not in _ENDS:
            return "", ""
        is_send, is_gradient = _ENDS[one.kind]
        boundary = one.stage - (1 if is_gradient == is_send else 0)
        name = f"{self._label}/{boundary}/{'grad' if is_gradient else 'act'}/{one.microbatch}"
        return (name, "") if is_send else ("", name)


_USES = {Kind.F: Kind.RECV_ACT, Kind.B: Kind.RECV_GRAD, Kind.I: Kind.RECV_GRAD}
_ENDS = {
    Kind.SEND_ACT: (True, False),
    Kind.RECV_ACT: (False, False),
    Kind.SEND_GRAD: (True, True),
    Kind.RECV_GRAD: (False, True),
}
_LOOKS = {
    Kind.F: ("forward", timeline.COMPUTE),
    Kind.B: ("backward", timeline.COMPUTE),
    Kind.I: ("backward", timeline.COMPUTE),
    Kind.W: ("backward", timeline.COMPUTE),
    Kind.SEND_ACT: ("activation", timeline.SEND),
    Kind.RECV_ACT: ("activation", timeline.RECEIVE),
    Kind.SEND_GRAD: ("gradient", timeline.SEND),
    Kind.RECV_GRAD: ("gradient", timeline.RECEIVE),
    Kind.REDUCE: ("reduce", timeline.REDUCE),
    Kind.STEP: ("update", timeline.COMPUTE),
}
