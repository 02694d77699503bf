"""The loop in which ranks go on at their own pace, and meet where something is due: a segment lies between.

step    0 ------------------ 100 ------------------ 200 ------ 235      235 batches in an epoch, --save-steps 100
        |      segment        |       segment        | segment  |
                           checkpoint             checkpoint   evaluation, checkpoint
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nnmpi.compose.relaxed import RelaxedWorker
from nnmpi.compose.report import EvalReport
from nnmpi.compose.segment import Progress, SegmentReport
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.errors import CheckpointError
from nnmpi.train.device import device_use
from nnmpi.train.lag import Lag
from nnmpi.train.loop import Loop, is_due
from nnmpi.train.parts import Parts
from nnmpi.train.recorder import Recorder
from nnmpi.train.report import Reporter
from nnmpi.train.state import State
from nnmpi.train.totals import Totals


class SegmentLoop(Loop):
    """Trains segment by segment with a worker whose ranks need not be in step.

    Args:
        warmup: the epochs in which the ranks stay in step.
    """

    def __init__(
        self,
        parts: Parts,
        worker: RelaxedWorker | VirtualWorker,
        state: State,
        reporter: Reporter,
        recorder: Recorder,
        warmup: int,
    ) -> None:
        super().__init__(parts, state, reporter, recorder)
        self._worker, self._gradients, self._warmup = worker, worker.told, warmup
        self._window, self._seen, self._norm = Totals(), 0, 0.0
        self._told_s = self._at_s = 0.0
        self._lag = Lag()
        if isinstance(worker, VirtualWorker) and state.virtual is not None:
            _set_clocks(worker, state.virtual)

    def run(self) -> EvalReport:
        """Train until the last step, see `Loop.run`, and tell of the staleness over the whole run."""
        report = super().run()
        self._reporter.whole_run(self.state)
        return report

    def _run_epoch(self) -> None:
        loader = self._parts.inputs.train_loader
        while self.state.batch < loader.batches_per_epoch:
            report = self._run_segment(self._stop_at(loader.batches_per_epoch))
            ended = self.state.batch == loader.batches_per_epoch
            self._do_what_is_due(ended)
            if self._finished:
                return
            self._leave_if(report.signal)
            if ended:
                return

    def _stop_at(self, batches: int) -> int:
        """Return the batch of this epoch before which the ranks meet next."""
        options, state = self._parts.options, self.state
        steps = [batches - state.batch, self._parts.extent.steps - state.step]
        if options.save_steps:
            steps.append(options.save_steps - state.step % options.save_steps)
        if self._tracer.left:
            steps.append(self._tracer.left)
        return state.batch + min(steps)

    def _run_segment(self, stop: int) -> SegmentReport:
        """Train up to a batch of this epoch, and tell of it. Collective."""
        state = self.state
        self._window, self._seen = Totals(), 0
        self._told_s = self._worker.now_s if isinstance(self._worker, VirtualWorker) else 0.0
        with self._tracer.steps(stop - state.batch):
            report = self._worker.run(
                self._parts.inputs.train_loader,
                state.epoch,
                state.batch,
                stop,
                state.step,
                self._parts.schedule,
                bsp=state.epoch < self._warmup,
                progress=self._note if self._parts.group.is_root else None,
                asked=self._stop.noted,
            )
        self._log(final=True)
        totals = Totals(
            steps=report.batches,
            samples=report.rows,
            loss_sum=report.loss_sum,
            correct=report.correct,
            compute_s=report.compute_s * report.batches,
            sync_s=report.wait_s * report.batches,
            input_s=report.input_s * report.batches,
            wall_s=report.seconds,
        )
        virtual = self._worker.clock_state() if isinstance(self._worker, VirtualWorker) else None
        self.state = replace(state.after_batches(report.batches, totals), virtual=virtual)
        if report.batches:
            self._reporter.segment(self.state, report)
            self._lag.add(report)
        return report

    def _note(self, one: Progress) -> None:
        """Count one gradient, and tell of them now and then; on rank 0."""
        self._seen += 1
        self._norm = one.norm
        n = self._gradients
        whole = self._seen % n == 0
        self._window = self._window.plus(
            Totals(
                steps=int(whole),
                samples=one.rows,
                loss_sum=one.loss_sum,
                correct=one.correct,
                compute_s=one.compute_s / n,
                sync_s=one.wait_s / n,
                input_s=one.input_s / n,
            )
        )
        self._at_s = one.at_s
        if whole and is_due(self.state.step + self._seen // n, self._parts.options.log_every):
            self._log()

    def _log(self, final: bool = False) -> None:
        """Tell of the gradients since the last time, if there are any; nothing is kept for the next segment."""
        window = self._window
        if window.samples and (window.steps or final):
            done = self._seen // self._gradients
            window = replace(window, steps=max(window.steps, 1), wall_s=self._at_s - self._told_s)
            state = replace(self.state, step=self.state.step + done, batch=self.state.batch + done, window=window)
            more: dict[str, Any] = {"virtual_s": self._at_s} if isinstance(self._worker, VirtualWorker) else {}
            more |= {"comm_bytes": None, "comm_calls": None}  # they are in the segment's record
            more |= device_use(self._worker.backend)
            self._reporter.steps(state, self._norm, self._parts.schedule(max(state.step - 1, 0)), more)
        self._window, self._told_s = Totals(), self._at_s

    def _details(self) -> Sequence[str]:
        return self._lag.tell(isinstance(self._worker, VirtualWorker))


def _set_clocks(worker: VirtualWorker, state: Mapping[str, Any]) -> None:
    """Let virtual time go on where it stood; with other workers than before only the time itself does."""
    try:
        worker.load_clock_state(state)
    except CheckpointError:
        worker.now_s = float(state["now_s"])
