"""Saving and restoring a run over all ranks: rank 0 reads and writes, so that no shared file system is needed.

Arrays go between rank 0's file and the ranks' parts of them one at a time (see `parallel.state`), so that a checkpoint
fits a layout that no single rank's memory would hold, and any layout reads what any other has written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.compose.worker import Worker
from nnmpi.errors import CheckpointError
from nnmpi.mesh import Coordinates, Mesh
from nnmpi.parallel.pieces import Outline
from nnmpi.train.checkpoint import MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, Checkpoint, check_folder, load_checkpoint
from nnmpi.train.draft import Draft
from nnmpi.train.folder import RunFolder
from nnmpi.train.parts import AnyWorker
from nnmpi.train.recorder import Recorder
from nnmpi.train.root import on_root
from nnmpi.train.state import State
from nnmpi.train.stored import check_stored
from nnmpi.train.tensors import TensorFile

T = TypeVar("T")


@dataclass(frozen=True)
class Kept:
    """A run's last good checkpoint, found and verified once.

    Attributes:
        values: what state.json holds.
        place: its folder, on rank 0's node.
        notices: what there is to say of it.
        checkpoint: the arrays, on rank 0 alone.
    """

    values: Mapping[str, Any]
    place: Path
    notices: tuple[str, ...]
    checkpoint: Checkpoint | None

    @property
    def mesh(self) -> Mesh:
        """The layout of the run that wrote it."""
        return Mesh(**self.values.get("layout", {"dp": self.values["ranks"]}))

    def algorithms(self, mesh: Mesh, rank: int) -> list[str] | None:
        """Return the all-reduce of each bucket that the run had where this rank is; another adds in another order.

        None on another mesh, when nothing can be kept, and after a fused update, which has none.
        """
        found = self.values.get("algorithms")
        if isinstance(found, dict):
            found = found.get(_part(mesh.coordinates(rank)))
        return found or None if self.mesh.shape == mesh.shape else None

    def cuts(self, mesh: Mesh, virtual_stages: int) -> list[int] | None:
        """Return the links of each stage that the run had; None with another number of stages."""
        cuts: list[int] = self.values.get("cuts") or []
        return cuts if len(cuts) == mesh.pp * virtual_stages and mesh.pp > 1 else None


def save(worker: AnyWorker, state: State, folder: RunFolder, recorder: Recorder, group: Group, keep: int) -> None:
    """Write a checkpoint of this state. Collective.

    Raises:
        CheckpointError: on all ranks, when it cannot be written; older ones are intact.
    """
    draft = Draft(folder.checkpoints, state.step)  # used on rank 0 alone

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
        on_root(group, partial(explained, draft.begin))
        for name, arrays in zip((MODEL_FILE, OPTIMIZER_FILE), worker.state(), strict=True):
            outlines = arrays.outlines()
            on_root(group, partial(explained, draft.open, name, outlines))
            arrays.pull(partial(explained, draft.write))
        on_root(group, partial(explained, draft.finish, _values(worker, state, group), keep))
    finally:
        if group.is_root:
            draft.discard()


def find(folder: RunFolder, group: Group) -> Kept | None:
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
    return Kept(values, Path(place), tuple(notices), found[0] if found else None)


def restore(worker: AnyWorker, kept: Kept | None, folder: RunFolder, samples: int) -> tuple[State, list[str]]:
    """Give the worker what `find` found; return the state, and what there is to say. Collective.

    Without a checkpoint the worker stays as it is and the state is the start.

    Args:
        samples: rows of the training set.

    Raises:
        CheckpointError: on all ranks, when it does not fit the model or the data; nothing is changed then.
    """
    if kept is None:
        return State(samples=samples), [f"{folder.path} has no checkpoint yet: starting at the beginning"]
    if kept.values["samples"] != samples:
        raise CheckpointError(
            f"{kept.place} is of a run with {kept.values['samples']} training samples, but the data set now gives "
            f"{samples}; resume with the data that it began with, or start a new run with another --out"
        )
    state, scalars = State.from_json(kept.values), kept.values["optimizer"]
    arrays = worker.state()
    sources = [_source(None)] * 2
    if kept.checkpoint is not None:
        sources = [_source(kept.checkpoint.model), _source(kept.checkpoint.optimizer)]
    for each, (_, outlines, file) in zip(arrays, sources, strict=True):  # both, before either is written
        each.check(outlines, file)
    for each, source in zip(arrays, sources, strict=True):
        each.push(*source)
    worker.optimizer.steps = scalars["steps"]
    if isinstance(worker, Worker) and worker.scaling is not None and "loss_scale" in scalars:  # else it begins anew
        worker.scaling.load(scalars["loss_scale"])
    if not isinstance(worker, VirtualWorker):  # the run was one in virtual time, but is none any more
        state = replace(state, virtual=None)
    return state, [*kept.notices, *_moved(kept, worker)]


def _source(file: TensorFile | None) -> tuple[Callable[[str], Array], Mapping[str, Outline] | None, Path | None]:
    """Return what `LayoutState.push` takes: on rank 0 how to read the file, what is in it, and its name."""
    if file is None:
        return dict[str, Array]().__getitem__, None, None
    return file.__getitem__, file.outlines, file.file


def _values(worker: AnyWorker, state: State, group: Group) -> dict[str, Any]:
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
    return {_part(mesh.coordinates(rank)): names for rank, names in reversed(list(enumerate(everyones)))}


def _moved(kept: Kept, worker: AnyWorker) -> list[str]:
    """Say that a run goes on with another layout, if it does, and how equal it is."""
    before, now = kept.mesh, _mesh(worker)
    if before.shape == now.shape:
        return []
    plain = before.dp == before.size and now.dp == now.size
    words = (f"{before.size} rank{'s' * (before.size > 1)}", f"{now.size}") if plain else (str(before), str(now))
    if not isinstance(worker, Worker):
        return [f"the run had {words[0]} and goes on with {words[1]}"]
    fixed = kept.values.get("fixed", False) and _is_fixed(worker)
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
