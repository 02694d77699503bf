"""One run from its configuration to its last line: set up, restore, train, print the result."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from math import isfinite, nan
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np

from nnmpi.backend.backend import Backend
from nnmpi.backend.kernels import jit, load
from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.group import Group
from nnmpi.comm.world import WARNING_S
from nnmpi.compose.stats import EvalReport
from nnmpi.errors import CheckpointError, ShapeError, UsageError, counted
from nnmpi.files import locked, write_atomically
from nnmpi.models.pretrained import read_size, save_pretrained
from nnmpi.reading import read_json
from nnmpi.train.build import RunContext, dropout_of, set_up, settle
from nnmpi.train.checkpoint import MODEL_FILE, STATE_FILE, RunState, find, newest, restore
from nnmpi.train.config import Config
from nnmpi.train.device import check_compiled, check_precision, explained, take_backend
from nnmpi.train.folder import RunFolder
from nnmpi.train.header import header
from nnmpi.train.log import Console, Reporter
from nnmpi.train.loop import Loop
from nnmpi.train.metrics import MetricsRecorder, cut_metrics, read_metrics
from nnmpi.units import format_duration

if TYPE_CHECKING:
    from nnmpi.train.auto_layout import ChosenLayout

PATIENCE_S = 5.0  # for a job in the same folder that is just being killed


def run(
    config: Config,
    group: Group,
    console: Console,
    words: Sequence[str] = (),
) -> None:
    """Train with this configuration, in the folder `config.run.out`. Collective.

    Args:
        config: every option, the same on every rank.
        group: all ranks of the run.
        console: prints on rank 0.
        words: of the command line, to be written down.

    Raises:
        UsageError: for a folder that is taken or cannot be written, and options that do not fit data or world.
        DataError: for files that cannot be had or are damaged.
        DeviceError: for a backend that is not there, or too little memory.
        DivergenceError, CheckpointError, Stopped: see `Loop.run`.
    """
    # A loss that overflows is found and explained by the worker; NumPy's warnings would come first, once per rank.
    assert config.run.out is not None
    group.comm.world.watch(WARNING_S, config.run.stall_limit, config.run.out)
    with agreed(group):
        if config.run.jit == "on":
            load()
    local_rank = group.local_rank()
    backend = take_backend(config.run.backend, group, local_rank, config.parallel.memory_limit_bytes)
    with agreed(group):
        check_compiled(config.run.jit == "on", backend)
        check_precision(config.run.precision, backend)
    compiled = jit() if config.run.jit == "on" else nullcontext()  # a device has kernels of its own
    with explained(backend), np.errstate(all="ignore"), compiled, ExitStack() as lock:
        _run(config, group, console, RunFolder(config.run.out), lock, backend, local_rank, words)


def _run(
    config: Config,
    group: Group,
    console: Console,
    folder: RunFolder,
    lock: ExitStack,
    backend: Backend,
    local_rank: int,
    words: Sequence[str],
) -> None:
    resuming = config.run.resume is not None

    def take() -> None:
        lock.enter_context(locked(folder.path, PATIENCE_S))

    on_root(group, take if resuming else folder.check_free)
    last = find(folder, group) if resuming else None
    chosen = None
    if config.parallel.layout == "auto":
        from nnmpi.train.auto_layout import check_open, choose  # the planner, which other starts do without

        with agreed(group):
            check_open(config.parallel, config.sync.rule.asynchronous, resuming)
        chosen = choose(config, group, backend, local_rank, console.say)
        config = chosen.config
    computing = None if chosen is None else chosen.computing
    context = set_up(config, group, backend, folder, last, console.say, local_rank, computing)
    with context.computing.in_use():
        facts = header(context)
    lines = [*(() if chosen is None else chosen.lines), *(f"{name + ':':<12} {text}" for name, text in facts)]
    settled = settle(context)
    first = RunState(samples=len(context.inputs.train), data=context.inputs.identity)
    state, restored = restore(context.trainer, last, folder, first) if resuming else (first, [])
    state.check(context.extent, folder.path)
    if resuming and group.is_root and not folder.finished.exists():
        restored.append(f"{folder.path} had not come to its end: it has no {folder.finished.name}")

    def take_folder() -> None:
        if not resuming:
            folder.make()
            take()
            folder.check_free()  # once more: another job may have come first
        folder.keep_tokenizer(context.inputs.tokenizer)
        folder.create(settled)
        folder.note_start(words, group.size, group.comm.world.library, facts)
        folder.finished.unlink(missing_ok=True)
        cut_metrics(folder.metrics, state.step)

    on_root(group, take_folder)
    if state.step >= context.extent.steps:
        restored = [*restored, f"the run is finished, {_how_to_go_on(context)}"]
    try:
        with ExitStack() as stack:
            if group.is_root:
                stack.enter_context(console.copied(folder.console))
            console.say(*lines, *restored)
            stack.enter_context(context.computing.in_use())
            _train(context, state, console, chosen)
    except (UsageError, ShapeError):
        if group.is_root and not resuming and not folder.checkpoints.exists():
            folder.withdraw()
        raise


def _how_to_go_on(context: RunContext) -> str:
    """Return what is done, and what would do more."""
    options, extent = context.config.optimization, context.extent
    if options.max_steps is not None and extent.steps == options.max_steps:
        return f"all {extent.steps} steps are done; a larger --max-steps goes on"
    return f"all {extent.epochs} epochs are done; more --epochs, such as {2 * extent.epochs}, go on"


def _train(context: RunContext, state: RunState, console: Console, chosen: "ChosenLayout | None" = None) -> None:
    """Train from a state to the end, and leave everything behind that a run leaves. Collective.

    Args:
        context: what the run works with.
        state: where it begins.
        console: prints on rank 0.
        chosen: what the planner has said of a step, to be compared.
    """
    folder, group, backend = context.folder, context.group, context.backend
    with MetricsRecorder(folder if group.is_root else None, state.step) as recorder:
        tokens = context.inputs.train.is_tokens
        reporter = Reporter(
            context.extent, console, recorder, tokens, context.inputs.variances, context.config.run.verbose
        )
        loop = Loop(context, state, reporter, recorder)
        report = loop.run()
    _write_model(context)
    _prove_end(context, loop.state, report, reporter.measures(report))
    context.trainer.release()  # requests and communicators go back before the program ends
    _print_result(console, reporter, report, loop.state, folder, backend)
    if chosen is not None and group.is_root:
        console.say(chosen.compare(context.inputs.batch_size, read_metrics(folder.metrics)))
    if group.is_root:
        console.say(f"curves: python -m nnmpi.report {quote(str(folder.path))}")


def _write_model(context: RunContext) -> None:
    """Write a GPT and its tokenizer as Hugging Face's transformers reads them. Collective."""
    options = context.config.model
    if options.model != "gpt":
        return
    weights = context.trainer.state()[0].to_dict()
    heads = options.sizes[2] if options.pretrained is None else read_size(options.pretrained).heads
    tokenizer = context.inputs.tokenizer

    def write() -> None:
        end = None if tokenizer is None else tokenizer.end
        with _explained(context.folder):
            save_pretrained(context.folder.model, weights, heads, dropout_of(options), end)
            if tokenizer is not None:
                tokenizer.save(context.folder.model)

    on_root(context.group, write)


def _prove_end(context: RunContext, state: RunState, report: EvalReport, measures: dict[str, float]) -> None:
    """Write that the run is finished, when each rank has said so. Collective.

    A launcher may tell of success where a rank has left early: MPICH's does, if that rank's own status was 0.
    """
    folder, last_steps = context.folder, context.group.gather(state.step)

    def write() -> None:
        with _explained(folder):
            stored = read_json(newest(folder.checkpoints) / STATE_FILE)
            write_atomically(folder.finished, json.dumps(values(stored), indent=1).encode() + b"\n")

    def values(stored: Any) -> dict[str, Any]:
        return {
            "step": state.step,
            "ranks": len(last_steps),
            "loss": report.loss if isfinite(report.loss) else None,
            **{name: value if isfinite(value) else None for name, value in ({"accuracy": nan} | measures).items()},
            "weights_sha256": stored["files"][MODEL_FILE]["sha256"],
        }

    on_root(context.group, write)


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


def _print_result(
    console: Console, reporter: Reporter, report: EvalReport, state: RunState, folder: RunFolder, backend: Backend
) -> None:
    """Print the result."""
    console.say(
        f"test {reporter.quality(report)} ({reporter.losses(report)}) with the final weights"
        f"{reporter.best(state, report)}",
        f"{counted(state.step, 'step')} in {format_duration(state.elapsed_s)}; "
        f"weights and metrics are in {folder.path}",
        *([f"memory of the device: {backend.memory()}"] if backend.is_device else []),
    )
