"""The loop in which all ranks do every step together."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from statistics import fmean

from nnmpi import clock
from nnmpi.compose.pipelined import Pipelined, forecast
from nnmpi.compose.runner import StepReport
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Batch
from nnmpi.data.upload import batches as uploaded
from nnmpi.parallel.pipeline.executor import PassReport
from nnmpi.train.context import RunContext
from nnmpi.train.device import device_use
from nnmpi.train.log import Reporter
from nnmpi.train.loop import Loop, is_due
from nnmpi.train.metrics import MetricsRecorder
from nnmpi.train.run_state import RunState, Totals

PASSES_KEPT = 20  # so many are enough for a mean, and old ones may be of another load of the machine


class PipelineSummary:
    """Says in a line how the last passes through the pipeline went: measured beside simulated.

    It looks at passes of the run's usual number of microbatches. Without a pipeline it does nothing.

    Args:
        worker: whose steps are added.
    """

    def __init__(self, worker: Worker) -> None:
        self._runner = worker.runner if isinstance(worker.runner, Pipelined) else None
        self._passes: deque[PassReport] = deque(maxlen=PASSES_KEPT)
        self._microbatches = 0
        self._staleness: tuple[int, ...] = ()

    def add(self, report: StepReport) -> None:
        """Keep a step's pass; the short last batch of an epoch is left out."""
        if self._runner is None or report.passed is None:
            return
        microbatches = report.passed.microbatches
        if microbatches > self._microbatches:
            self._microbatches = microbatches
            self._passes.clear()
        if microbatches == self._microbatches:
            self._passes.append(report.passed)
        self._staleness = report.staleness

    def lines(self) -> list[str]:
        """Return what there is to report, and forget the passes. Collective."""
        if self._runner is None or not self._passes:
            return []
        pipeline = self._runner.pipeline
        found = forecast(pipeline.group, pipeline.plan(self._microbatches), list(self._passes))
        # Only schedules that update during a pass, such as pipedream, have weights that are out of date.
        stale = pipeline.group.gather(max(self._staleness, default=0)) if self._runner.updates else []
        self._passes.clear()
        stages = ", ".join(f"{1e3 * seconds:.2f}" for seconds in found.stage_s)
        lines = [
            f"pipeline pass {1e3 * found.measured_s:.2f} ms, simulated {1e3 * found.simulated_s:.2f} ms; "
            f"bubble {found.measured_bubble:.0%}, simulated {found.simulated_bubble:.0%}; "
            f"ms per microbatch and stage: {stages}; activations kept: {', '.join(map(str, found.peak_live))}"
        ]
        if stale:
            lines.append(f"staleness by rank: at most {', '.join(map(str, stale))} updates")
        return lines


class StepLoop(Loop):
    """Trains step by step with a `Worker`.

    Args:
        context, state, reporter, recorder: see `Loop`.
        worker: the context's, whose type is known here.
    """

    def __init__(
        self, context: RunContext, worker: Worker, state: RunState, reporter: Reporter, recorder: MetricsRecorder
    ) -> None:
        super().__init__(context, state, reporter, recorder)
        self._worker = worker
        self._last: StepReport | None = None
        self._pipeline = PipelineSummary(worker)

    def _run_epoch(self) -> None:
        loader, options = self._context.inputs.train_loader, self._context.config.run
        backend = self._worker.backend
        with uploaded(loader, self.state.epoch, backend, start=self.state.batch) as batches:
            for batch_number in range(self.state.batch, loader.batches_per_epoch):
                totals = self._run_step(batches)
                if is_due(self.state.step, options.log_every) or self._finished:
                    self._log()
                self._do_what_is_due(ended=batch_number + 1 == loader.batches_per_epoch)
                if self._finished:
                    return
                self._stop_if(self._stop.asked(totals.wall_s))

    def _run_step(self, batches: Iterator[Batch]) -> Totals:
        """Do one update and return what it took."""
        begin = clock.now()
        batch = next(batches)
        input_s = clock.now() - begin
        with self._tracer.step(self.state.step):
            report = self._worker.step(batch, lr=self._context.schedule(self.state.step))
            throttled_s = self._throttle(report.compute_s)
        traffic = report.traffic
        predicted = isfinite(traffic.predicted_s)
        totals = Totals(
            steps=1,
            samples=report.count,
            loss_sum=report.loss * report.count,
            correct=report.accuracy * report.count,
            compute_s=report.compute_s + throttled_s,
            sync_s=traffic.sync_s,
            input_s=input_s,
            wall_s=clock.now() - begin,
            hidden_s=traffic.hidden_s,
            comm_bytes=traffic.bytes,
            comm_calls=traffic.calls,
            predicted_s=traffic.predicted_s if predicted else 0.0,
            predicted_steps=int(predicted),
            wait_s=report.wait_s,
        )
        self._pipeline.add(report)
        self.state, self._last = self.state.after_step(totals), report
        return totals

    def _throttle(self, computed_s: float) -> float:
        """Sleep if this rank is to be slow on purpose; return the seconds. The others wait for it in their next sum."""
        begin = clock.now()
        self._context.throttle.wait(begin, self._context.group.rank, self.state.step, spent_s=computed_s)
        return clock.now() - begin

    def _log(self) -> None:
        """Report the steps since the last report, if there are any."""
        if self._last is not None and self.state.window.steps:
            last = self._last
            more: dict[str, float] = {"staleness": fmean(last.staleness)} if last.staleness else {}
            if (scaling := self._worker.scaling) is not None:
                more |= {"loss_scale": last.loss_scale, "skipped_steps": scaling.skipped}
            more |= device_use(self._worker.backend)
            self._reporter.steps(self.state, last.grad_norm, self._context.schedule(self.state.step - 1), more)
            self.state = replace(self.state, window=Totals())

    def _details(self) -> Sequence[str]:
        return self._pipeline.lines()
