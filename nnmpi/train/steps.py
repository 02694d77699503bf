"""The loop in which all ranks do every step together."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from statistics import fmean

from nnmpi.compose.report import StepReport
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Batch
from nnmpi.data.upload import batches as uploaded
from nnmpi.train.device import device_use
from nnmpi.train.loop import Loop, is_due
from nnmpi.train.parts import Parts
from nnmpi.train.passes import Passes
from nnmpi.train.recorder import Recorder
from nnmpi.train.report import Reporter
from nnmpi.train.state import State
from nnmpi.train.totals import Totals


class StepLoop(Loop):
    """Trains step by step with a `Worker`."""

    def __init__(self, parts: Parts, worker: Worker, state: State, reporter: Reporter, recorder: Recorder) -> None:
        super().__init__(parts, state, reporter, recorder)
        self._worker = worker
        self._last: StepReport | None = None
        self._passes = Passes(worker)

    def _run_epoch(self) -> None:
        loader, options = self._parts.inputs.train_loader, self._parts.options
        backend = self._worker.backend
        with uploaded(loader, self.state.epoch, backend, start=self.state.batch) as batches:
            for batch_number in range(self.state.batch, loader.batches_per_epoch):
                totals = self._run_step(batches)
                if is_due(self.state.step, options.log_every) or self._finished:
                    self._log()
                self._do_what_is_due(ended=batch_number + 1 == loader.batches_per_epoch)
                if self._finished:
                    return
                self._leave_if(self._stop.asked(totals.wall_s))

    def _run_step(self, batches: Iterator[Batch]) -> Totals:
        """Do one update and return what it took."""
        begin = time.perf_counter()
        batch = next(batches)
        input_s = time.perf_counter() - begin
        with self._tracer.step(self.state.step):
            report = self._worker.step(batch, lr=self._parts.schedule(self.state.step))
            lingered_s = self._linger(report.compute_s)
        traffic = report.traffic
        predicted = isfinite(traffic.predicted_s)
        totals = Totals(
            steps=1,
            samples=report.count,
            loss_sum=report.loss * report.count,
            correct=report.accuracy * report.count,
            compute_s=report.compute_s + lingered_s,
            sync_s=traffic.sync_s,
            input_s=input_s,
            wall_s=time.perf_counter() - begin,
            hidden_s=traffic.hidden_s,
            comm_bytes=traffic.bytes,
            comm_calls=traffic.calls,
            predicted_s=traffic.predicted_s if predicted else 0.0,
            predicted_steps=int(predicted),
            wait_s=report.wait_s,
        )
        self._passes.add(report)
        self.state, self._last = self.state.after_step(totals), report
        return totals

    def _linger(self, computed_s: float) -> float:
        """Be as slow as this rank is told to be; return the seconds. The others wait for it in their next sum."""
        begin = time.perf_counter()
        self._parts.pace.linger(begin, self._parts.group.rank, self.state.step, spent_s=computed_s)
        return time.perf_counter() - begin

    def _log(self) -> None:
        """Tell of the steps since the last time, if there are any."""
        if self._last is not None and self.state.window.steps:
            last = self._last
            more: dict[str, float] = {"staleness": fmean(last.staleness)} if last.staleness else {}
            if (scaling := self._worker.scaling) is not None:
                more |= {"loss_scale": last.loss_scale, "skipped_steps": scaling.skipped}
            more |= device_use(self._worker.backend)
            self._reporter.steps(self.state, last.grad_norm, self._parts.schedule(self.state.step - 1), more)
            self.state = replace(self.state, window=Totals())

    def _details(self) -> Sequence[str]:
        return self._passes.tell()
