"""The training loop: epochs, evaluations, checkpoints, and stopping at a signal.

How batches are trained on is left to `StepLoop`, in which all ranks do each step together, and `SegmentLoop`, in which
they meet only where something is due. What is due at a step is done in this order, so that a checkpoint holds all that
was recorded up to it: metrics, evaluation, checkpoint, stop.
"""

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nnmpi.compose.report import EvalReport
from nnmpi.data.upload import batches as uploaded
from nnmpi.errors import NnmpiError
from nnmpi.train.parts import Parts
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


class Loop(ABC):
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
                self._reporter.say(self._details())  # a run may end within an epoch
                report = self._evaluate()
                self._save()
            except KeyboardInterrupt:  # the second one: this rank does not wait for the others
                raise Stopped(f"interrupted in step {self.state.step + 1}; {self._way_on()}", signal.SIGINT) from None
        self._reporter.evaluation("test", self.state, report)
        return report

    @property
    def _finished(self) -> bool:
        return self.state.step >= self._parts.extent.steps

    @abstractmethod
    def _run_epoch(self) -> None:
        """Run the rest of an epoch, or up to the last step. Collective."""

    @abstractmethod
    def _details(self) -> Sequence[str]:
        """Return lines about what has run since the last time. Collective."""

    def _do_what_is_due(self, ended: bool) -> None:
        """End the epoch if it has `ended`, and save if it is time. Collective."""
        if ended:
            self._end_epoch()
        options = self._parts.options
        due = ended and is_due(self.state.epoch, options.save_every)
        if due or is_due(self.state.step, options.save_steps):
            self._save()

    def _end_epoch(self) -> None:
        """Tell of the epoch, after an evaluation if one is due, and go on to the next. Collective."""
        totals, report = self._over_ranks(self.state.in_epoch), None
        self.state = self.state.after_epoch()
        if is_due(self.state.epoch, self._parts.options.eval_every):
            report = self._evaluate()
            self._reporter.evaluation("eval", self.state, report)
            self.state = self.state.after_evaluation(report.accuracy, self.state.epoch)
        self._reporter.epoch(self.state.epoch, totals, report, self._details())

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
            worker = self._parts.worker
            with uploaded(self._parts.inputs.test_loader, 0, worker.backend) as batches:
                self._evaluated = self.state.step, worker.evaluate(batches)
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

    def _leave_if(self, number: int) -> None:
        """Save and leave when a signal of this number has come; 0 for none. Collective.

        Raises:
            Stopped: with a checkpoint of the last whole step.
        """
        if number:
            self._save()
            self._tracer.finish()
            name = signal.Signals(number).name
            raise Stopped(f"stopped by {name} after step {self.state.step}; {self._way_on()}", number)

    def _way_on(self) -> str:
        return f"go on with: python -m nnmpi.train --resume {self._parts.folder.path}"


def is_due(count: int, every: int) -> bool:
    """Return whether something that is done every so many times is due now; every 0 means never."""
    return every > 0 and count % every == 0
