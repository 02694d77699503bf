"""The training loop: epochs, evaluations, checkpoints, and stopping at a signal.

Every rank runs it in step. What is due at a step is done in this order, so that a checkpoint holds all that was
recorded up to it: metrics, evaluation, checkpoint, stop.
"""

import signal
import time
from dataclasses import replace
from math import isfinite
from typing import Any

from nnmpi.compose.report import EvalReport, StepReport
from nnmpi.data.loader import Batch
from nnmpi.data.prefetch import Prefetch
from nnmpi.errors import NnmpiError
from nnmpi.train.parts import Parts
from nnmpi.train.passes import Passes
from nnmpi.train.recorder import Recorder
from nnmpi.train.report import Reporter
from nnmpi.train.restore import save
from nnmpi.train.signals import Stop
from nnmpi.train.state import State
from nnmpi.train.totals import Totals
from nnmpi.train.tracer import Tracer


class Stopped(NnmpiError):
    """A run that ended early, by a signal; its status is 128 plus the signal's number, as shells have it."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.exit_status = 128 + number


class Loop:
    """Trains from a state to the end.

    Attributes:
        state: where the run stands.
    """

    def __init__(self, parts: Parts, state: State, reporter: Reporter, recorder: Recorder) -> None:
        self.state = state
        self._parts, self._reporter, self._recorder = parts, reporter, recorder
        self._stop = Stop(parts.group)
        self._saved_step = state.step
        self._since = time.monotonic()
        self._evaluated: tuple[int, EvalReport] | None = None
        self._last: StepReport | None = None
        self._passes = Passes(parts.worker)
        self._tracer = Tracer(parts, reporter.say)

    def run(self) -> EvalReport:
        """Train until the last step, save, and return the evaluation of the final weights on the test data.

        Raises:
            DivergenceError: for a loss or gradient that is not finite; older checkpoints are intact.
            CheckpointError: when a checkpoint cannot be written.
            Stopped: after a signal, with a checkpoint of the last whole step.
        """
        with self._stop:
            try:
                while not self._finished:
                    self._run_epoch()
                self._tracer.finish()
                self._reporter.say(self._passes.tell())  # a run may end within an epoch
                report = self._evaluate()
                self._save()
            except KeyboardInterrupt:  # the second one: this rank does not wait for the others
                raise Stopped(f"interrupted in step {self.state.step + 1}; {self._way_on()}", signal.SIGINT) from None
        self._reporter.evaluation("test", self.state, report)
        return report

    @property
    def _finished(self) -> bool:
        return self.state.step >= self._parts.extent.steps

    def _run_epoch(self) -> None:
        """Run the rest of an epoch, or up to the last step."""
        loader, options = self._parts.inputs.train_loader, self._parts.options
        with loader.epoch(self.state.epoch, start=self.state.batch) as batches:
            for batch_number in range(self.state.batch, loader.batches_per_epoch):
                totals = self._run_step(batches)
                if _due(self.state.step, options.log_every) or self._finished:
                    self._log()
                ended = batch_number + 1 == loader.batches_per_epoch
                if ended:
                    self._end_epoch()
                if _due(self.state.step, options.save_steps) or (ended and _due(self.state.epoch, options.save_every)):
                    self._save()
                if self._finished:
                    return
                self._stop_if_asked(totals.wall_s)

    def _run_step(self, batches: Prefetch[Batch]) -> Totals:
        """Do one update and return what it took."""
        begin = time.perf_counter()
        batch = next(batches)
        input_s = time.perf_counter() - begin
        with self._tracer.step(self.state.step):
            report = self._parts.worker.step(batch, lr=self._parts.schedule(self.state.step))
        traffic = report.traffic
        predicted = isfinite(traffic.predicted_s)
        totals = Totals(
            steps=1,
            samples=report.count,
            loss_sum=report.loss * report.count,
            correct=report.accuracy * report.count,
            compute_s=report.compute_s,
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

    def _log(self) -> None:
        """Tell of the steps since the last time, if there are any."""
        if self._last is not None and self.state.window.steps:
            self._reporter.steps(self.state, self._last, self._parts.schedule(self.state.step - 1))
            self.state = replace(self.state, window=Totals())

    def _end_epoch(self) -> None:
        """Tell of the epoch, after an evaluation if one is due, and go on to the next. Collective."""
        totals, report = self._over_ranks(self.state.in_epoch), None
        self.state = self.state.after_epoch()
        if _due(self.state.epoch, self._parts.options.eval_every):
            report = self._evaluate()
            self._reporter.evaluation("eval", self.state, report)
            self.state = self.state.after_evaluation(report.accuracy, self.state.epoch)
        self._reporter.epoch(self.state.epoch, totals, report, self._passes.tell())

    def _over_ranks(self, totals: Totals) -> Totals:
        """Return the totals with the mean times of all ranks. Collective."""
        group = self._parts.group
        names = ("compute_s", "sync_s", "input_s", "wall_s", "hidden_s", "wait_s")
        sums = group.sum_floats([getattr(totals, name) for name in names])
        means: dict[str, Any] = {name: each / group.size for name, each in zip(names, sums, strict=True)}
        return replace(totals, **means)

    def _evaluate(self) -> EvalReport:
        """Return the evaluation of the weights as they are on the test data, without doing it twice. Collective."""
        if self._evaluated is None or self._evaluated[0] != self.state.step:
            with self._parts.inputs.test_loader.epoch(0) as batches:
                self._evaluated = self.state.step, self._parts.worker.evaluate(batches)
        return self._evaluated[1]

    def _save(self) -> None:
        """Write a checkpoint, unless this step has one. Collective."""
        if self._saved_step == self.state.step:
            return
        now = time.monotonic()
        self.state = replace(self.state, elapsed_s=self.state.elapsed_s + now - self._since)
        self._since = now
        parts = self._parts
        save(parts.worker, self.state, parts.folder, self._recorder, parts.group, parts.options.keep)
        self._saved_step = self.state.step

    def _stop_if_asked(self, step_s: float) -> None:
        """Save and leave when a rank got a signal. Collective."""
        number = self._stop.asked(step_s)
        if number:
            self._save()
            self._tracer.finish()
            name = signal.Signals(number).name
            raise Stopped(f"stopped by {name} after step {self.state.step}; {self._way_on()}", number)

    def _way_on(self) -> str:
        return f"go on with: python -m nnmpi.train --resume {self._parts.folder.path}"


def _due(count: int, every: int) -> bool:
    """Return whether something that is done every so many times is due now; every 0 means never."""
    return every > 0 and count % every == 0
