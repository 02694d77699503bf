"""One run from its configuration to its last line: set up, train, tell the result."""

from pathlib import Path

import numpy as np

from nnmpi.backend.select import select
from nnmpi.comm.agree import agreed
from nnmpi.comm.fitting.measure import find_fit
from nnmpi.comm.group import Group
from nnmpi.compose.report import EvalReport
from nnmpi.errors import DeviceError, LayoutError, UsageError
from nnmpi.mesh import Mesh
from nnmpi.train.build import build_extent, build_schedule, build_worker
from nnmpi.train.config import Config
from nnmpi.train.curves import can_draw, draw
from nnmpi.train.folder import RunFolder
from nnmpi.train.header import count, header
from nnmpi.train.inputs import load_inputs
from nnmpi.train.lock import FolderLock
from nnmpi.train.loop import Loop, Parts
from nnmpi.train.progress import Console, duration, percent
from nnmpi.train.recorder import Recorder
from nnmpi.train.report import Reporter
from nnmpi.train.restore import Kept, find, restore
from nnmpi.train.root import on_root
from nnmpi.train.state import State


def run(config: Config, group: Group, console: Console) -> None:
    """Train with this configuration, in the folder `config.run.out`. Collective.

    Raises:
        UsageError: for a folder that is taken or cannot be written, and options that do not fit data or world.
        DataError: for files that cannot be had or are damaged.
        DeviceError: for a backend that is not there, or too little memory.
        DivergenceError, CheckpointError, Stopped: see `Loop.run`.
    """
    # A loss that overflows is found and explained by the worker; NumPy's warnings would come first, once per rank.
    try:
        assert config.run.out is not None
        with np.errstate(all="ignore"), FolderLock(config.run.out) as lock:
            _run(config, group, console, RunFolder(config.run.out), lock)
    except MemoryError as error:
        raise DeviceError(f"out of memory ({error}); give a smaller --batch-size, or --grad-accum 2 or more") from error


def _run(config: Config, group: Group, console: Console, folder: RunFolder, lock: FolderLock) -> None:
    resuming = config.run.resume is not None
    _check_layout(config, group)
    on_root(group, lock.take if resuming else folder.check_free)
    kept = find(folder, group) if resuming else None
    parts, lines = _set_up(config, group, folder, console, kept)
    samples = len(parts.inputs.train)
    state, notices = restore(parts.worker, kept, folder, samples) if resuming else (State(samples=samples), [])

    def occupy() -> None:
        if not resuming:
            folder.make()
            lock.take()
            folder.check_free()  # once more: another job may have come first
        folder.create(config)
        folder.cut(state.step)

    on_root(group, occupy)
    console.say(*lines, *notices)
    with Recorder(folder if group.is_root else None, state.step) as recorder:
        loop = Loop(parts, state, Reporter(parts.extent, console, recorder, config.run.print_every), recorder)
        report = loop.run()
    _tell(console, report, loop.state, folder)
    if group.is_root:
        _draw(console, folder)


def _check_layout(config: Config, group: Group) -> None:
    dp = config.parallel.dp
    if dp not in ("auto", group.size):
        raise LayoutError(
            f"--dp {dp} does not fit the {count(group.size, 'rank')} of this run; start {dp} ranks "
            f"(mpirun -n {dp}), or leave --dp out"
        )


def _set_up(
    config: Config, group: Group, folder: RunFolder, console: Console, kept: Kept | None
) -> tuple[Parts, list[str]]:
    """Load the data and build everything; return it with the header. Collective."""
    node = group.node()
    local_rank = node.rank
    node.free()
    inputs = load_inputs(config, group, local_rank, console.say)
    with agreed(group):
        backend = select(config.run.backend, local_rank)
        extent = build_extent(config.optimization, inputs)
        schedule = build_schedule(config.optimization, extent, inputs.batch_size)
    notice = _take_fit(config, group)
    algorithms = None if kept is None else kept.algorithms(Mesh(dp=group.size))
    worker = build_worker(config, group, inputs, backend, algorithms)
    lines = header(config, group, inputs, backend, extent, worker)
    return Parts(config.run, group, inputs, worker, schedule, extent, folder), [*lines, *notice]


def _take_fit(config: Config, group: Group) -> list[str]:
    """Give the group the fitted model that was asked for; return what there is to say. Collective.

    A run that goes on may do so with other ranks, for which the fit that it began with does not hold.
    """
    if config.parallel.fit == "none" or group.size == 1:
        return []
    try:
        group.fit = find_fit(group, None if config.parallel.fit == "kept" else Path(config.parallel.fit))
    except UsageError as error:
        if config.run.resume is None:
            raise
        return [f"going on without a fit: {error}"]
    return []


def _tell(console: Console, report: EvalReport, state: State, folder: RunFolder) -> None:
    """Print the result."""
    best = f"; best epoch {state.best_epoch} with {percent(state.best_accuracy)}" if state.best_epoch else ""
    console.say(
        f"test accuracy {percent(report.accuracy)} (loss {report.loss:.4f}) with the final weights{best}",
        f"{count(state.step, 'step')} in {duration(state.elapsed_s)}; weights and metrics are in {folder.path}",
    )


def _draw(console: Console, folder: RunFolder) -> None:
    """Draw the curves if that is possible; a failure costs the curves, not the run."""
    if not can_draw():
        return console.say("no curves: matplotlib is not installed (pip install 'nnmpi[plot]')")
    try:
        draw(folder.metrics, folder.curves)
    except (OSError, ValueError) as error:
        return console.say(f"no curves: {error}")
    return console.say(f"curves are in {folder.curves}")
