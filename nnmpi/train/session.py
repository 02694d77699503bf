"""One run from its configuration to its last line: set up, train, tell the result."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from nnmpi.backend.cudnn import use_convolution
from nnmpi.backend.kernels.active import jit, load
from nnmpi.backend.record import Backend
from nnmpi.comm.agree import agreed
from nnmpi.comm.fitting.measure import find_fit
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import find_mesh
from nnmpi.compose.layout import AUTO, Layout
from nnmpi.compose.report import EvalReport
from nnmpi.compose.worker import Worker
from nnmpi.errors import UsageError
from nnmpi.mesh import Mesh
from nnmpi.train.build import build_extent, build_layout, build_pace, build_relaxed, build_schedule, build_worker
from nnmpi.train.config import Config
from nnmpi.train.curves import can_draw, draw
from nnmpi.train.device import check_compiled, check_convolution, explained, take_backend
from nnmpi.train.folder import RunFolder
from nnmpi.train.header import count, header
from nnmpi.train.inputs import load_inputs
from nnmpi.train.lock import FolderLock
from nnmpi.train.loop import Loop
from nnmpi.train.parts import Parts
from nnmpi.train.progress import Console, duration, percent
from nnmpi.train.recorder import Recorder
from nnmpi.train.report import Reporter
from nnmpi.train.restore import Kept, find, restore
from nnmpi.train.root import on_root
from nnmpi.train.segments import SegmentLoop
from nnmpi.train.state import State
from nnmpi.train.steps import StepLoop


def run(config: Config, group: Group, console: Console) -> None:
    """Train with this configuration, in the folder `config.run.out`. Collective.

    Raises:
        UsageError: for a folder that is taken or cannot be written, and options that do not fit data or world.
        DataError: for files that cannot be had or are damaged.
        DeviceError: for a backend that is not there, or too little memory.
        DivergenceError, CheckpointError, Stopped: see `Loop.run`.
    """
    # A loss that overflows is found and explained by the worker; NumPy's warnings would come first, once per rank.
    assert config.run.out is not None
    with agreed(group):
        if config.run.jit:
            load()
    node = group.node()
    local_rank = node.rank
    node.free()
    backend = take_backend(config.run.backend, group, local_rank, config.parallel.memory_limit_bytes)
    with agreed(group):
        check_compiled(config.run.jit, backend)
        check_convolution(config.run.convolution, backend)
    compiled = jit() if config.run.jit else nullcontext()  # a device has kernels of its own
    ways = use_convolution(config.run.convolution)
    with explained(backend), np.errstate(all="ignore"), compiled, ways, FolderLock(config.run.out) as lock:
        _run(config, group, console, RunFolder(config.run.out), lock, backend, local_rank)


def _run(
    config: Config,
    group: Group,
    console: Console,
    folder: RunFolder,
    lock: FolderLock,
    backend: Backend,
    local_rank: int,
) -> None:
    resuming = config.run.resume is not None
    on_root(group, lock.take if resuming else folder.check_free)
    kept = find(folder, group) if resuming else None
    parts, lines = _set_up(config, group, folder, console, kept, backend, local_rank)
    settled = settle(config, parts)
    samples = len(parts.inputs.train)
    state, notices = restore(parts.worker, kept, folder, samples) if resuming else (State(samples=samples), [])

    def occupy() -> None:
        if not resuming:
            folder.make()
            lock.take()
            folder.check_free()  # once more: another job may have come first
        folder.create(settled)
        folder.cut(state.step)

    on_root(group, occupy)
    console.say(*lines, *notices)
    with Recorder(folder if group.is_root else None, state.step) as recorder:
        reporter = Reporter(parts.extent, console, recorder, config.run.print_every)
        loop = _make_loop(config, parts, state, reporter, recorder)
        report = loop.run()
    _tell(console, report, loop.state, folder, backend)
    if group.is_root:
        _draw(console, folder)


def _make_loop(config: Config, parts: Parts, state: State, reporter: Reporter, recorder: Recorder) -> Loop:
    """Return the loop that suits the worker."""
    worker, sync = parts.worker, config.sync
    if isinstance(worker, Worker):
        return StepLoop(parts, worker, state, reporter, recorder)
    return SegmentLoop(parts, worker, state, reporter, recorder, sync.sync_warmup_epochs)


def find_layout(config: Config, group: Group) -> tuple[Layout, Mesh]:
    """Return the layout that was asked for and the mesh that it means here. Collective.

    Raises:
        LayoutError, UsageError: on all ranks, when it does not fit the world, or options do not go together.
    """
    with agreed(group):
        layout = build_layout(config.parallel, config.optimization.optimizer, config.optimization.momentum)
    mesh = find_mesh(group, layout)
    idle = config.parallel.describe_idle()
    resuming = config.run.resume is not None  # then they may be those of a run that had a pipeline
    if idle is not None and mesh.pp == 1 and not resuming:
        raise UsageError(f"{idle} belongs to a pipeline, and {mesh} has none; give --pp 2 or more, or leave it out")
    if config.run.convolution == "tuned" and mesh.tp > 1:
        raise UsageError(
            f"--convolution tuned lets each rank time plans by itself, and with {mesh} what several ranks compute "
            "alike could then differ in the last bits; use --convolution cudnn"
        )
    return layout, mesh


def check_sync(config: Config, group: Group) -> None:
    """Check that this number of ranks can do what the options say about synchrony.

    Raises:
        UsageError: on all ranks.
    """
    sync, rule = config.sync, config.sync.rule
    if sync.virtual_workers and group.size > 1:
        raise UsageError(
            f"--virtual-workers {sync.virtual_workers} plays all workers in one process, but there are {group.size} "
            "ranks; start it without mpirun"
        )
    ranks = sync.ranks(group.size)
    rule.check(ranks)
    sync.slowdown(config.run.seed).check(rule.worker_ranks(ranks))


def needs_arrangement(layout: Layout, mesh: Mesh) -> bool:
    """Whether the ranks are more than replicas of a whole model that sum gradients as they come."""
    return mesh.pp > 1 or mesh.tp > 1 or layout.fixed or layout.memory_limit is not None


def settle(config: Config, parts: Parts) -> Config:
    """Return the configuration with what was derived from the layout and must stay when the run goes on."""
    worker = parts.worker
    if (
        not isinstance(worker, Worker)
        or worker.arrangement is None
        or not worker.arrangement.stages
        or config.optimization.grad_accum > 1
    ):
        return config
    microbatches = parts.inputs.train_loader.microbatches
    return replace(config, parallel=replace(config.parallel, microbatches=microbatches))


def _set_up(
    config: Config,
    group: Group,
    folder: RunFolder,
    console: Console,
    kept: Kept | None,
    backend: Backend,
    local_rank: int,
) -> tuple[Parts, list[str]]:
    """Load the data and build everything; return it with the header. Collective."""
    layout, mesh = find_layout(config, group)
    check_sync(config, group)
    replica = (mesh.coordinates(group.rank).d, mesh.dp)
    inputs = load_inputs(config, group, local_rank, console.say, replica, mesh.pp)
    with agreed(group):
        extent = build_extent(config.optimization, inputs)
        schedule = build_schedule(config.optimization, extent, inputs.batch_size)
    if config.sync.in_segments:
        relaxed = build_relaxed(config, group, inputs, backend)
        lines = header(config, group, inputs, backend, extent, relaxed)
        return Parts(config.run, group, inputs, relaxed, schedule, extent, folder), lines
    notice = _take_fit(config, group)
    algorithms = None if kept is None else kept.algorithms(mesh, group.rank)
    cuts = None if kept is None else kept.cuts(mesh, layout.virtual_stages)
    if cuts is not None and layout.split == AUTO:  # measured again, they might fall elsewhere
        layout = replace(layout, split=cuts)
    wanted = layout if needs_arrangement(layout, mesh) else None
    worker = build_worker(config, group, inputs, backend, algorithms, wanted)
    lines = header(config, group, inputs, backend, extent, worker)
    pace = build_pace(config)
    return Parts(config.run, group, inputs, worker, schedule, extent, folder, pace), [*lines, *notice]


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


def _tell(console: Console, report: EvalReport, state: State, folder: RunFolder, backend: Backend) -> None:
    """Print the result."""
    best = f"; best epoch {state.best_epoch} with {percent(state.best_accuracy)}" if state.best_epoch else ""
    console.say(
        f"test accuracy {percent(report.accuracy)} (loss {report.loss:.4f}) with the final weights{best}",
        f"{count(state.step, 'step')} in {duration(state.elapsed_s)}; weights and metrics are in {folder.path}",
        *([f"memory of the device: {backend.memory()}"] if backend.is_device else []),
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
