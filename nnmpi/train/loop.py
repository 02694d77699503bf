"""The training loop: epochs, evaluations, checkpoints, and stopping on a signal.

The loop cuts training into segments, which end at steps with an evaluation, a checkpoint or the end
of an epoch. The trainer trains a segment without returning to the loop: asynchronous workers meet
only at its end. With 235 batches in an epoch and --save-every 100steps:

    step    0 ------------ 100 ------------ 200 ------- 235
            |   segment     |    segment     |  segment  |
                        checkpoint       checkpoint   evaluation, checkpoint

At the end of a segment come metrics, evaluation, checkpoint, stop. In this order a checkpoint
includes all records up to its step.

`begin` surrounds the loop: it locks the folder, restores a checkpoint and prints the header, and at
the end writes finished.json and the summary.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from math import isfinite, isnan, nan
from shlex import quote
from types import FrameType
from typing import Any, ClassVar, Self

import numpy as np

import nnmpi.base.clock as clock
from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.base.command import Console, as_words
from nnmpi.base.custom import Custom, load_custom
from nnmpi.base.errors import (
    CheckpointError,
    NnmpiError,
    ShapeError,
    UsageError,
    counted,
    raised_as,
    shortened,
)
from nnmpi.base.files import cache_folder, locked, read_json, write_json
from nnmpi.base.units import format_duration
from nnmpi.base.wings import offered
from nnmpi.comm.agreement import CollectivePhase, agreed, on_root
from nnmpi.comm.group import Group
from nnmpi.comm.world import WARNING_S
from nnmpi.compose.evaluation import Evaluation
from nnmpi.compose.stats import PARTS, StepReport, Totals
from nnmpi.compose.trainer import Progress
from nnmpi.data.loader import Batch
from nnmpi.models.pretrained import save_pretrained
from nnmpi.train.checkpoint import (
    MODEL_FILE,
    STATE_FILE,
    Checkpoint,
    RunState,
    Saver,
    candidates,
    find,
    restore,
    state_values,
    step_of,
    steps,
)
from nnmpi.train.computing import check_backend, explain_errors, make_backend
from nnmpi.train.config import Config, flatten
from nnmpi.train.derived import dropout_of, heads_of
from nnmpi.train.folder import RunFolder, code_of, resume_words
from nnmpi.train.header import header
from nnmpi.train.log import Reporter, describe_result
from nnmpi.train.metrics import MetricsRecorder, cut_metrics, read_metrics
from nnmpi.train.run import TrainingRun, set_up
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
            StopSignals._main = self
            self.callback(setattr, StopSignals, "_main", None)
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


class Loop:
    """Train a run from a state to the end.

    Args:
        run: to train.
        state: to begin with.
        reporter: prints and records.
        recorder: of the metrics, which are synced to disk before a checkpoint.

    Attributes:
        state: of the run, at the end of the last segment.
        report: the evaluation of the final weights, after `run`.
        stopped: why the training has ended before its last step; empty if it has not.
    """

    def __init__(
        self, run: TrainingRun, state: RunState, reporter: Reporter, recorder: MetricsRecorder
    ) -> None:
        self.state = state
        self.reporter = reporter
        self.report = Evaluation()
        self.stopped = ""
        self._run, self._trainer = run, run.trainer
        self._recorder = recorder
        self._signals = StopSignals()
        self._tracer = Tracer(run, reporter.say)
        self._saver = Saver(run.folder.checkpoints, recorder, run.group, root=run.folder.path)
        self._saved_step = state.step
        self._started = clock.now()
        self._began = self._started - state.elapsed_s  # as if the run had never been interrupted
        self._evaluated: tuple[int, Evaluation] | None = None  # the last evaluation and its step
        self._tests: list[Batch] = []  # the test data, if small
        self._reports = 0  # progress reports in this segment: steps, or workers' gradients
        self._last = Progress(0, 0, StepReport())  # the last report
        self._lose_patience()  # a resumed run may have none left

    def run(self) -> None:
        """Train to the last step, save, and evaluate the final weights on the test data.

        Raises:
            DivergenceError: for a loss or gradient that is not finite; older checkpoints are
                intact.
            CheckpointError: when a checkpoint cannot be written.
            Stopped: after a signal, with a checkpoint of the last complete step.
        """
        with self._signals, self._saver:
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
        with self._tracer.steps(stop - state.batch):
            report = trainer.run(
                run.inputs.train_loader,
                state.epoch,
                state.batch,
                stop,
                state.step,
                run.schedule,
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
        self.reporter.say([*self._trainer.summary(), *self._trainer.memory()])
        self.report = self._evaluate()
        is_whole_run = self.stopped or self.state.step == run.extent.steps  # else: --stop-after
        if run.config.run.keeps_best and is_whole_run:
            with_best = self._with_best(self.report)
            if with_best != self.state:
                self._saved_step = -1  # save again: the checkpoint says which is the best
            self.state = with_best
        self._save()
        self._saver.wait()

    @property
    def _finished(self) -> bool:
        return self.state.step >= self._run.extent.stop or bool(self.stopped)

    def _lose_patience(self) -> None:
        """Stop if as many evaluations as --early-stopping have not beaten the best one."""
        options, state = self._run.config.run, self.state
        every, batches = options.eval_every, self._run.extent.train_batches
        size = every.steps or every.epochs * batches
        if options.early_stopping and (
            state.step // size - state.best_step // size >= options.early_stopping
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
        if self._tracer.left:
            steps.append(self._tracer.left)
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
        return "stop" if self._recorder.asks_to_stop else ""

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
            lr = self._run.schedule(max(state.step - 1, 0))
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
            self._saver.wait()
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
        if every is None:
            return ends_epoch and self._is_saving_affordable()
        is_epoch_due = ends_epoch and is_due(self.state.epoch, every.epochs)
        return is_epoch_due or is_due(self.state.step, every.steps)

    def _is_saving_affordable(self) -> bool:
        """Return whether checkpoints, with one now, take at most the share SAVING. Collective."""
        group = self._run.group
        limit_s = SAVING * (clock.now() - self._started)
        phase = CollectivePhase(group)
        answer = phase.attempt(self._saver.is_affordable, limit_s) if group.is_root else False
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
            values["rate"] = run.schedule(state.step - 1)
        best_step = state.best_step if run.config.run.keeps_best else 0
        self._saver.save(run.trainer, state.step, values, run.metadata(), best_step)
        self._saved_step = state.step

    def _on_time(self) -> RunState:
        self.state.elapsed_s = clock.now() - self._began
        return self.state

    def _how_to_resume(self) -> str:
        """Return the command that goes on, with these ranks and the code that they executed."""
        run, sync = self._run, self._run.config.sync
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


PATIENCE_S = 5.0  # wait for the folder's lock: a killed job may still hold it for a moment


@contextmanager
def begin(
    config: Config, group: Group, console: Console, words: Sequence[str] = ()
) -> Iterator[Loop]:
    """Yield the training loop of a configuration, in `config.run.out`; end its run. Collective.

        with begin(config, group, console) as loop:
            loop.run()

    Args:
        config: of the run, equal on all ranks.
        group: all ranks of the run.
        console: prints on rank 0.
        words: of the command line, for starts.jsonl.

    Raises:
        UsageError: for a folder in use or not writable, and options that do not fit the data or the
            number of ranks.
        DataError: for missing or damaged data.
        DeviceError: for a missing device, or too little memory.
        CheckpointError: for checkpoints that are damaged or cannot be written.
    """
    assert config.run.out is not None
    folder, resuming = RunFolder(config.run.out), config.run.resume is not None
    group.comm.world.watch(WARNING_S, config.run.stall_limit, folder.path)
    backend = make_backend(config.run.backend, group, config.parallel.memory_limit)
    with agreed(group):
        check_backend(config, backend)
        callback = _load_callback(config.run.callback)
    # The worker raises an error for a loss that overflows. NumPy would warn before, on each rank.
    with explain_errors(backend), np.errstate(all="ignore"), ExitStack() as stack:

        def lock() -> None:
            stack.enter_context(locked(folder.path, PATIENCE_S))

        on_root(group, lock if resuming else folder.check_free)
        last = find(folder, group) if resuming else None
        if last is not None and config.run.quiet:
            last.warn(group)
        run, foreseen = _set_up(config, group, backend, folder, last, console, stack)
        facts = header(run)
        state, notices = _first_state(run, last, resuming)
        _open_folder(run, state.step, words, facts, None if resuming else lock)
        with _noting_errors(run):
            if group.is_root:
                stack.enter_context(console.copied(folder.console))
            if foreseen is not None:
                console.say(*foreseen.lines)
            console.say(*(f"{name + ':':<12} {text}" for name, text in facts), *notices)
            with MetricsRecorder(folder if group.is_root else None, callback) as recorder:
                loop = Loop(run, state, Reporter(run, console, recorder), recorder)
                yield loop
        _finish(run, loop, console)
        if group.is_root:
            if foreseen is not None:
                console.say(*foreseen.compare(run.inputs.batch_size, read_metrics(folder.metrics)))
            console.say(f"curves: nnmpi report {quote(str(folder.path))}")


def _load_callback(name: Custom | None) -> Callable[..., object] | None:
    """Return the function of --callback; refuse one that cannot be called with one record.

    Raises:
        UsageError: naming the right form.
    """
    if not name:
        return None
    callback: Callable[..., object] = load_custom(name, "--callback", "(record)")
    try:
        signature(callback).bind({})
    except TypeError as error:
        raise UsageError(f"--callback {name}: {error}; define {name.function}(record)") from None
    except ValueError:  # a function in C, which tells nothing of its arguments
        pass
    return callback


def _set_up(
    config: Config,
    group: Group,
    backend: Backend,
    folder: RunFolder,
    last: Checkpoint | None,
    console: Console,
    stack: ExitStack,
) -> tuple[TrainingRun, Any]:
    """Return a run, and what the lab foresees of its layout; None if nothing. Collective.

    `--layout auto` chooses the layout first. Any other gets a price if the machine is known.

    Args: see `set_up`.
    """
    if config.parallel.layout == "auto":
        chosen = offered("choose_layout")(config, group, backend, console.say)
        run = set_up(chosen.config, group, backend, folder, last, console.say, stack)
        return run, chosen
    run = set_up(config, group, backend, folder, last, console.say, stack)
    foreseen = None
    if group.size > 1 and on_root(group, _has_plans):
        sets = run.inputs.train, run.inputs.test
        with suppress(NnmpiError):  # on all ranks: a run goes on without its price
            foreseen = offered("foresee_layout")(run.config, sets, group, backend, console.say)
    return run, foreseen


def _has_plans() -> bool:
    """Whether the lab is there and has measured a model's parts: then a layout may have a price."""
    with suppress(UsageError, OSError):
        return any(cache_folder().glob("profile-*.json")) and callable(offered("foresee_layout"))
    return False


def _first_state(
    run: TrainingRun, last: Checkpoint | None, resuming: bool
) -> tuple[RunState, list[str]]:
    """Return the state in which this start begins, and lines to print. Collective.

    Args:
        run: its trainer is restored.
        last: the checkpoint to resume from, if there is one.
        resuming: whether the run was started before.

    Raises:
        CheckpointError, DataError: on all ranks, see `restore`.
    """
    state, notices = RunState(samples=len(run.inputs.train), data=run.inputs.identity), list[str]()
    if resuming:
        state, notices = restore(run.trainer, last, run.folder, state)
        if run.group.is_root:
            notices.extend([*_interrupted(run.folder), *_lost_best(run, state)])
        if not 0 <= state.batch <= run.extent.train_batches:
            raise CheckpointError(
                f"{run.folder.checkpoints}: the last one is after batch"
                f" {shortened(str(state.batch))}"
            )
        if state.step < run.extent.steps:
            notices.extend(_changed_rate(run, last, state.step))
    if state.step >= run.extent.stop:
        notices.append(_how_to_continue(run))
    return state, notices


def _interrupted(folder: RunFolder) -> list[str]:
    """Return a line if no start of a run has come to its end."""
    if folder.finished.exists():
        return []
    return [f"{folder.path} had not come to its end: it has no {folder.finished.name}"]


def _changed_rate(run: TrainingRun, last: Checkpoint | None, step: int) -> list[str]:
    """Return a line if the schedule is no longer that of a checkpoint, as with other --epochs."""
    before = last.values.get("rate") if last is not None else None
    if before is None or before == run.schedule(step - 1):
        return []
    return [
        f"the learning rate follows another schedule, of {run.extent.steps} steps: step {step} had"
        f" the rate {before:.4g}, and step {step + 1} has {run.schedule(step):.4g}"
    ]


def _lost_best(run: TrainingRun, state: RunState) -> list[str]:
    """Return a line if the best weights so far should have been kept and are not there any more.

    They went when better ones came, with whose checkpoint, damaged since, the run cannot continue.
    """
    step, there = state.best_step, map(step_of, steps(run.folder.checkpoints))
    if not run.config.run.keeps_best or not step or step in there:
        return []
    return [
        f"the weights of the best evaluation so far, of step {step}, are gone; the next better ones"
        " are kept"
    ]


def _how_to_continue(run: TrainingRun) -> str:
    """Return the option that has ended training, and how to train longer."""
    options, extent = run.config.optimization, run.extent
    if extent.stop < extent.steps:
        return (
            f"the run stops after {extent.stop} of {extent.steps} steps, the limit of --stop-after;"
            " without it the run continues"
        )
    if options.max_steps is not None and extent.steps == options.max_steps:
        many, more = f"{extent.steps} steps", "a larger --max-steps to continue"
    else:
        many, more = f"{extent.epochs} epochs", f"more, such as --epochs {2 * extent.epochs}"
    return f"the run is finished, all {many} are done; give {more}"


def _open_folder(
    run: TrainingRun,
    step: int,
    words: Sequence[str],
    facts: Sequence[tuple[str, str]],
    lock: Callable[[], None] | None,
) -> None:
    """Make a new run's folder, or reopen a resumed run's, and note this start there. Collective.

    Args:
        run: to begin or to go on with.
        step: of its state; later metrics are removed.
        words: of the command line.
        facts: of the header.
        lock: locks a new folder; None for a resumed run's, which is locked.

    Raises:
        UsageError: on all ranks, when it cannot be written. What this start has made there is
            removed.
    """
    folder, settled = run.folder, run.settled()

    def write() -> None:
        if lock is None:
            folder.remember()
        else:
            folder.make()
            lock()
            folder.claim()
        # config.json is first: with it, the folder is a run's, which can be resumed
        folder.create(settled)
        folder.keep_tokenizer(run.tokenizer)
        folder.note_start(words, run.group.size, run.group.comm.world.library, facts)
        if lock is None:
            folder.reopen()
        cut_metrics(folder.metrics, step)

    try:
        on_root(run.group, write)
    except BaseException:
        if run.group.is_root:
            folder.withdraw()
        raise


@contextmanager
def _noting_errors(run: TrainingRun) -> Iterator[None]:
    """Note an error of the body in the run's folder.

    A start that is refused before it has written a checkpoint, as its first steps were, leaves
    nothing there.
    """
    folder, is_root = run.folder, run.group.is_root
    newest = candidates(folder.checkpoints)[:1] if is_root else []
    try:
        yield
    except NnmpiError as error:
        is_refused = isinstance(error, UsageError | ShapeError)
        if is_root and is_refused and candidates(folder.checkpoints)[:1] == newest:
            folder.withdraw()
        folder.note_error(error)  # by the first rank that gets here
        raise


def _finish(run: TrainingRun, loop: Loop, console: Console) -> None:
    """Write a GPT's weights and finished.json, and print the summary. Collective.

    finished.json proves that all ranks have reached the end, or the limit of --stop-after: its
    "step" is then below its "of_steps". "stopped" says why a run has ended earlier. The launcher's
    status proves nothing: MPICH's mpirun reports success if a rank exits early with status 0.
    """
    folder, group, model = run.folder, run.group, run.config.model
    is_gpt = model.model == "gpt" and model.experts is None  # GPT-2's files have no experts
    with run.trainer.averaged():
        weights = run.trainer.state()[0].to_dict() if is_gpt else {}
    last_steps = group.gather(loop.state.step)

    def write() -> None:
        saved = (
            f"its last checkpoint is complete: make room, and continue with --resume {folder.path}"
        )
        with raised_as(
            CheckpointError, f"the end of the run cannot be written into {folder.path}", saved
        ):
            if is_gpt:
                _save_gpt(run, weights)
            write_json(folder.finished, _proof(run, loop, len(last_steps)))

    on_root(group, write)
    run.trainer.release()  # free MPI's requests and communicators before MPI ends
    console.say(*_last_lines(run, loop))


def _save_gpt(run: TrainingRun, weights: Mapping[str, Array]) -> None:
    """Write a GPT's weights and tokenizer in the format of Hugging Face's transformers."""
    folder, options, tokenizer = run.folder.model, run.config.model, run.tokenizer
    end = None if tokenizer is None else tokenizer.end
    save_pretrained(folder, weights, heads_of(options), dropout_of(options), end)
    if tokenizer is not None:
        tokenizer.save(folder)


def _proof(run: TrainingRun, loop: Loop, ranks: int) -> dict[str, Any]:
    """Return what finished.json says."""
    stored = read_json(candidates(run.folder.checkpoints)[0] / STATE_FILE)
    proof: dict[str, Any] = {
        "step": loop.state.step,
        "of_steps": run.extent.steps,
        "ranks": ranks,
    }
    if loop.stopped:
        proof["stopped"] = loop.stopped
    for name, value in {"loss": loop.report.loss, "accuracy": nan, **loop.report.metrics}.items():
        proof[name] = value if isfinite(value) else None
    proof["weights_sha256"] = stored["files"][MODEL_FILE]["sha256"]
    return proof


def _last_lines(run: TrainingRun, loop: Loop) -> list[str]:
    """Return the summary of a run that has ended."""
    state, report, lines = loop.state, loop.report, list[str]()
    loss, quality = describe_result(report, report.metrics, run.inputs.train.is_tokens)
    is_final = state.step >= run.extent.steps
    if not is_final and loop.stopped:
        lines.append(f"stopped after {state.step} of {run.extent.steps} steps, {loop.stopped}")
    elif not is_final:
        lines.append(_how_to_continue(run))
    weights = f"the {'final' if is_final else 'present'} weights"
    best = loop.reporter.best(state, report)
    duration = f"{counted(state.step, 'step')} in {format_duration(state.elapsed_s)}"
    lines.append(f"test {quality} ({loss}) with {weights}{best}")
    lines.extend(loop.reporter.asked(report))
    lines.append(f"{duration}; weights and metrics are in {run.folder.path}")
    if run.backend.is_device:
        lines.append(f"memory of the device: {run.backend.memory()}")
    return lines
