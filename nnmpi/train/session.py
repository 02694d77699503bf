"""What is around the loop: the folder is taken, a checkpoint restored, the header printed; the end proved and told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite, nan
from shlex import quote

import numpy as np

from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.group import Group
from nnmpi.comm.world import WARNING_S
from nnmpi.command import Console
from nnmpi.compose.stats import Totals
from nnmpi.errors import CheckpointError, ShapeError, UsageError, counted
from nnmpi.files import locked, write_atomically
from nnmpi.models.pretrained import read_size, save_pretrained
from nnmpi.reading import read_json
from nnmpi.train.build import dropout_of
from nnmpi.train.checkpoint import MODEL_FILE, STATE_FILE, RunState, find, restore, steps
from nnmpi.train.computing import check_backend, explained, take_backend
from nnmpi.train.config import Config
from nnmpi.train.folder import RunFolder
from nnmpi.train.header import header
from nnmpi.train.log import Reporter
from nnmpi.train.loop import Loop
from nnmpi.train.metrics import MetricsRecorder, cut_metrics, read_metrics
from nnmpi.train.run import TrainingRun, set_up
from nnmpi.units import format_duration

PATIENCE_S = 5.0  # for a job in the same folder that is just being killed


@contextmanager
def begin(config: Config, group: Group, console: Console, words: Sequence[str] = ()) -> Iterator[Loop]:
    """Give the loop that trains with this configuration, in the folder `config.run.out`, and end its run. Collective.

        with begin(config, group, console) as loop:
            loop.run()

    Args:
        config: every option, the same on every rank.
        group: all ranks of the run.
        console: prints on rank 0.
        words: of the command line, to be written down.

    Raises:
        UsageError: for a folder that is taken or cannot be written, and options that do not fit data or world.
        DataError: for files that cannot be had or are damaged.
        DeviceError: for a backend that is not there, or too little memory.
        CheckpointError: for checkpoints that are damaged or cannot be written.
    """
    assert config.run.out is not None
    folder, resuming = RunFolder(config.run.out), config.run.resume is not None
    group.comm.world.watch(WARNING_S, config.run.stall_limit, folder.path)
    local_rank = group.local_rank()
    backend = take_backend(config.run.backend, group, local_rank, config.parallel.memory_limit_bytes)
    with agreed(group):
        check_backend(config.run, backend)
    # A loss that overflows is found and explained by the worker; NumPy's warnings would come first, once per rank.
    with explained(backend), np.errstate(all="ignore"), ExitStack() as stack:

        def take() -> None:
            stack.enter_context(locked(folder.path, PATIENCE_S))

        on_root(group, take if resuming else folder.check_free)
        last = find(folder, group) if resuming else None
        chosen = None
        if config.parallel.layout == "auto":
            from nnmpi.train.planner.auto_layout import check_open, choose  # the planner, which other starts do without

            with agreed(group):
                check_open(config.parallel, config.sync.rule.asynchronous, resuming)
            chosen = choose(config, group, backend, local_rank, console.say)
            config = chosen.config
        computing = None if chosen is None else chosen.computing
        run = set_up(config, group, backend, folder, last, console.say, local_rank, computing, stack)
        facts, settled = header(run), run.settled()
        first = RunState(samples=len(run.inputs.train), data=run.inputs.identity)
        state, notices = restore(run.trainer, last, folder, first) if resuming else (first, [])
        if resuming and group.is_root and not folder.finished.exists():
            notices.append(f"{folder.path} had not come to its end: it has no {folder.finished.name}")
        if state.step >= run.extent.steps:
            notices = [*notices, f"the run is finished, {_how_to_go_on(run)}"]

        def take_folder() -> None:
            if not resuming:
                folder.make()
                take()
                folder.check_free()  # once more: another job may have come first
            folder.keep_tokenizer(run.tokenizer)
            folder.create(settled)
            folder.note_start(words, group.size, group.comm.world.library, facts)
            folder.finished.unlink(missing_ok=True)
            cut_metrics(folder.metrics, state.step)

        on_root(group, take_folder)
        try:
            if group.is_root:
                stack.enter_context(console.copied(folder.console))
            console.say(*(() if chosen is None else chosen.lines))
            console.say(*(f"{name + ':':<12} {text}" for name, text in facts), *notices)
            with MetricsRecorder(folder if group.is_root else None, state.step) as recorder:
                loop = Loop(run, state, Reporter(run, console, recorder), recorder)
                yield loop
        except (UsageError, ShapeError):
            if group.is_root and not resuming and not folder.checkpoints.exists():
                folder.withdraw()
            raise
        _finish(run, loop.state, loop.report, console, loop.reporter)
        if group.is_root:
            if chosen is not None:
                console.say(*chosen.compare(run.inputs.batch_size, read_metrics(folder.metrics)))
            console.say(f"curves: python -m nnmpi.report {quote(str(folder.path))}")


def _how_to_go_on(run: TrainingRun) -> str:
    """Return what is done, and what would do more."""
    options, extent = run.config.optimization, run.extent
    if options.max_steps is not None and extent.steps == options.max_steps:
        return f"all {extent.steps} steps are done; a larger --max-steps goes on"
    return f"all {extent.epochs} epochs are done; more --epochs, such as {2 * extent.epochs}, go on"


def _finish(run: TrainingRun, state: RunState, report: Totals, console: Console, reporter: Reporter) -> None:
    """Leave a GPT's weights, prove that the run is finished when each rank has said so, and tell. Collective.

    A launcher may tell of success where a rank has left early: MPICH's does, if that rank's own status was 0.
    """
    folder, options, tokenizer, group = run.folder, run.config.model, run.tokenizer, run.group
    gpt = options.model == "gpt"
    weights = run.trainer.state()[0].to_dict() if gpt else {}
    last_steps, measures = group.gather(state.step), reporter.measures(report)

    def write() -> None:
        with _explained(folder):
            if gpt:  # as Hugging Face's transformers reads it
                heads = options.sizes[2] if options.pretrained is None else read_size(options.pretrained).heads
                end = None if tokenizer is None else tokenizer.end
                save_pretrained(folder.model, weights, heads, dropout_of(options), end)
                if tokenizer is not None:
                    tokenizer.save(folder.model)
            stored = read_json(steps(folder.checkpoints)[0] / STATE_FILE)
            numbers = {"loss": report.loss, "accuracy": nan} | measures
            proof = {
                "step": state.step,
                "ranks": len(last_steps),
                **{name: value if isfinite(value) else None for name, value in numbers.items()},
                "weights_sha256": stored["files"][MODEL_FILE]["sha256"],
            }
            write_atomically(folder.finished, json.dumps(proof, indent=1).encode() + b"\n")

    on_root(group, write)
    run.trainer.release()  # requests and communicators go back before the program ends
    console.say(
        f"test {reporter.quality(report)} ({reporter.losses(report)}) with the final weights"
        f"{reporter.best(state, report)}",
        f"{counted(state.step, 'step')} in {format_duration(state.elapsed_s)}; "
        f"weights and metrics are in {folder.path}",
        *([f"memory of the device: {run.backend.memory()}"] if run.backend.is_device else []),
    )


@contextmanager
def _explained(folder: RunFolder) -> Iterator[None]:
    """Turn the system's refusals at the end of a run into a sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the end of the run cannot be written into {folder.path} ({error.strerror or error}); its last checkpoint "
            f"is whole: make room, and go on with --resume {folder.path}"
        ) from None
