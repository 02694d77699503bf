"""What a run tells, in lines for people and in records for programs; both on rank 0 only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from nnmpi.compose.report import EvalReport
from nnmpi.compose.segment import SegmentReport
from nnmpi.train.metrics import RUN_STALENESS
from nnmpi.train.progress import Console, Pace, percent
from nnmpi.train.recorder import Recorder
from nnmpi.train.stale import sum_staleness
from nnmpi.train.state import State
from nnmpi.train.totals import Totals


@dataclass(frozen=True)
class Extent:
    """How long a run is: its epochs, its updates, and the batches of an epoch of training and of the test data."""

    epochs: int
    steps: int
    train_batches: int
    test_batches: int

    def passes(self, state: State) -> float:
        """Return the passes over the training data so far, with the fraction of the present one."""
        return state.epoch + state.batch / self.train_batches


class Reporter:
    """Prints and records.

    Args:
        print_every_s: least time between two printed lines of steps.
    """

    def __init__(self, extent: Extent, console: Console, recorder: Recorder, print_every_s: float) -> None:
        self._extent, self._console, self._recorder = extent, console, recorder
        self._pace = Pace(print_every_s)

    def steps(self, state: State, norm: float, lr: float, more: Mapping[str, Any]) -> None:
        """Tell of the steps in the state's window.

        Args:
            norm: the length of the last gradient; NaN if there is none.
            lr: the learning rate of the last step.
            more: what else the record is to have, or has otherwise.
        """
        window, passes = state.window, self._extent.passes(state)
        self._recorder.write(
            {
                "kind": "train",
                "global_step": state.step,
                "epoch": passes,
                "loss": window.loss,
                "accuracy": window.accuracy,
                "learning_rate": lr,
                "grad_norm": norm if isfinite(norm) else None,
                "samples_per_second": window.samples_per_second,
                "compute_s": window.per_step(window.compute_s),
                "sync_s": window.per_step(window.sync_s),
                "input_s": window.per_step(window.input_s),
                "wait_s": window.per_step(window.wait_s),
                "hidden_s": window.per_step(window.hidden_s),
                "comm_bytes": window.per_step(window.comm_bytes),
                "comm_calls": window.per_step(window.comm_calls),
                "predicted_sync_s": window.predicted_step_s,
                **more,
            }
        )
        if self._pace.due():
            self._console.say(
                f"  step {state.step}/{self._extent.steps}, epoch {passes:.2f}: loss {window.loss:.4f}, "
                f"accuracy {percent(window.accuracy)}, {window.samples_per_second:.0f} samples/s"
            )

    def epoch(self, number: int, totals: Totals, report: EvalReport | None, more: Sequence[str] = ()) -> None:
        """Tell of an epoch (from 1): its totals, the evaluation after it if there was one, and some more lines."""
        tested = f", test loss {report.loss:.4f}, test accuracy {percent(report.accuracy)}" if report else ""
        self._console.say(
            f"epoch {number}/{self._extent.epochs}: loss {totals.loss:.4f}, accuracy {percent(totals.accuracy)}"
            f"{tested}, {totals.samples_per_second:.0f} samples/s",
            f"  {totals.breakdown()}",
            *([f"  {totals.communication()}"] if totals.comm_calls else []),
            *(f"  {line}" for line in more),
        )
        self._pace.restart()

    def say(self, lines: Sequence[str]) -> None:
        """Print lines below an epoch's."""
        self._console.say(*(f"  {line}" for line in lines))

    def segment(self, state: State, report: SegmentReport) -> None:
        """Record how stale the gradients of a segment were that ends with this state, and what was sent."""
        batches = max(report.batches, 1)
        stale = report.staleness
        told = {"mean": None, "max": None, "workers": []} if stale is None else stale.to_json()
        self._recorder.write(
            {
                "kind": "staleness",
                "global_step": state.step,
                "epoch": self._extent.passes(state),
                "mean": told["mean"],
                "max": told["max"],
                "lead": report.lead,
                "updates": report.updates,
                "dropped": report.dropped,
                "undealt": report.undealt,
                "disagreement": report.disagreement,
                "messages": report.messages / batches,
                "bytes": report.bytes / batches,
                "workers": told["workers"],
            }
        )

    def whole_run(self, state: State) -> None:
        """Record and tell how stale the gradients of the whole run were, its parts before a resume as well."""
        total = sum_staleness(self._recorder.read())
        if total.count():
            record = {"kind": RUN_STALENESS, "global_step": state.step, "epoch": self._extent.passes(state)}
            self._recorder.write(record | total.to_json())
            words = f"{total.mean():.2f} on average, at most {total.largest()}"
            self._console.say(f"staleness over the run: {words}, of {total.count():,} gradients")

    def evaluation(self, kind: str, state: State, report: EvalReport) -> None:
        """Record an evaluation: kind "eval" after an epoch, "test" at the end."""
        seconds = max(report.seconds, 1e-9)
        self._recorder.write(
            {
                "kind": kind,
                "global_step": state.step,
                "epoch": self._extent.passes(state),
                "loss": report.loss,
                "accuracy": report.accuracy,
                "runtime": report.seconds,
                "samples_per_second": report.samples / seconds,
                "steps_per_second": self._extent.test_batches / seconds,
                **({} if state.virtual_s is None else {"virtual_s": state.virtual_s}),
            }
        )
