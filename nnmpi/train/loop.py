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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from math import isfinite, isnan, nan
from shlex import quote
from types import FrameType
from typing import ClassVar, Self

import numpy as np

import nnmpi.base.clock as clock
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
        self._run, self._trainer, self.reporter = run, run.trainer, reporter
        self.report = Totals()
        self._recorder, self.stopped = recorder, ""
        self._signals = StopSignals()
        self._saved_step = state.step
        self._started = clock.now()
        self._began = self._started - state.elapsed_s
        self._saver = Saver(run.folder.checkpoints, recorder, run.group, root=run.folder.path)
        self._evaluated: tuple[int, Totals] | None = None  # the last evaluation and its step
        self._tests: list[Batch] = []  # the test data, if small
        self._tracer = Tracer(run, reporter.say)
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
        trainer, run = self._trainer, self._run
        with self._signals, self._saver:
            try:
                while not self._finished:
                    state, stop = self.state, self._stop_at()
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
                    if not trainer.in_step or state.step + report.batches == run.extent.stop:
                        self._log()
                    state.add(report.totals)
                    self._reports = 0
                    if report.batches and not trainer.in_step:
                        self.reporter.segment(self.state, report)
                    self._end_segment(report.signal)
                self._tracer.finish()
                self.reporter.say([*trainer.summary(), *trainer.memory()])
                self.report = self._evaluate()
                ends = self.stopped or self.state.step == run.extent.steps
                if run.config.run.keeps_best and ends:  # the run, and not at --stop-after
                    before, self.state = self.state, self._with_best(self.report)
                    if self.state != before:
                        self._saved_step = -1  # save again: the checkpoint says which is the best
                self._save()
                self._saver.wait()
            except KeyboardInterrupt:  # a second SIGINT: end without waiting for the other ranks
                raise Stopped(
                    f"interrupted in step {self._step + 1}; {self._how_to_resume()}", signal.SIGINT
                ) from None
        self.reporter.evaluation("test", self._on_time(), self.report)
        if not trainer.in_step:
            self.reporter.whole_run(self.state)

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
        options, ended = self._run.config.run, self.state.batch == self._run.extent.train_batches
        report = None
        if is_due(self.state.step, options.eval_every.steps) or (
            ended and is_due(self.state.epoch + 1, options.eval_every.epochs)
        ):
            report = self._evaluate()
            self.reporter.evaluation("eval", self._on_time(), report)
            self.state = self._with_best(report)
            self._lose_patience()
        if options.callback and self._run.group.share(self._recorder.asks_to_stop):
            self.stopped, number = "as --callback asked", 0
        if ended or self._finished:  # a run may end within an epoch
            self._end_epoch(report)
        elif report:
            self.reporter.between(self.state, report)
        best = options.keeps_best and report is not None and self.state.best_step == self.state.step
        if best or self._is_saving_due(ended):
            self._save()
        if number and not self._finished:
            self._save()
            self._saver.wait()
        if number == WOKEN:
            self._signals.forget_waking()
        elif number and not self._finished:
            self._tracer.finish()
            raise Stopped(
                f"stopped by {signal.Signals(number).name} after step {self.state.step};"
                f" {self._how_to_resume()}",
                number,
            )

    def _end_epoch(self, report: Totals | None) -> None:
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
        text, computing_s = f"; mean over {group.size} ranks", by_rank[:, names.index("compute_s")]
        if self._trainer.in_step:
            slowest = computing_s.argmax()
            least_ms, most_ms = (
                1e3 * totals.per_step(seconds) for seconds in (computing_s.min(), computing_s.max())
            )
            if f"{least_ms:.2f}" != f"{most_ms:.2f}":
                text += f", the slowest is rank {slowest}: {most_ms:.2f} ms of computing"
        return replace(totals, **means), text

    def _with_best(self, report: Totals) -> RunState:
        gain = self._run.config.run.least_gain
        return self.state.after_evaluation(report, self._run.inputs.best_by_loss, gain)

    def _evaluate(self) -> Totals:
        """Return the evaluation of the current weights; once per step. Collective."""
        if self._evaluated is None or self._evaluated[0] != self.state.step:
            loader = self._run.inputs.test_loader
            epoch = partial(loader.epoch, 0, backend=self._run.backend)
            if loader.is_small and not self._tests:
                self._tests = list(epoch())
            with nullcontext(self._tests) if loader.is_small else epoch() as batches:
                self._evaluated = self.state.step, self._trainer.evaluate(batches)
        return self._evaluated[1]

    def _is_saving_due(self, ended: bool) -> bool:
        """Return whether a checkpoint is due. Collective.

        By default one is due at the end of an epoch if checkpoints so far, with this one, take at
        most the share SAVING of the time.
        """
        every = self._run.config.run.save_every
        if every is not None:
            return is_due(self.state.step, every.steps) or (
                ended and is_due(self.state.epoch, every.epochs)
            )
        if not ended:
            return False
        limit_s, group = SAVING * (clock.now() - self._started), self._run.group
        phase = CollectivePhase(group)
        due = phase.attempt(self._saver.is_affordable, limit_s) if group.is_root else False
        (answer,) = group.sum_floats([nan if due is None else due])  # one message of a number
        if isnan(answer):
            phase.agree()
        return answer > 0

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
        callback = (
            load_custom(config.run.callback, "--callback", "(record)")
            if config.run.callback
            else None
        )
        _check_callback(config.run.callback, callback)
    # The worker raises an error for a loss that overflows. NumPy would warn before, on each rank.
    with explain_errors(backend), np.errstate(all="ignore"), ExitStack() as stack:

        def take() -> None:
            stack.enter_context(locked(folder.path, PATIENCE_S))

        on_root(group, take if resuming else folder.check_free)
        last = find(folder, group) if resuming else None
        if last is not None and config.run.quiet:
            last.warn(group)
        chosen = None
        if config.parallel.layout == "auto":
            chosen = offered("choose_layout")(config, group, backend, console.say)
            config = chosen.config
        run = set_up(config, group, backend, folder, last, console.say, stack)
        if chosen is None and group.size > 1 and on_root(group, _has_plans):
            sets = run.inputs.train, run.inputs.test
            with suppress(NnmpiError):  # on all ranks: a run goes on without its price
                chosen = offered("foresee_layout")(run.config, sets, group, backend, console.say)
        facts, settled = header(run), run.settled()
        first = RunState(samples=len(run.inputs.train), data=run.inputs.identity)
        state, notices = restore(run.trainer, last, folder, first) if resuming else (first, [])
        if resuming and group.is_root and not folder.finished.exists():
            notices.append(
                f"{folder.path} had not come to its end: it has no {folder.finished.name}"
            )
        if resuming and group.is_root:
            notices.extend(_lost_best(run, state))
        if not 0 <= state.batch <= run.extent.train_batches:
            raise CheckpointError(
                f"{folder.checkpoints}: the last one is after batch {shortened(str(state.batch))}"
            )
        if resuming and state.step < run.extent.steps:
            notices.extend(_changed_rate(run, last, state.step))
        if state.step >= run.extent.stop:
            notices = [*notices, _how_to_continue(run)]

        newest = candidates(folder.checkpoints)[:1] if group.is_root else []

        def open_folder() -> None:
            if resuming:
                folder.remember()
            else:
                folder.make()
                take()
                folder.claim()
            # config.json is first: with it, the folder is a run's, which can be resumed
            folder.create(settled)
            folder.keep_tokenizer(run.tokenizer)
            folder.note_start(words, group.size, group.comm.world.library, facts)
            if resuming:
                folder.reopen()
            cut_metrics(folder.metrics, state.step)

        try:
            on_root(group, open_folder)
        except BaseException:
            if group.is_root:
                folder.withdraw()
            raise
        try:
            if group.is_root:
                stack.enter_context(console.copied(folder.console))
            console.say(*(() if chosen is None else chosen.lines))
            console.say(*(f"{name + ':':<12} {text}" for name, text in facts), *notices)
            with MetricsRecorder(folder if group.is_root else None, callback) as recorder:
                loop = Loop(run, state, Reporter(run, console, recorder), recorder)
                yield loop
        except NnmpiError as error:
            is_refused = isinstance(error, UsageError | ShapeError)
            # as its first steps were, before a checkpoint
            if group.is_root and is_refused and candidates(folder.checkpoints)[:1] == newest:
                folder.withdraw()
            folder.note_error(error)  # by the first rank that gets here
            raise
        _finish(run, loop, console)
        if group.is_root:
            if chosen is not None:
                console.say(*chosen.compare(run.inputs.batch_size, read_metrics(folder.metrics)))
            console.say(f"curves: nnmpi report {quote(str(folder.path))}")


def _has_plans() -> bool:
    """Whether the lab is there and has measured a model's parts: then a layout may have a price."""
    with suppress(UsageError, OSError):
        return any(cache_folder().glob("profile-*.json")) and callable(offered("foresee_layout"))
    return False


def _check_callback(name: Custom | None, callback: Callable[..., object] | None) -> None:
    """Refuse a callback that cannot be called with one record, before any work.

    Raises:
        UsageError: naming the right form.
    """
    if name is None or callback is None:
        return
    try:
        signature(callback).bind({})
    except TypeError as error:
        raise UsageError(f"--callback {name}: {error}; define {name.function}(record)") from None
    except ValueError:  # a function in C, which tells nothing of its arguments
        return


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


def _finish(run: TrainingRun, loop: Loop, console: Console) -> None:
    """Write a GPT's weights and finished.json, and print the summary. Collective.

    finished.json proves that all ranks have reached the end, or the limit of --stop-after: its
    "step" is then below its "of_steps". "stopped" says why a run has ended earlier. The launcher's
    status proves nothing: MPICH's mpirun reports success if a rank exits early with status 0.
    """
    folder, options, tokenizer, group = run.folder, run.config.model, run.tokenizer, run.group
    state, report, reporter, stopped = loop.state, loop.report, loop.reporter, loop.stopped
    gpt = options.model == "gpt" and options.experts is None  # GPT-2's files have no experts
    with run.trainer.averaged():
        weights = run.trainer.state()[0].to_dict() if gpt else {}
    last_steps, measures = group.gather(state.step), reporter.measures(report)
    loss, quality = describe_result(report, measures, run.inputs.train.is_tokens)

    def write() -> None:
        saved = (
            f"its last checkpoint is complete: make room, and continue with --resume {folder.path}"
        )
        with raised_as(
            CheckpointError, f"the end of the run cannot be written into {folder.path}", saved
        ):
            if gpt:  # in the format of Hugging Face's transformers
                end = None if tokenizer is None else tokenizer.end
                save_pretrained(folder.model, weights, heads_of(options), dropout_of(options), end)
                if tokenizer is not None:
                    tokenizer.save(folder.model)
            stored = read_json(candidates(folder.checkpoints)[0] / STATE_FILE)
            numbers = {"loss": report.loss, "accuracy": nan} | measures
            proof = {
                "step": state.step,
                "of_steps": run.extent.steps,
                "ranks": len(last_steps),
                **({"stopped": stopped} if stopped else {}),
                **{name: value if isfinite(value) else None for name, value in numbers.items()},
                "weights_sha256": stored["files"][MODEL_FILE]["sha256"],
            }
            write_json(folder.finished, proof)

    on_root(group, write)
    run.trainer.release()  # free MPI's requests and communicators before MPI ends
    is_final = state.step >= run.extent.steps
    how = f"stopped after {state.step} of {run.extent.steps} steps, {stopped}"
    console.say(
        *([] if is_final else [how if stopped else _how_to_continue(run)]),
        f"test {quality} ({loss}) with the {'final' if is_final else 'present'} weights"
        f"{reporter.best(state, report)}",
        f"{counted(state.step, 'step')} in {format_duration(state.elapsed_s)}; "
        f"weights and metrics are in {folder.path}",
        *([f"memory of the device: {run.backend.memory()}"] if run.backend.is_device else []),
    )
