"""The training loop of `nnmpi train` and `nnmpi.fit`: epochs, evaluations, checkpoints, signals.

The loop cuts training into segments, which end at steps with an evaluation, a checkpoint or the end
of an epoch. The trainer trains a segment without returning to the loop: asynchronous workers meet
only at its end. With 235 batches in an epoch and --save-every 100steps:

    step    0 ------------ 100 ------------ 200 ------- 235
            |   segment     |    segment     |  segment  |
                        checkpoint       checkpoint   evaluation, checkpoint

At the end of a segment come metrics, evaluation, callbacks, checkpoint, stop. In this order a
checkpoint includes all records up to its step, and a rate that a callback has changed.

`session.begin` surrounds the loop: it locks the folder, restores a checkpoint and prints the
header, and at the end writes finished.json and the summary.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import inf, isfinite, isnan, nan
from types import FrameType
from typing import ClassVar, Self, TypeAlias

import nnmpi.base.clock as clock
from nnmpi.base.command import as_words
from nnmpi.base.custom import fault, name_of
from nnmpi.base.errors import NnmpiError, UsageError, asks_to_stop
from nnmpi.base.settled import Settled
from nnmpi.comm.agreement import CollectivePhase, agreed
from nnmpi.compose.evaluation import Evaluation
from nnmpi.compose.stats import PARTS, StepReport, Totals
from nnmpi.compose.trainer import Progress, Trainer
from nnmpi.data.loader import Batch
from nnmpi.train.checkpoint import MemorySaver, RunState, Saver, state_values
from nnmpi.train.config import FIT, PLATEAU, flatten
from nnmpi.train.folder import code_of, resume_words
from nnmpi.train.log import Reporter
from nnmpi.train.metrics import MetricsRecorder
from nnmpi.train.profile import Profiler
from nnmpi.train.run import TrainingRun
from nnmpi.train.trace import Tracer

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WOKEN = signal.SIGCONT

SAVING = 0.01  # default share of the time spent on checkpoints


class StopSignals(ExitStack):
    """A context that records SIGTERM, SIGINT, SIGHUP and SIGCONT.

    When Open MPI's mpirun is stopped, it sends its ranks SIGCONT at once, SIGTERM after a quarter
    of a second, and SIGKILL after another quarter. The time after SIGTERM is too short for a
    checkpoint, so SIGCONT already triggers one. The run then continues: SIGCONT may also mean that
    a suspended job resumes.

    A signal may reach one rank or all, at different steps: the ranks must agree on what they
    `noted`. A second SIGINT raises KeyboardInterrupt at once, in case the step hangs. Python calls
    handlers in the main thread only. Simulated ranks run in other threads, and read the main
    thread's record.
    """

    _main: ClassVar[StopSignals | None] = None

    def __init__(self) -> None:
        super().__init__()
        self._noted: int = 0
        self._recorder: StopSignals = self

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.enter_context(handling(self._note, signal.SIGCONT))
            # a callback of one loop may run another
            self.callback(setattr, StopSignals, "_main", StopSignals._main)
            StopSignals._main = self
        else:
            self._recorder = StopSignals._main or self
        return self

    def noted(self) -> int:
        """Return this rank's last signal, 0 for none, `WOKEN` for SIGCONT. Not collective."""
        return self._recorder._noted

    def forget_waking(self) -> None:
        """Clear a recorded SIGCONT."""
        if self._recorder._noted == WOKEN:
            self._recorder._noted = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._noted == signal.SIGINT:
            raise KeyboardInterrupt
        self._noted = number if number != signal.SIGCONT else self._noted or WOKEN


@contextmanager
def handling(note: Callable[[int, FrameType | None], None], *more: int) -> Iterator[None]:
    """Handle STOPPING and more signals by `note` in the body.

    SIGHUP, which a closed terminal sends, stays ignored if it was: the program runs under nohup. A
    handler in C, such as Open MPI's for SIGHUP, cannot be restored.
    """
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [
        number for number in (*STOPPING, *more) if number != signal.SIGHUP or not under_nohup
    ]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Stopped(NnmpiError):
    """A signal has stopped a run; the exit status is 128 plus the signal's number."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.exit_status = 128 + number


class Moment(Settled, read_once="step model trainer history"):
    """What a callback sees, on each rank, after an epoch or an evaluation.

    A callback may read and test the model, and set `lr`: from the next step on the schedule goes on
    from this rate, in proportion. All ranks must set the same. It returns "stop", or raises
    `nnmpi.StopTraining`, to end the training after this step.

    Attributes:
        step: updates done.
        lr: the learning rate of the last update; set it to change the next ones.
        model: this rank's part; all of it without pipeline and tensor parallelism.
        trainer: evaluates it: `moment.trainer.evaluate(loader)`, on all ranks.
        history: {name: values until now}, of this row in the last place.
    """

    def __init__(self, step: int, lr: float, trainer: Trainer, history: History) -> None:
        self.step, self.lr = step, lr
        self.model, self.trainer, self.history = trainer.model, trainer, history.columns()


Callback: TypeAlias = Callable[[Moment], object]


class History:
    """Rows of a run's results: one for each epoch's end, each evaluation, and the run's end.

    Args:
        rows: of earlier starts of the run.
        show: called with the rows after each change, such as a table that is written again.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, float | None]] = (),
        show: Callable[[Sequence[Mapping[str, float | None]]], object] = len,
    ) -> None:
        self.rows = [dict(row) for row in rows]
        self._show = show

    def add(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Add a row, or more values to that of this step; what is not finite becomes None."""
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows.append({"step": step, "epoch": epoch})
        self.rows[-1] |= {
            name: float(value) if isfinite(value) else None for name, value in values.items()
        }
        self._show(self.rows)

    def columns(self) -> dict[str, list[float | None]]:
        """Return the values of each name, None in the rows that have none."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        return {name: [row.get(name) for row in self.rows] for name in names}


class Loop:
    """Train a run from a state to the end.

    Args:
        run: to train, `training_run`.
        state: to begin with.
        reporter: prints and records.
        recorder: of the metrics, which are synced to disk before a checkpoint.
        history: of the run until now, see `History`.
        callbacks: called on all ranks after each epoch and evaluation, see `Moment`.

    Attributes:
        training_run, history: see above.
        state: of the run, at the end of the last segment.
        report: the evaluation of the final weights, after `run`.
        stopped: why the training has ended before its last step; empty if it has not.
    """

    def __init__(
        self,
        run: TrainingRun,
        state: RunState,
        reporter: Reporter,
        recorder: MetricsRecorder,
        history: History,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.state = state
        self.reporter = reporter
        self.report = Evaluation()
        self.stopped = ""
        self.training_run = self._run = run
        self._trainer = run.trainer
        self._recorder, self.history, self._callbacks = recorder, history, callbacks
        self._signals = StopSignals()
        self._tracer = Tracer(run, reporter.say)
        self._profiler = Profiler(run, reporter.say)
        self.saver: Saver | MemorySaver = (
            Saver(run.folder.checkpoints, recorder, run.group, root=run.folder.path)
            if run.has_folder
            else MemorySaver()
        )
        self._saved_step = state.step
        self._started = clock.now()
        self._began = self._started - state.elapsed_s  # as if the run had never been interrupted
        self._evaluated: tuple[int, Evaluation] | None = None  # the last evaluation and its step
        self._tests: list[Batch] = []  # the test data, if small
        self._reports = 0  # progress reports in this segment: steps, or workers' gradients
        self._last = Progress(0, 0, StepReport())  # the last report
        self._is_over = False  # whether --max-time has passed, on rank 0
        if state.elapsed_s >= (run.config.optimization.max_time or inf):
            self.stopped = "as --max-time is over"
        self._lose_patience()  # a resumed run may have none left

    def run(self) -> None:
        """Train to the last step, save, and evaluate the final weights on the test data.

        Raises:
            DivergenceError: for a loss or gradient that is not finite; older checkpoints are
                intact.
            CheckpointError: when a checkpoint cannot be written.
            Stopped: after a signal, with a checkpoint of the last complete step.
        """
        with self._signals, self.saver:
            try:
                while not self._finished:
                    self._train_segment()
                self._end_training()
            except KeyboardInterrupt:  # a second SIGINT: end without waiting for the other ranks
                raise Stopped(
                    f"interrupted in step {self._step + 1}; {self._how_to_resume()}", signal.SIGINT
                ) from None
        self.reporter.evaluation("test", self._on_time(), self.report)
        if not self._trainer.in_step:
            self.reporter.whole_run(self.state)

    def _train_segment(self) -> None:
        """Train to the end of the next segment, and do what is due there. Collective."""
        trainer, run, state = self._trainer, self._run, self.state
        stop = self._stop_at()
        with self._tracer.steps(stop - state.batch), self._profiler.step():
            report = trainer.run(
                run.inputs.train_loader,
                state.epoch,
                state.batch,
                stop,
                state.step,
                self.rate,
                self._note,
                self._signals.noted,
            )
        is_last = state.step + report.batches == run.extent.stop
        if is_last or not trainer.in_step:
            self._log()
        state.add(report.totals)
        self._reports = 0
        if report.batches and not trainer.in_step:
            self.reporter.segment(state, report)
        self._end_segment(report.signal)

    def _end_training(self) -> None:
        """Evaluate the final weights on the test data, and save them. Collective."""
        run = self._run
        self._tracer.finish()
        self._profiler.finish()
        if run.config.data.dataset != FIT or run.config.run.verbose:
            self.reporter.say([*self._trainer.summary(), *self._trainer.memory()])
        self.report = self._evaluate()
        self.history.add(
            self.state.step,
            run.extent.passes(self.state),
            self.reporter.values(self.report, "test_"),
        )
        is_whole_run = self.stopped or self.state.step == run.extent.steps  # else: --stop-after
        if run.config.run.keeps_best and is_whole_run:
            with_best = self._with_best(self.report)
            if with_best != self.state:
                self._saved_step = -1  # save again: the checkpoint says which is the best
            self.state = with_best
        self._save()
        self.saver.wait()

    @property
    def _finished(self) -> bool:
        return self.state.step >= self._run.extent.stop or bool(self.stopped)

    def _evaluations_since(self, step: int) -> int:
        """Return the number of evaluations after that of a step."""
        every = self._run.config.run.eval_every
        size = every.steps or every.epochs * self._run.extent.train_batches
        return self.state.step // size - step // size

    def _follow_plateau(self) -> None:
        """Lower the rate after as many evaluations without a better one as --lr-schedule says."""
        state = self.state
        name, (patience, factor) = self._run.config.optimization.rate_words
        since = max(state.best_step, state.rate_step)
        if name == PLATEAU and self._evaluations_since(since) >= patience:
            state.rate_scale, state.rate_step = state.rate_scale * factor, state.step
            self.reporter.say(
                [f"times {factor:g} from here on: the learning rate, {self.rate(state.step):.4g}"]
            )

    def _lose_patience(self) -> None:
        """Stop if as many evaluations as --early-stopping have not beaten the best one."""
        options, state = self._run.config.run, self.state
        if options.early_stopping and (
            self._evaluations_since(state.best_step) >= options.early_stopping
        ):
            self.stopped = f"as no evaluation was better than that after step {state.best_step}"

    @property
    def _step(self) -> int:
        return self.state.step + self._reports // self._trainer.reporters

    def _stop_at(self) -> int:
        """Return the batch of this epoch at which the next segment ends."""
        options, extent, state = self._run.config.run, self._run.extent, self.state
        steps = [extent.train_batches - state.batch, extent.stop - state.step]
        due = [
            item.steps
            for item in (options.eval_every, options.save_every)
            if item is not None and item.steps
        ]
        steps += [every - state.step % every for every in due]
        # the ranks of others meet where a segment ends, so what is watched may not end it
        if self._trainer.in_step:
            steps += [left for left in (self._tracer.left, self._profiler.left) if left]
        return state.batch + min(steps)

    def _note(self, progress: Progress) -> str:
        """Count a progress report, and log the steps if it is due; return "stop" to stop.

        Synchronous trainers report each step. Asynchronous ones report each gradient; a step counts
        one gradient per worker.
        """
        self._reports, self._last = self._reports + 1, progress
        if not self._run.group.is_root:
            return ""
        workers = self._trainer.reporters
        is_step = self._reports % workers == 0
        self.state.window.add(progress.totals.mean_over(workers, int(is_step)))
        if is_step and clock.now() >= self.reporter.due_s:
            self.reporter.progress(self._here())
        if is_step and is_due(self._step, self._run.config.run.log_every):
            self._log()
        limit_s = self._run.config.optimization.max_time
        if limit_s is not None and clock.now() - self._began >= limit_s:
            self._is_over = True
        return "stop" if self._recorder.asks_to_stop or self._is_over else ""

    def _here(self) -> RunState:
        """Return the state after the last reported step."""
        batch = self.state.batch + self._step - self.state.step
        return replace(self._on_time(), step=self._step, batch=batch)

    def _log(self) -> None:
        """Write a line of metrics on the steps since the last line, if there are any."""
        last, state = self._last, self._here()
        if state.window.samples:
            state.window.steps = max(state.window.steps, 1)
            more = self._trainer.details(last.totals)
            if self._run.backend.is_device:
                more["device_peak_bytes"] = self._run.backend.memory().peak_bytes
            if self._trainer.reporters > 1:
                more["workers"] = self._trainer.reporters
            if not self._trainer.in_step:
                more |= {"comm_bytes": None, "comm_calls": None}  # the segment's record has them
            lr = self.rate(max(state.step - 1, 0))
            self.reporter.steps(state, last.totals.grad_norm, lr, more)
        self.state.window = Totals()

    def _end_segment(self, number: int) -> None:
        """Evaluate, end the epoch and save if due; stop for a signal. Collective.

        Args:
            number: of the signal; 0 for none.

        Raises:
            Stopped: with a checkpoint of the last complete step.
        """
        ends_epoch = self.state.batch == self._run.extent.train_batches
        report = self._evaluate_if_due(ends_epoch)
        if self._run.config.run.callback and self._run.group.share(self._recorder.asks_to_stop):
            self.stopped, number = "as --callback asked", 0
        if self._run.config.optimization.max_time and self._run.group.share(self._is_over):
            self.stopped, number = "as --max-time is over", 0
        if ends_epoch or report or self._finished:
            self._note_row(report)
        if ends_epoch or self._finished:  # a run may end within an epoch
            self._end_epoch(report)
        elif report:
            self.reporter.between(self.state, report)
        if self._is_kept(report) or self._is_saving_due(ends_epoch):
            self._save()
        self._obey(number)

    def _evaluate_if_due(self, ends_epoch: bool) -> Evaluation | None:
        """Return the evaluation after this segment; None if none is due. Collective."""
        every = self._run.config.run.eval_every
        is_epoch_due = ends_epoch and is_due(self.state.epoch + 1, every.epochs)
        if not is_epoch_due and not is_due(self.state.step, every.steps):
            return None
        report = self._evaluate()
        self.reporter.evaluation("eval", self._on_time(), report)
        self.state = self._with_best(report)
        self._lose_patience()
        self._follow_plateau()
        return report

    def _is_kept(self, report: Evaluation | None) -> bool:
        """Return whether these weights are kept as the best so far, by this evaluation of them."""
        is_best = report is not None and self.state.best_step == self.state.step
        return is_best and self._run.config.run.keeps_best

    def _obey(self, number: int) -> None:
        """Save for a signal, and stop unless it was SIGCONT. Collective.

        Raises:
            Stopped: with a checkpoint of the last complete step.
        """
        if number and not self._finished:
            self._save()
            self.saver.wait()
            if number != WOKEN:
                self._tracer.finish()
                raise Stopped(
                    f"stopped by {signal.Signals(number).name} after step {self.state.step};"
                    f" {self._how_to_resume()}",
                    number,
                )
        if number == WOKEN:
            self._signals.forget_waking()

    def _end_epoch(self, report: Evaluation | None) -> None:
        """Report the epoch, with its evaluation if there was one. Collective."""
        totals, suffix = self._over_ranks(self.state.in_epoch)
        number = self.state.epoch + 1
        if self.state.batch == self._run.extent.train_batches:  # else the run ends within an epoch
            self.state.end_epoch()
        self.reporter.epoch(number, totals, report, self._trainer.summary(), suffix)

    def _over_ranks(self, totals: Totals) -> tuple[Totals, str]:
        """Return the totals with times averaged over the ranks, and a text on them. Collective.

        The stages of a pipeline meet in the sum of the losses at the end of a step. The first stage
        arrives last. A stage's waiting time there beyond the first one's is the drain of the
        pipeline: it counts as bubble (wait), not as synchronization.
        """
        group, pp = self._run.group, self._run.arrangement.mesh.pp
        if group.size == 1:
            return totals, ""
        if pp.size > 1:
            drained_s = totals.sync_s - min(pp.gather(totals.sync_s))
            totals = replace(
                totals, wait_s=totals.wait_s + drained_s, sync_s=totals.sync_s - drained_s
            )
        names = (*PARTS, "wall_s", "hidden_s")
        by_rank = group.gather_floats([getattr(totals, name) for name in names])
        means = dict(zip(names, by_rank.mean(axis=0).tolist(), strict=True))
        text = f"; mean over {group.size} ranks"
        if self._trainer.in_step:
            computing_s = by_rank[:, names.index("compute_s")]
            least_ms = f"{1e3 * totals.per_step(computing_s.min()):.2f}"
            most_ms = f"{1e3 * totals.per_step(computing_s.max()):.2f}"
            if least_ms != most_ms:
                slowest = computing_s.argmax()
                text += f", the slowest is rank {slowest}: {most_ms} ms of computing"
        return replace(totals, **means), text

    def rate(self, step: int) -> float:
        """Return a step's learning rate: the schedule's, as plateaus and callbacks scale it."""
        return self._run.schedule(step) * self.state.rate_scale

    def _note_row(self, report: Evaluation | None) -> None:
        """Add the epoch so far to the history, and call the callbacks. Collective."""
        state = self.state
        values = self.reporter.values(state.in_epoch)
        values["learning_rate"] = self.rate(max(state.step - 1, 0))
        if report is not None:
            values |= self.reporter.values(report, "test_")
        self.history.add(state.step, self._run.extent.passes(state), values)
        if self._callbacks:
            self._call_callbacks()

    def _call_callbacks(self) -> None:
        """Call each callback; follow the rate it sets, and stop if one rank's asks to. Collective.

        Raises:
            UsageError: on all ranks, for rates that differ.
            NnmpiError: on all ranks, for an exception in a callback, with its line.
        """
        group, at = self._run.group, max(self.state.step - 1, 0)
        for callback in self._callbacks:
            moment = Moment(self.state.step, self.rate(at), self._trainer, self.history)
            with agreed(group):
                try:
                    asks = asks_to_stop(callback, moment)
                except (NnmpiError, KeyboardInterrupt):
                    raise
                except Exception as error:
                    raise NnmpiError(fault(callback, ["moment"], error)) from error
            rates, stops = group.gather_floats([moment.lr, asks]).T.tolist()
            for rank, rate in enumerate(rates):
                if rate != rates[0]:
                    raise UsageError(
                        f"callback {name_of(callback)} set the learning rate to {rates[0]:g} on"
                        f" rank 0 and {rate:g} on rank {rank}; set it alike on all ranks"
                    )
            if moment.lr != self.rate(at):
                self._scale_rate(moment, name_of(callback))
            if any(stops):
                self.stopped = f"as callback {name_of(callback)} asked"

    def _scale_rate(self, moment: Moment, name: str) -> None:
        """Let the schedule go on from a rate that a callback has set.

        Raises:
            UsageError: for a rate that is none, and where the schedule's own is 0.
        """
        before = self._run.schedule(max(moment.step - 1, 0))
        if not (isfinite(moment.lr) and moment.lr >= 0 and before > 0):
            raise UsageError(
                f"callback {name} set the learning rate to {moment.lr:g} where the schedule has"
                f" {before:g}; give a number from 0, while the schedule is above 0"
            )
        self.state.rate_scale = moment.lr / before

    def _with_best(self, report: Evaluation) -> RunState:
        gain = self._run.config.run.least_gain
        return self.state.after_evaluation(report, self._run.metrics.best_by, gain)

    def _evaluate(self) -> Evaluation:
        """Return the evaluation of the current weights; once per step. Collective."""
        if self._evaluated is None or self._evaluated[0] != self.state.step:
            loader = self._run.inputs.test_loader
            epoch = partial(loader.epoch, 0, backend=self._run.backend)
            if loader.is_small and not self._tests:
                self._tests = list(epoch())
            with nullcontext(self._tests) if loader.is_small else epoch() as batches:
                self._evaluated = (
                    self.state.step,
                    self._trainer.evaluate(batches, metrics=self._run.metrics.chosen),
                )
        return self._evaluated[1]

    def _is_saving_due(self, ends_epoch: bool) -> bool:
        """Return whether a checkpoint is due. Collective."""
        every = self._run.config.run.save_every
        if not self._run.has_folder:
            return False
        if every is None:
            return ends_epoch and self._is_saving_affordable()
        is_epoch_due = ends_epoch and is_due(self.state.epoch, every.epochs)
        return is_epoch_due or is_due(self.state.step, every.steps)

    def _is_saving_affordable(self) -> bool:
        """Return whether checkpoints, with one now, take at most the share SAVING. Collective."""
        group = self._run.group
        limit_s = SAVING * (clock.now() - self._started)
        phase = CollectivePhase(group)
        answer = phase.attempt(self.saver.is_affordable, limit_s) if group.is_root else False
        # one message of a number: NaN says that rank 0 could not tell
        (shared,) = group.sum_floats([nan if answer is None else answer])
        if isnan(shared):
            phase.agree()
        return shared > 0

    def _save(self) -> None:
        """Write a checkpoint unless this step has one; see `Saver.save`. Collective."""
        if self._saved_step == self.state.step:
            return
        run, state = self._run, self._on_time()
        values = state_values(run.trainer, state)
        if state.step:
            values["rate"] = self.rate(state.step - 1)
        best_step = state.best_step if run.config.run.keeps_best else 0
        if run.config.data.dataset == FIT:  # the command's is in its metrics
            values["history"] = self.history.rows
        self.saver.save(run.trainer, state.step, values, run.metadata(), best_step)
        self._saved_step = state.step

    def _on_time(self) -> RunState:
        self.state.elapsed_s = clock.now() - self._began
        return self.state

    def _how_to_resume(self) -> str:
        """Return how to go on: a command with these ranks and code, or the program's call."""
        run, sync = self._run, self._run.config.sync
        if run.config.data.dataset == FIT:
            return (
                f"call nnmpi.fit(..., checkpoint={str(run.folder.path)!r}) again to continue"
                if run.has_folder
                else "nnmpi.fit(..., checkpoint=FOLDER) can be continued"
            )
        words = resume_words(run.folder.path, 1 if sync.simulate else run.group.size)
        if sync.simulate:
            words += f" {as_words('simulate', sync.simulate)}"
        if sync.network:
            words += f" {as_words('network', sync.network)}"
        if code_of(flatten(run.config)):
            words += " --trust"
        return f"continue with: nnmpi train {words}"


def is_due(count: int, every: int) -> bool:
    """Return whether this count is a multiple of `every`; 0 means never."""
    return every > 0 and count % every == 0
