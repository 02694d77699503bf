"""A run from its options to its summary: the folder, the checkpoint to go on from, the header.

`begin` surrounds the training loop (`loop.Loop`): it locks the folder, restores a checkpoint and
prints the header, and at the end writes finished.json and the summary. A run of `nnmpi.fit` may
have no folder.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import isfinite, nan
from shlex import quote
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.base.command import Console, broken
from nnmpi.base.custom import Custom, load_custom
from nnmpi.base.errors import (
    CheckpointError,
    DataError,
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
from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.group import Group
from nnmpi.comm.world import WARNING_S
from nnmpi.compose.state import base_digest
from nnmpi.data.dataset import Samples
from nnmpi.models.adapter import read_adapter, write_adapter
from nnmpi.models.pretrained import layer_names, read_size, save_pretrained
from nnmpi.train.checkpoint import (
    MODEL_FILE,
    STATE_FILE,
    Checkpoint,
    RunState,
    candidates,
    find,
    restore,
    step_of,
    steps,
)
from nnmpi.train.computing import check_backend, explain_errors, make_backend
from nnmpi.train.config import TRANSFORMERS, Config, ModelConfig
from nnmpi.train.derived import dropout_of, size_of
from nnmpi.train.folder import RunFolder
from nnmpi.train.header import header
from nnmpi.train.log import Reporter, describe_result
from nnmpi.train.loop import Callback, History, Loop
from nnmpi.train.metrics import MetricsRecorder, cut_metrics, read_metrics
from nnmpi.train.run import NOWHERE, TrainingRun, set_up

PATIENCE_S = 5.0  # wait for the folder's lock: a killed job may still hold it for a moment


@dataclass(frozen=True)
class Given:
    """What a program gives to its run besides the options; see `nnmpi.fit`.

    Attributes:
        samples: of training and test.
        callbacks: see `Loop`.
        show: called on rank 0 with the rows of the history; see `History`.
    """

    samples: tuple[Samples, Samples]
    callbacks: Sequence[Callback] = ()
    show: Callable[[Any], object] = len


@contextmanager
def begin(
    config: Config,
    group: Group,
    console: Console,
    words: Sequence[str] = (),
    given: Given | None = None,
) -> Iterator[Loop]:
    """Yield the training loop of a configuration, in `config.run.out`; end its run. Collective.

        with begin(config, group, console) as loop:
            loop.run()

    Args:
        config: of the run, equal on all ranks.
        group: all ranks of the run.
        console: prints on rank 0.
        words: of the command line, for starts.jsonl.
        given: by a program, whose run may have no folder; None for the command's.

    Raises:
        UsageError: for a folder in use or not writable, and options that do not fit the data or the
            number of ranks.
        DataError: for missing or damaged data.
        DeviceError: for a missing device, or too little memory.
        CheckpointError: for checkpoints that are damaged or cannot be written.
    """
    out, resuming = config.run.out, config.run.resume is not None
    folder = NOWHERE if out is None else RunFolder(out)
    group.comm.world.watch(WARNING_S, config.run.stall_limit, out)
    backend = make_backend(config.run.backend, group, config.parallel.memory_limit)
    with agreed(group):
        check_backend(config, backend)
        callback = _load_callback(config.run.callback)
    # The worker raises an error for a loss that overflows. NumPy would warn before, on each rank.
    with explain_errors(backend), np.errstate(all="ignore"), ExitStack() as stack:

        def lock() -> None:
            stack.enter_context(locked(folder.path, PATIENCE_S))

        if out is not None:
            on_root(group, lock if resuming else folder.check_free)
        last = find(folder, group) if resuming else None
        if last is not None and config.run.quiet:
            last.warn(group)
        if given is None:
            run, foreseen = _set_up(config, group, backend, folder, last, console, stack)
        else:
            samples = given.samples
            run = set_up(config, group, backend, folder, last, console.say, stack, samples)
            foreseen = None
        has_header = given is None or run.config.run.verbose
        facts = header(run) if has_header or run.has_folder else []
        state, notices = _first_state(run, last, resuming)
        if run.has_folder:
            _open_folder(run, state.step, words, facts, None if resuming else lock)
        with _noting_errors(run):
            if group.is_root and run.has_folder:
                stack.enter_context(console.copied(folder.console))
            if foreseen is not None:
                console.say(*foreseen.lines)
            shown = facts if has_header else []
            console.say(*(broken(f"{name + ':':<12} {text}", 13) for name, text in shown))
            console.say(*notices)
            records = folder if group.is_root and run.has_folder else None
            with MetricsRecorder(records, callback) as recorder:
                rows = () if last is None else last.values.get("history", ())
                history = History(rows, given.show if given and group.is_root else len)
                callbacks = given.callbacks if given else ()
                reporter = Reporter(run, console, recorder)
                loop = Loop(run, state, reporter, recorder, history, callbacks)
                yield loop
        _finish(run, loop, console)
        if group.is_root and run.has_folder:
            if foreseen is not None:
                console.say(*foreseen.compare(run.inputs.batch_size, read_metrics(folder.metrics)))
            console.say(broken(f"curves: nnmpi report {quote(str(folder.path))}"))


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
    base, notices = base_digest(run.arrangement), list[str]()
    state = RunState(samples=len(run.inputs.train), data=run.inputs.identity, base=base)
    if last is None and run.config.model.adapter is not None:
        on_root(run.group, partial(_check_adapter, run.config.model, base))
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


def _check_adapter(model: ModelConfig, base: str) -> None:
    """Refuse an adapter that was trained on other weights; one of PEFT's does not say on which.

    Raises:
        DataError: with both folders.
    """
    assert model.adapter is not None and model.pretrained is not None
    trained_on = read_adapter(model.adapter, layer_names(read_size(model.pretrained))).base
    if trained_on and trained_on != base:
        raise DataError(
            f"--adapter {model.adapter} was trained on other weights than those of --pretrained"
            f" {model.pretrained}, or on these in another --base-dtype; give what it was trained on"
        )


def _interrupted(folder: RunFolder) -> list[str]:
    """Return a line if no start of a run has come to its end."""
    if folder.finished.exists():
        return []
    return [f"{folder.path} had not come to its end: it has no {folder.finished.name}"]


def _changed_rate(run: TrainingRun, last: Checkpoint | None, step: int) -> list[str]:
    """Return a line if the schedule is no longer that of a checkpoint, as with other --epochs."""
    before = last.values.get("rate") if last is not None else None
    scale = last.values.get("rate_scale", 1.0) if last is not None else 1.0
    if before is None or before == run.schedule(step - 1) * scale:
        return []
    return [
        f"the learning rate follows another schedule, of {run.extent.steps} steps: step {step} had"
        f" the rate {before:.4g}, and step {step + 1} has {run.schedule(step) * scale:.4g}"
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
    folder, is_root = run.folder, run.group.is_root and run.has_folder
    newest = candidates(folder.checkpoints)[:1] if is_root else []
    try:
        yield
    except NnmpiError as error:
        is_refused = isinstance(error, UsageError | ShapeError)
        if is_root and is_refused and candidates(folder.checkpoints)[:1] == newest:
            folder.withdraw()
        if run.has_folder:
            folder.note_error(error)  # by the first rank that gets here
        raise


def _finish(run: TrainingRun, loop: Loop, console: Console) -> None:
    """Write a transformer's weights and finished.json, and print the summary. Collective.

    finished.json proves that all ranks have reached the end, or the limit of --stop-after: its
    "step" is then below its "of_steps". "stopped" says why a run has ended earlier. The launcher's
    status proves nothing: MPICH's mpirun reports success if a rank exits early with status 0.
    """
    folder, group, model = run.folder, run.group, run.config.model
    # Hugging Face's files of GPT-2 have no experts
    is_known = model.model in TRANSFORMERS and model.experts is None
    with run.trainer.averaged():
        weights = run.trainer.state()[0].to_dict() if is_known else {}
    last_steps = group.gather(loop.state.step)

    def write() -> None:
        saved = (
            f"its last checkpoint is complete: make room, and continue with --resume {folder.path}"
        )
        with raised_as(
            CheckpointError, f"the end of the run cannot be written into {folder.path}", saved
        ):
            if is_known:
                _save_transformer(run, weights, loop.state.base)
            write_json(folder.finished, _proof(run, loop, len(last_steps)))

    if run.has_folder:
        on_root(group, write)
    run.trainer.release()  # free MPI's requests and communicators before MPI ends
    console.say(*map(broken, _last_lines(run, loop)))


def _save_transformer(run: TrainingRun, weights: Mapping[str, Array], base: str) -> None:
    """Write a transformer's weights and tokenizer for Hugging Face's transformers, or for PEFT.

    Args:
        weights: all, or those of adapters.
        base: the hash of what adapters are added to.
    """
    folder, options, tokenizer = run.folder.model, run.config.model, run.tokenizer
    end = None if tokenizer is None else tokenizer.end
    if options.lora is not None:
        folder, path = run.folder.adapter, options.pretrained
        assert path is not None
        settings = options.lora_alpha, options.lora_dropout, layer_names(read_size(path))
        write_adapter(folder, weights, *settings, str(path), base)
    else:
        vocabulary = len(weights["0.tokens.weight"])
        size = size_of(options, vocabulary, run.inputs.train.sample_shape[0])
        save_pretrained(folder, weights, size, end, dropout_of(options))
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
    loss, quality = describe_result(report, report.metrics, run.predicts_tokens)
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
    where = f"; weights and metrics are in {run.folder.path}" if run.has_folder else ""
    lines.append(f"{duration}{where}")
    if run.backend.is_device:
        lines.append(f"memory of the device: {run.backend.memory()}")
    return lines
