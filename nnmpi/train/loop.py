"""The training loop: epochs, evaluations, checkpoints, and stopping at a signal.

How batches are trained on is left to `StepLoop`, in which all ranks do each step together, and `AsynchronousLoop`, in
which they meet only where something is due. What is due at a step is done in this order, so that a checkpoint holds all
that was recorded up to it: metrics, evaluation, checkpoint, stop.
"""

import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Self

from nnmpi import clock
from nnmpi.comm.agreement import PeriodicCheck
from nnmpi.comm.group import Group
from nnmpi.compose.runner import EvalReport
from nnmpi.data.upload import batches as uploaded
from nnmpi.errors import NnmpiError
from nnmpi.train.checkpoint import save
from nnmpi.train.context import RunContext
from nnmpi.train.log import Reporter
from nnmpi.train.metrics import MetricsRecorder
from nnmpi.train.run_state import RunState, Totals
from nnmpi.train.trace import Tracer

STOPPING = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Catches SIGTERM and SIGINT while it is entered, and lets all ranks stop after the same step.

    A signal may reach one rank or all of them, at different steps, so the ranks ask one another now and then.
    A second SIGINT raises KeyboardInterrupt at once, for a step that does not end.

    Args:
        group: the ranks that stop together.
        interval_s: about how many seconds lie between two times that they ask.
    """

    def __init__(self, group: Group, interval_s: float = 0.5) -> None:
        self._check = PeriodicCheck(group, interval_s)
        self._noted: int = 0
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        """Catch the signals from now on; outside the main thread, where Python forbids it, leave them as they are."""
        try:
            for number in STOPPING:
                self._before[number] = signal.signal(number, self._note)
        except ValueError:
            self._before.clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back to those who had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self, step_s: float) -> int:
        """Return the signal that any rank got, 0 for none; call it once per step on all ranks.

        Args:
            step_s: how long a step takes here, in seconds.
        """
        answers = self._check.gather(self._noted, step_s)
        return max(int(each) for each in answers) if answers is not None else 0

    def noted(self) -> int:
        """Return the signal that this rank got, 0 for none (not collective)."""
        return self._noted

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._noted == signal.SIGINT:
            raise KeyboardInterrupt
        self._noted = number


class Stopped(NnmpiError):
    """A run that ended early, by a signal; its status is 128 plus the signal's number, as shells have it."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.exit_status = 128 + number


class Loop(ABC):
    """Trains from a state to the end.

    Args:
        context: what the run works with.
        state: where it begins.
        reporter: prints and records.
        recorder: the files with the records; a checkpoint is written after they are on the disk.

    Attributes:
        state: where the run stands.
    """

    def __init__(self, context: RunContext, state: RunState, reporter: Reporter, recorder: MetricsRecorder) -> None:
        self.state = state
        self._context, self._reporter, self._recorder = context, reporter, recorder
        self._stop = StopSignals(context.group)
        self._saved_step = state.step
        self._since = clock.now()
        self._evaluated: tuple[int, EvalReport] | None = None
        self._tracer = Tracer(context, reporter.say)

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
                raise Stopped(
                    f"interrupted in step {self.state.step + 1}; {self._how_to_resume()}", signal.SIGINT
                ) from None
        self._reporter.evaluation("test", self.state, report)
        return report

    @property
    def _finished(self) -> bool:
        return self.state.step >= self._context.extent.steps

    @abstractmethod
    def _run_epoch(self) -> None:
        """Train to the end of the epoch, or to the last step if that comes first. Collective."""

    @abstractmethod
    def _details(self) -> Sequence[str]:
        """Return lines about the steps since the last call. Collective."""

    def _do_what_is_due(self, ended: bool) -> None:
        """End the epoch if it has `ended`, and save if it is time. Collective."""
        if ended:
            self._end_epoch()
        options = self._context.config.run
        due = ended and is_due(self.state.epoch, options.save_every)
        if due or is_due(self.state.step, options.save_steps):
            self._save()

    def _end_epoch(self) -> None:
        """Evaluate if it is due, report the epoch, and go on to the next. Collective."""
        totals, report = self._over_ranks(self.state.in_epoch), None
        self.state = self.state.after_epoch()
        if is_due(self.state.epoch, self._context.config.run.eval_every):
            report = self._evaluate()
            self._reporter.evaluation("eval", self.state, report)
            self.state = self.state.after_evaluation(report.accuracy, self.state.epoch)
        self._reporter.epoch(self.state.epoch, totals, report, self._details())

    def _over_ranks(self, totals: Totals) -> Totals:
        """Return the totals with the ranks' mean in the place of each time. Collective."""
        group = self._context.group
        names = ("compute_s", "sync_s", "input_s", "wall_s", "hidden_s", "wait_s")
        sums = group.sum_floats([getattr(totals, name) for name in names])
        means: dict[str, Any] = {name: each / group.size for name, each in zip(names, sums, strict=True)}
        return replace(totals, **means)

    def _evaluate(self) -> EvalReport:
        """Return the evaluation of the weights as they are on the test data, without doing it twice. Collective."""
        if self._evaluated is None or self._evaluated[0] != self.state.step:
            worker = self._context.worker
            with uploaded(self._context.inputs.test_loader, 0, worker.backend) as batches:
                self._evaluated = self.state.step, worker.evaluate(batches)
        return self._evaluated[1]

    def _save(self) -> None:
        """Write a checkpoint, unless this step has one. Collective."""
        if self._saved_step == self.state.step:
            return
        now = clock.now()
        self.state = replace(self.state, elapsed_s=self.state.elapsed_s + now - self._since)
        self._since = now
        context = self._context
        save(context.worker, self.state, context.folder, self._recorder, context.group, context.config.run.keep)
        self._saved_step = self.state.step

    def _stop_if(self, number: int) -> None:
        """Save and end the run when this is the number of a signal; 0 stands for none. Collective.

        Raises:
            Stopped: with a checkpoint of the last whole step.
        """
        if number:
            self._save()
            self._tracer.finish()
            name = signal.Signals(number).name
            raise Stopped(f"stopped by {name} after step {self.state.step}; {self._how_to_resume()}", number)

    def _how_to_resume(self) -> str:
        return f"go on with: python -m nnmpi.train --resume {self._context.folder.path}"


def is_due(count: int, every: int) -> bool:
    """Return whether something that is done every so many times is due at this count; `every` 0 means never."""
    return every > 0 and count % every == 0
