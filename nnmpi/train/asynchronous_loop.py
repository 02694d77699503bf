"""The loop in which ranks go on at their own pace, and meet where something is due: a segment lies between.

step    0 ------------------ 100 ------------------ 200 ------ 235      235 batches in an epoch, --save-steps 100
        |      segment        |       segment        | segment  |
                           checkpoint             checkpoint   evaluation, checkpoint
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nnmpi.compose.asynchronous import AsynchronousWorker
from nnmpi.compose.runner import EvalReport
from nnmpi.compose.segment import Progress, SegmentReport
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.errors import CheckpointError
from nnmpi.synchrony.staleness import Staleness
from nnmpi.train.context import RunContext
from nnmpi.train.device import device_use
from nnmpi.train.log import Reporter, duration
from nnmpi.train.loop import Loop, is_due
from nnmpi.train.metrics import MetricsRecorder
from nnmpi.train.run_state import RunState, Totals

SHOWN_WORKERS = 16


class StalenessSummary:
    """Says in lines how stale gradients were, how far workers were ahead, and how much was sent, over some segments."""

    def __init__(self) -> None:
        self._reports: list[SegmentReport] = []

    def add(self, report: SegmentReport) -> None:
        """Count a segment in."""
        if report.batches:
            self._reports.append(report)

    def lines(self, virtual: bool) -> list[str]:
        """Return what there is to report, and forget the segments.

        Args:
            virtual: whether their seconds are of virtual time.
        """
        reports, self._reports = self._reports, []
        if not reports:
            return []
        batches = sum(report.batches for report in reports)
        messages, size = sum(report.messages for report in reports), sum(report.bytes for report in reports)
        sent = f"{messages / batches:.3g} messages with {size / batches / 2**20:.3g} MB per step, over all ranks"
        clock = f"{duration(sum(report.seconds for report in reports))} of virtual time; " if virtual else ""
        return [*_stale(reports), f"{clock}{sent}{_losses(reports)}"]


def _stale(reports: list[SegmentReport]) -> list[str]:
    """Return how stale gradients were, and how far apart the ranks' weights."""
    far = max(report.disagreement for report in reports)
    apart = f"weights differed by {100 * far:.2g} % before they were averaged at the end" if far else ""
    known = [report.staleness for report in reports if report.staleness is not None]
    if not known:
        return [apart] if apart else []
    total = Staleness(len(known[0].histograms))
    for each in known:
        total.merge(each)
    counts = [total.count(worker) for worker in range(len(total.histograms))]
    shown = ", ".join(map(str, counts[:SHOWN_WORKERS])) + (", ..." if len(counts) > SHOWN_WORKERS else "")
    words = [f"staleness {total.mean():.2f} on average, at most {total.largest()}"]
    lead = max(report.lead for report in reports)
    if lead:
        words.append(f"at most {lead} {'step' if lead == 1 else 'steps'} ahead")
    words.append(f"steps by worker: {shown}")
    return ["; ".join([*words, apart] if apart else words)]


def _losses(reports: list[SegmentReport]) -> str:
    dropped, unassigned = sum(report.dropped for report in reports), sum(report.unassigned for report in reports)
    if not dropped and not unassigned:
        return ""
    return f"; {dropped} gradients came too late and were dropped, {unassigned} parts of batches were not begun"


class AsynchronousLoop(Loop):
    """Trains segment by segment with a worker whose ranks need not be in step.

    Args:
        context, state, reporter, recorder: see `Loop`.
        worker: the context's, whose type is known here.
    """

    def __init__(
        self,
        context: RunContext,
        worker: AsynchronousWorker | VirtualWorker,
        state: RunState,
        reporter: Reporter,
        recorder: MetricsRecorder,
    ) -> None:
        super().__init__(context, state, reporter, recorder)
        self._worker, self._gradients_per_batch = worker, worker.reports_per_batch
        self._window, self._seen, self._norm = Totals(), 0, 0.0
        self._reported_s = self._at_s = 0.0
        self._staleness = StalenessSummary()
        if isinstance(worker, VirtualWorker) and state.virtual is not None:
            _set_clocks(worker, state.virtual)

    def run(self) -> EvalReport:
        """Train until the last step, see `Loop.run`, and report the staleness over the whole run."""
        report = super().run()
        self._reporter.whole_run(self.state)
        return report

    def _run_epoch(self) -> None:
        loader = self._context.inputs.train_loader
        while self.state.batch < loader.batches_per_epoch:
            report = self._run_segment(self._stop_at(loader.batches_per_epoch))
            ended = self.state.batch == loader.batches_per_epoch
            self._do_what_is_due(ended)
            if self._finished:
                return
            self._stop_if(report.signal)
            if ended:
                return

    def _stop_at(self, batches: int) -> int:
        """Return the batch of this epoch before which the ranks meet next: where something is due."""
        options, state = self._context.config.run, self.state
        steps = [batches - state.batch, self._context.extent.steps - state.step]
        if options.save_steps:
            steps.append(options.save_steps - state.step % options.save_steps)
        if self._tracer.left:
            steps.append(self._tracer.left)
        return state.batch + min(steps)

    def _run_segment(self, stop: int) -> SegmentReport:
        """Train up to a batch of this epoch, and report it. Collective."""
        state = self.state
        self._window, self._seen = Totals(), 0
        self._reported_s = self._worker.now_s if isinstance(self._worker, VirtualWorker) else 0.0
        with self._tracer.steps(stop - state.batch):
            report = self._worker.run(
                self._context.inputs.train_loader,
                state.epoch,
                state.batch,
                stop,
                state.step,
                self._context.schedule,
                bsp=state.epoch < self._context.config.sync.sync_warmup_epochs,
                progress=self._note if self._context.group.is_root else None,
                poll_signal=self._stop.noted,
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
            self._staleness.add(report)
        return report

    def _note(self, one: Progress) -> None:
        """Count one gradient, and report the gradients so far when it is due. Called on rank 0 during a segment."""
        self._seen += 1
        self._norm = one.norm
        n = self._gradients_per_batch
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
        if whole and is_due(self.state.step + self._seen // n, self._context.config.run.log_every):
            self._log()

    def _log(self, final: bool = False) -> None:
        """Report the gradients since the last report, if there are any.

        Args:
            final: whether the segment is over: then a part of a step is reported too, and nothing is kept for the next.
        """
        window = self._window
        if window.samples and (window.steps or final):
            done = self._seen // self._gradients_per_batch
            window = replace(window, steps=max(window.steps, 1), wall_s=self._at_s - self._reported_s)
            state = replace(self.state, step=self.state.step + done, batch=self.state.batch + done, window=window)
            more: dict[str, Any] = {"virtual_s": self._at_s} if isinstance(self._worker, VirtualWorker) else {}
            more |= {"comm_bytes": None, "comm_calls": None}  # they are in the segment's record
            more |= device_use(self._worker.backend)
            self._reporter.steps(state, self._norm, self._context.schedule(max(state.step - 1, 0)), more)
        self._window, self._reported_s = Totals(), self._at_s

    def _details(self) -> Sequence[str]:
        return self._staleness.lines(isinstance(self._worker, VirtualWorker))


def _set_clocks(worker: VirtualWorker, state: Mapping[str, Any]) -> None:
    """Let virtual time go on where it stood; with another number of workers the time goes on, and their clocks anew."""
    try:
        worker.load_clock_state(state)
    except CheckpointError:
        worker.now_s = float(state["now_s"])
