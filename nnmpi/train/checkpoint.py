"""Saving and restoring a run over all ranks: rank 0 reads and writes, so that no shared file system is needed.

    save        the worker's arrays and state.json into a new checkpoint
    find        the last good checkpoint of a run's folder, verified
    restore     the worker's arrays and the loop's state from what was found

What lies in a checkpoint's folder, and how it stays whole, is in `checkpoint_files`.

Arrays go between rank 0's file and the ranks' parts of them one at a time (see `parallel.model_state`), so that a
checkpoint fits a layout that no single rank's memory would hold, and any layout reads what any other has written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nnmpi.backend.array import Array
from nnmpi.comm.agreement import on_root
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.compose.worker import Worker
from nnmpi.errors import CheckpointError
from nnmpi.mesh import Coordinates, Mesh
from nnmpi.parallel.shard_map import ArraySpec
from nnmpi.train.checkpoint_files import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    Checkpoint,
    CheckpointWriter,
    check_folder,
    load_checkpoint,
)
from nnmpi.train.context import AnyWorker
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import MetricsRecorder
from nnmpi.train.run_state import RunState, check_stored
from nnmpi.train.tensor_file import TensorFile

T = TypeVar("T")


@dataclass(frozen=True)
class LastCheckpoint:
    """A run's last good checkpoint, found and verified once.

    Attributes:
        values: what state.json holds.
        folder: where it lies, on rank 0's node.
        notices: lines to print about it.
        checkpoint: the arrays, on rank 0 alone.
    """

    values: Mapping[str, Any]
    folder: Path
    notices: tuple[str, ...]
    checkpoint: Checkpoint | None

    @property
    def mesh(self) -> Mesh:
        """The layout of the run that wrote it."""
        return Mesh(**self.values["layout"])

    def algorithms(self, mesh: Mesh, rank: int) -> list[str] | None:
        """Return the all-reduce that the run had chosen for each bucket of this rank.

        Another algorithm would add in another order, and the run would not go on bit for bit. None on another mesh,
        where no choice can be kept, and after a fused update, which has none.
        """
        if self.mesh.shape != mesh.shape:
            return None
        algorithms: Mapping[str, list[str]] = self.values["algorithms"]
        return algorithms.get(_part(mesh.coordinates(rank))) or None

    def cuts(self, mesh: Mesh, virtual_stages: int) -> list[int] | None:
        """Return how many links of the model's chain each stage had; None with another number of stages."""
        cuts: list[int] = self.values["cuts"]
        return cuts if len(cuts) == mesh.pp * virtual_stages and mesh.pp > 1 else None


def save(
    worker: AnyWorker, state: RunState, folder: RunFolder, recorder: MetricsRecorder, group: Group, keep: int
) -> None:
    """Write a checkpoint of this state. Collective.

    Args:
        worker: whose arrays are written.
        state: where the run stands.
        folder: of the run.
        recorder: its records are brought to the disk first: a checkpoint must not be newer than they are.
        group: all ranks of the run.
        keep: how many checkpoints stay on the disk.

    Raises:
        CheckpointError: on all ranks, when it cannot be written; older ones are intact.
    """
    writer = CheckpointWriter(folder.checkpoints, state.step)  # used on rank 0 alone

    def explained(work: Callable[..., T], *args: Any) -> T:
        try:
            return work(*args)
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint of step {state.step} can be written into {folder.checkpoints} "
                f"({error.strerror or error}); older ones are intact"
            ) from None

    try:
        on_root(group, partial(explained, recorder.sync))
        on_root(group, partial(explained, writer.begin))
        for name, arrays in zip((MODEL_FILE, OPTIMIZER_FILE), worker.state(), strict=True):
            specs = arrays.specs()
            on_root(group, partial(explained, writer.open, name, specs))
            arrays.gather(partial(explained, writer.write))
        on_root(group, partial(explained, writer.finish, _values(worker, state, group), keep))
    finally:
        if group.is_root:
            writer.discard()


def find(folder: RunFolder, group: Group) -> LastCheckpoint | None:
    """Return the run's last good checkpoint; None where there is none yet. Collective.

    Raises:
        CheckpointError: on all ranks, when none is whole, it holds what no run writes, or the folder cannot be used.
    """
    found: list[Checkpoint] = []  # on rank 0

    def read() -> list[Any] | None:
        check_folder(folder.checkpoints)
        loaded = load_checkpoint(folder.checkpoints)
        if loaded is None:
            return None
        checkpoint, place, notices = loaded
        check_stored(checkpoint.state, place / STATE_FILE)
        found.append(checkpoint)
        return [dict(checkpoint.state), str(place), [*notices, f"resuming from {place}"]]

    answer: list[Any] | None = on_root(group, read)
    if answer is None:
        return None
    values, place, notices = answer
    return LastCheckpoint(values, Path(place), tuple(notices), found[0] if found else None)


def restore(
    worker: AnyWorker, last: LastCheckpoint | None, folder: RunFolder, samples: int
) -> tuple[RunState, list[str]]:
    """Give the worker what `find` found; return the state, and lines to print. Collective.

    Args:
        worker: which gets the arrays; without a checkpoint it stays as it is.
        last: what was found; None stands for a run that has no checkpoint yet, and begins.
        folder: of the run, for the message.
        samples: rows of the training set.

    Raises:
        CheckpointError: on all ranks, when it does not fit the model or the data; nothing is changed then.
    """
    if last is None:
        return RunState(samples=samples), [f"{folder.path} has no checkpoint yet: starting at the beginning"]
    if last.values["samples"] != samples:
        raise CheckpointError(
            f"{last.folder} is of a run with {last.values['samples']} training samples, but the data set now gives "
            f"{samples}; resume with the data that it began with, or start a new run with another --out"
        )
    state, scalars = RunState.from_json(last.values), last.values["optimizer"]
    arrays = worker.state()
    sources = [_source(None)] * 2
    if last.checkpoint is not None:
        sources = [_source(last.checkpoint.model), _source(last.checkpoint.optimizer)]
    for each, (_, specs, file) in zip(arrays, sources, strict=True):  # both, before either is written
        each.check(specs, file)
    for each, source in zip(arrays, sources, strict=True):
        each.scatter(*source)
    worker.optimizer.steps = scalars["steps"]
    if isinstance(worker, Worker) and worker.scaling is not None and "loss_scale" in scalars:  # else it begins anew
        worker.scaling.load(scalars["loss_scale"])
    if not isinstance(worker, VirtualWorker):  # the run was one in virtual time, but is none any more
        state = replace(state, virtual=None)
    return state, [*last.notices, *_moved(last, worker)]


def _source(file: TensorFile | None) -> tuple[Callable[[str], Array], Mapping[str, ArraySpec] | None, Path | None]:
    """Return what `ModelState.scatter` takes: on rank 0 how to read the file, what is in it, and its name."""
    if file is None:
        return dict[str, Array]().__getitem__, None, None
    return file.__getitem__, file.specs, file.file


def _values(worker: AnyWorker, state: RunState, group: Group) -> dict[str, Any]:
    """Return what state.json holds. Collective."""
    return {
        **state.to_json(),
        "seed": worker.seed,
        "ranks": group.size,
        "layout": dict(zip(("dp", "pp", "tp"), _mesh(worker).shape, strict=True)),
        "optimizer": {"steps": worker.optimizer.steps, **_scaling(worker)},
        "fixed": _is_fixed(worker),
        "algorithms": _algorithms(worker, group),
        "cuts": [len(cut) for cut in arrangement.cuts] if (arrangement := _arrangement(worker)) else [],
    }


def _scaling(worker: AnyWorker) -> dict[str, Any]:
    """Return the loss scale of a run that has one."""
    scaling = worker.scaling if isinstance(worker, Worker) else None
    return {} if scaling is None else {"loss_scale": scaling.state()}


def _part(place: Coordinates) -> str:
    """Return the name of the part of the model that the ranks of a data-parallel group have."""
    return f"p{place.p} t{place.t}"


def _algorithms(worker: AnyWorker, group: Group) -> dict[str, list[str]]:
    """Return the all-reduce of each bucket by part of the model, for each has buckets of its own. Collective."""
    if not isinstance(worker, Worker):
        return {}
    everyones = group.gather([choice.algorithm for choice in worker.parallel.exchange.choices])
    mesh = _mesh(worker)
    # Several ranks have the same part, and the last of them in this order stays: that is the lowest rank.
    return {_part(mesh.coordinates(rank)): names for rank, names in reversed(list(enumerate(everyones)))}


def _moved(last: LastCheckpoint, worker: AnyWorker) -> list[str]:
    """Return a line where a run goes on with another layout: which, and whether its results stay equal to the bit."""
    before, now = last.mesh, _mesh(worker)
    if before.shape == now.shape:
        return []
    plain = before.dp == before.size and now.dp == now.size
    words = (f"{before.size} rank{'s' * (before.size > 1)}", f"{now.size}") if plain else (str(before), str(now))
    if not isinstance(worker, Worker):
        return [f"the run had {words[0]} and goes on with {words[1]}"]
    fixed = last.values.get("fixed", False) and _is_fixed(worker)
    return [f"the run had {words[0]} and goes on with {words[1]}: equal {'bit for bit' if fixed else 'up to rounding'}"]


def _arrangement(worker: AnyWorker) -> Arrangement | None:
    return worker.arrangement if isinstance(worker, Worker) else None


def _is_fixed(worker: AnyWorker) -> bool:
    """Return whether sums are taken in an order that does not depend on the layout."""
    arrangement = _arrangement(worker)
    return arrangement is not None and arrangement.layout.fixed


def _mesh(worker: AnyWorker) -> Mesh:
    arrangement = _arrangement(worker)
    return Mesh(dp=worker.group.size) if arrangement is None else arrangement.mesh.mesh
