"""The runner of a pipeline: microbatches through this rank's stages, and what becomes of the parameters' gradients.

    the last backward of stage s       --> reduce(s)         its sum over the replicas begins, beside the rest
    all done                           --> finish            wait for the sums; add up tied parameters over stages

PipeDream (Narayanan et al., 2019) updates after every microbatch instead, without a flush. Each backward then uses the
weights that its forward used: an update goes into a new copy of the stage's weights, and the graphs of microbatches on
their way keep the old ones until they have gone back (weight stashing).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.memory_pool import MemoryPool
from nnmpi.backend.recording import active, perform
from nnmpi.comm.gradients import Traffic
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.options import GradientExchange
from nnmpi.compose.replayed import ReplayedParts
from nnmpi.compose.replica_runner import data_parallel
from nnmpi.compose.runner import (
    LOSS,
    SCORE,
    DeferredScalars,
    DeviceBatch,
    Outcome,
    SumLoss,
    Values,
    check_cuts,
    label_check,
    score_of,
    summed,
    to_device,
)
from nnmpi.compose.trainer import Trainer
from nnmpi.data.loader import Batch
from nnmpi.nn.mode import current, evaluation, training
from nnmpi.nn.module import Module
from nnmpi.parallel.divergence import explain_gradients
from nnmpi.parallel.pipeline.executor import GradientSink, Pipeline
from nnmpi.parallel.pipeline.pass_report import PassReport
from nnmpi.parallel.pipeline.stage import Stage
from nnmpi.schedule.instruction import Instruction
from nnmpi.schedule.schedule import Schedule
from nnmpi.schedule.simulate import InstructionCosts, simulate_schedule
from nnmpi.shard import split
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor

PASSES_KEPT = 20  # so many are enough for a mean, and old ones may be of another load of the machine


class PipelineRunner(GradientSink):
    """Runs this rank's stages, in the order of a schedule; what they compute is replayed where that is safe.

    Args:
        trainer: whose model it is; its optimizer is used here only where every microbatch is an update.
        arrangement: the trainer's, with stages.
        exchange: how gradients are summed over the replicas.
        synchronous_sends: see `comm.point_to_point.Messages`.
    """

    def __init__(
        self, trainer: Trainer, arrangement: Arrangement, exchange: GradientExchange, synchronous_sends: bool
    ) -> None:
        self.arrangement, self.optimizer, self.seed = arrangement, trainer.optimizer, trainer.seed
        self.backend = backend = trainer.backend
        layout, mesh = arrangement.layout, arrangement.mesh
        self.model: Module = arrangement.model
        self.updates = layout.asynchronous
        self.parallel = data_parallel(trainer, exchange, is_summed=True, runs_backward=False)
        count = len(arrangement.cuts)
        self._last = count - 1
        self._numbers = _numbers(arrangement)
        self._waiting = self._holders()
        self._losses = (trainer.loss, trainer.evaluation_loss)
        self._training = ReplayedParts(self._train, self.model, trainer.loss)
        # An update within a pass gives the weights another place. Else it is as with `ForwardBackward`.
        can = not self.updates and layout.zero < 2 and layout.offload is None
        self._can_replay = can and not backend.is_device
        self._report: PassReport | None = None
        self._most_rows = 0
        self._score = score_of(trainer.loss, arrangement)
        self.scalars, self._check = DeferredScalars(), label_check(trainer.loss, arrangement.classes)
        self._batch: _Running | None = None
        self._is_released = False
        self._traffic = Traffic()  # of the updates within a pass
        self._passes: deque[PassReport] = deque(maxlen=PASSES_KEPT)
        self._most = 0  # microbatches in a pass
        self._staleness: list[int] = []  # in the last pass
        stages = {
            number: Stage(
                number,
                layers,
                arrangement.starts[number],
                self._scope,
                self._head if number == self._last else None,
                layout.recomputes,
                None if arrangement.sequence is None else self._shared_sequences,
                self._training.part,
            )
            for number, layers in arrangement.stages.items()
        }
        place = mesh.place
        lane = f"d{place.d}t{place.t}" + (f"s{place.s}" if mesh.sp.size > 1 else "")
        self.pipeline = Pipeline(mesh.pp, stages, count, layout.schedule, self, backend, synchronous_sends, lane)

    @property
    def _counts(self) -> bool:
        """Whether this rank's losses count: it has the last stage, and of those that share it, it is the first."""
        return self._last in self.arrangement.stages and self.arrangement.mesh.place.t == 0

    # ---- what a Worker calls ----

    def run(self, batch: Batch, step: int, scale: float, replays: bool = False) -> Outcome:
        """See `Runner.run`."""
        check_cuts(batch, False)
        device_batch = to_device(batch, self.model, self.backend)
        self.scalars.clear()
        running = self._batch = _Running(batch, device_batch, step, self._losses[0], self.scalars, scale=scale)
        self._waiting = self._holders()
        self._traffic = Traffic()
        self._report = None
        if batch.cuts:
            # Half a backward is done by what the graph knows. A short last batch would take memory of its own.
            can = not self.pipeline.plan(len(batch.cuts)).has_halves and len(batch.y) >= self._most_rows
            self._most_rows = max(self._most_rows, len(batch.y))
            self._training.go((), running.kinds(), replays and self._can_replay and can)
        report = self._report
        traffic = self._traffic if self.updates else self._finish()
        self._keep(report, running.staleness)
        targets = batch.own_targets if self._counts else 0
        return Outcome(partial(self._sums, batch), targets, traffic, report, tuple(running.staleness))

    @property
    def replays(self) -> int:
        """How many passes were replayed so far."""
        return self._training.replays

    @property
    def pool(self) -> MemoryPool:
        """The memory of recorded passes."""
        return self._training.pool

    @property
    def held_bytes(self) -> int:
        """What recorded passes keep of memory between two steps."""
        return self.pool.size_bytes

    def _train(self, *_kinds: object) -> None:
        """Take the batch through the pipeline and back. A replay does the same, but for what the stages compute."""
        running = self._batch
        assert running is not None
        self._report = self.pipeline.train(running.inputs, self._seeds(running))

    def _sums(self, batch: Batch, values: Values) -> tuple[float, float]:
        """See `Outcome.sums`."""
        cuts = batch.cuts if self._counts else ()
        return sum(values[LOSS, m] for m in range(len(cuts))), sum(values[SCORE, m] for m in range(len(cuts)))

    def evaluate(self, batch: Batch, scalars: DeferredScalars) -> bool:
        """See `Runner.evaluate`."""
        device_batch = to_device(batch, self.model, self.backend)
        parts = [(part.start, part.stop) for part in split(len(batch.y), max(1, min(len(batch.y), self._last + 1)))]
        self._batch = _Running(batch, device_batch, 0, self._losses[1], scalars, parts, trains=False)
        with no_grad():
            self.pipeline.infer(self._batch.inputs)
        return self._counts

    def explain(self, batch: Batch, step: int, value: float) -> Exception:
        """See `Runner.explain`."""
        world = self.arrangement.mesh.world
        return explain_gradients(world, self.model, step + 1, value, "microbatches and replicas")

    def _keep(self, report: PassReport | None, staleness: list[int]) -> None:
        """Keep a pass for `summary`, unless it is of fewer microbatches than others, as an epoch's short last batch."""
        if report is None or report.microbatches < self._most:
            return
        if report.microbatches > self._most:
            self._most = report.microbatches
            self._passes.clear()
        self._passes.append(report)
        self._staleness = staleness

    def summary(self) -> list[str]:
        """Say how the last passes went, measured beside simulated; see `Runner.summary`."""
        if not self._passes:
            return []
        group = self.pipeline.group
        found = forecast(group, self.pipeline.plan(self._most), list(self._passes))
        self._passes.clear()
        stages = ", ".join(f"{1e3 * seconds:.2f}" for seconds in found.stage_s)
        lines = [
            f"pipeline pass {1e3 * found.measured_s:.2f} ms, simulated {1e3 * found.simulated_s:.2f} ms; "
            f"bubble {found.measured_bubble:.0%}, simulated {found.simulated_bubble:.0%}; "
            f"ms per microbatch and stage: {stages}; activations kept: {', '.join(map(str, found.peak_live))}"
        ]
        if self.updates:  # only schedules that update during a pass, such as pipedream, have weights that are old
            stale = group.gather(max(self._staleness, default=0))
            lines.append(f"staleness by rank: at most {', '.join(map(str, stale))} updates")
        return lines

    def release(self) -> None:
        """See `Runner.release`."""
        if self._is_released:
            return
        self._is_released = True
        self.parallel.release()
        self.pipeline.free()

    # ---- what the stages call ----

    @contextmanager
    def _scope(self, microbatch: int, again: bool) -> Iterator[None]:
        running = self._batch
        assert running is not None
        with self._mode(running, microbatch, again):
            yield

    def _mode(self, running: _Running, microbatch: int, again: bool) -> AbstractContextManager[None]:
        if not running.trains:
            return evaluation()
        cut = running.batch.cuts[microbatch]
        if self.updates and not again:
            running.versions[microbatch] = self.optimizer.steps
        return training(self.seed, running.step + (microbatch if self.updates else 0), cut.first_row, again)

    def _shared_sequences(self, x: Tensor, enters: bool) -> Tensor:
        """Say of a tensor at a stage's beginning that it is of this rank's positions, and no more so at its end."""
        running, sequence = self._batch, self.arrangement.sequence
        assert running is not None and sequence is not None and running.device_batch.length is not None
        return (sequence.enter if enters else sequence.leave)(x, running.device_batch.length)

    def _head(self, result: Tensor, microbatch: int) -> Tensor:
        running = self._batch
        assert running is not None
        device_batch = running.part(microbatch)
        again = current().again
        if not again:
            self._check(device_batch, running.parts[microbatch][0], result)
        labels, recorder = device_batch.y, active()
        if recorder is not None:
            labels = recorder.copy(labels)
            recorder.note(self._put_labels, labels, microbatch)
        loss = summed(running.loss, result, labels)
        if not again:
            perform(self._note_numbers, microbatch, result.data, loss.data)
        return loss

    def _put_labels(self, place: Array, microbatch: int) -> None:
        assert self._batch is not None
        place[...] = self._batch.part(microbatch).y

    def _note_numbers(self, microbatch: int, result: Array, loss: Array) -> None:
        """Note a microbatch's loss and score."""
        running = self._batch
        assert running is not None
        score = self._score(Tensor(result), running.part(microbatch))
        if running.trains:
            running.scalars.put((LOSS, microbatch), loss)
            running.scalars.put((SCORE, microbatch), score)
        elif self._counts:
            running.scalars.add(LOSS, loss)
            running.scalars.add(SCORE, score)

    def _seeds(self, running: _Running) -> list[Array]:
        """Return the gradients of the microbatches' loss sums: scale / the targets that an update's mean is over.

        The division is that of `DataParallel.backward`; with pipedream an update is of one microbatch.
        """
        batch = running.batch
        counts = [batch.targets[cut.number] if self.updates else batch.global_targets for cut in batch.cuts]
        xp = self.backend.xp
        seeds = {count: xp.full((), running.scale / max(count, 1), "float64") for count in set(counts)}
        return [seeds[count] for count in counts]  # `backward` converts them to the loss's dtype

    # ---- what the pipeline calls: see parallel.pipeline.executor.GradientSink ----

    def reduce(self, stage: int, microbatch: int | None) -> None:
        """See `GradientSink.reduce`: only parameters whose last stage this is are final."""
        if microbatch is not None:
            return
        final = []
        for number in self._numbers[stage]:
            self._waiting[number].discard(stage)
            if not self._waiting[number]:
                final.append(number)
        self.parallel.reduce(sorted(final, reverse=True))

    def progress(self) -> None:
        """See `GradientSink.progress`."""
        self.parallel.exchange.progress()

    def step(self, stage: int, microbatch: int | None) -> None:
        """See `GradientSink.step`: sum over the replicas, and update a new copy of the weights."""
        running = self._batch
        assert running is not None and microbatch is not None
        self._traffic = self._traffic.plus(self._finish())
        storage = self.model.storage
        storage.move(data=[data.copy() for data in storage.data])
        for span in storage.spans:  # the move has forgotten the gradients, but they are still where they were
            span.parameter.grad = span.parameter.buffer
        running.staleness.append(self.optimizer.steps - running.versions.pop(microbatch))
        self.optimizer.step()
        storage.zero_grad()

    # ---- sums ----

    def _finish(self) -> Traffic:
        """End an update's sums; return what they were."""
        if self.arrangement.layout.zero:  # afterwards each rank would have the sum of another part
            self._add_ties()
            self.parallel.finish()
            return self.parallel.traffic
        self.parallel.finish()
        self._add_ties()
        return self.parallel.traffic

    def _add_ties(self) -> None:
        """Add up the gradients of parameters that stand in stages of several ranks."""
        own = {span.parameter.name: span.parameter for span in self.model.storage.spans}
        for tie in self.arrangement.ties:  # in the same order on all ranks of the pipeline
            own[tie.name].finish_gradient()
            grad = own[tie.name].grad
            assert grad is not None
            total: Array = namespace(grad).ascontiguousarray(grad)
            tie.group.all_reduce(total.reshape(-1), check=False)
            grad[...] = total

    def _holders(self) -> dict[int, set[int]]:
        """Return, for each parameter's number, the stages of this rank that have it."""
        holders: dict[int, set[int]] = {}
        for stage, numbers in self._numbers.items():
            for number in numbers:
                holders.setdefault(number, set()).add(stage)
        return holders


class _Running:
    """A batch on its way: its microbatches, and what came of them on this rank."""

    def __init__(
        self,
        batch: Batch,
        device_batch: DeviceBatch,
        step: int,
        loss: SumLoss,
        scalars: DeferredScalars,
        parts: Sequence[tuple[int, int]] | None = None,
        trains: bool = True,
        scale: float = 1.0,
    ) -> None:
        self.parts = [(cut.start, cut.stop) for cut in batch.cuts] if parts is None else parts
        self.batch, self.device_batch, self.step, self.loss, self.trains = batch, device_batch, step, loss, trains
        self.scalars, self.scale = scalars, scale
        self.inputs = [device_batch.x[start:stop] for start, stop in self.parts]
        self.versions: dict[int, int] = {}
        self.staleness: list[int] = []

    def part(self, microbatch: int) -> DeviceBatch:
        """Return the rows of a microbatch."""
        return self.device_batch.rows(slice(*self.parts[microbatch]))

    def kinds(self) -> tuple[Any, ...]:
        """Return what recordings of batches are told apart by."""
        whole, rows = self.device_batch, tuple(stop - start for start, stop in self.parts)
        return whole.length, whole.x.shape[1:], whole.x.dtype, whole.y.shape[1:], whole.y.dtype, rows


def _numbers(arrangement: Arrangement) -> dict[int, list[int]]:
    """Return, for each stage of this rank, the numbers of its parameters in the storage."""
    number_of = {id(span.parameter): i for i, span in enumerate(arrangement.model.storage.spans)}
    return {
        stage: sorted(
            {number_of[id(p)] for layer in layers for _, module in layer.members for p in module.parameters()}
        )
        for stage, layers in arrangement.stages.items()
    }


@dataclass(frozen=True)
class Forecast:
    """Some passes through a pipeline, measured and simulated.

    Attributes:
        measured_s, simulated_s: a pass, the longest of all ranks' medians, and the simulation's makespan.
        measured_bubble, simulated_bubble: the share of all ranks' time in which they did not compute.
        peak_live: per rank, the most microbatches whose activations it held.
        stage_s: per stage, the seconds of a microbatch forward and backward.
    """

    measured_s: float
    simulated_s: float
    measured_bubble: float
    simulated_bubble: float
    peak_live: tuple[int, ...]
    stage_s: tuple[float, ...]


def forecast(group: Group, schedule: Schedule, reports: Sequence[PassReport]) -> Forecast:
    """Return the comparison for some passes of one schedule, at least one. Collective over the pipeline's ranks."""
    own = [[str(one), seconds] for report in reports for one, seconds in report.samples]
    totals = [median(report.total_s for report in reports), median(report.compute_s for report in reports)]
    told = group.gather([own, totals, max(report.peak_live for report in reports)])
    samples = [(Instruction.parse(text), seconds) for theirs, _, _ in told for text, seconds in theirs]
    costs = InstructionCosts.measured(schedule.stages, samples)
    simulation = simulate_schedule(schedule, costs)
    measured_s = max(total_s for _, (total_s, _), _ in told)
    busy_s = sum(compute_s for _, (_, compute_s), _ in told)
    stage_s = [0.0] * schedule.stages
    for one, seconds in samples:
        stage_s[one.stage] += seconds / len(reports) / schedule.microbatches
    return Forecast(
        measured_s,
        simulation.makespan_s,
        1 - busy_s / (measured_s * group.size) if measured_s else 0.0,
        simulation.bubble,
        tuple(peak for _, _, peak in told),
        tuple(stage_s),
    )
