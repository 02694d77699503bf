"""Saving and restoring a run over all ranks: rank 0 reads and writes, so that no shared file system is needed.

    Saver       the trainer's arrays and state.json into a new checkpoint, beside training
    find        the last good checkpoint of a run's folder, verified
    restore     the trainer's arrays and the loop's state from what was found

What lies in a checkpoint's folder, and how it stays whole, is in `checkpoint_files`.

Arrays go between rank 0's file and the ranks' parts of them one at a time (see `parallel.model_state`), so that a
checkpoint fits a layout that no single rank's memory would hold, and any layout reads what any other has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nnmpi import clock
from nnmpi.backend.array import Array
from nnmpi.comm.agreement import on_root
from nnmpi.comm.group import Group
from nnmpi.comm.world import BackgroundWork
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.state import model_state
from nnmpi.compose.trainer import Trainer
from nnmpi.errors import CheckpointError, DataError, counted
from nnmpi.mesh import AXES, Coordinates, Mesh
from nnmpi.nn.module import Module
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
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import MetricsRecorder
from nnmpi.train.run_state import RunState, check_stored
from nnmpi.train.tensor_file import TensorFile


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
        """Return how many layers of the model's chain each stage had; None with another number of stages."""
        cuts: list[int] = self.values["cuts"]
        return cuts if len(cuts) == mesh.pp * virtual_stages and mesh.pp > 1 else None


class Saver(AbstractContextManager["Saver"]):
    """Writes the checkpoints of a run beside its training, one at a time.

        training    step |write| step | step | step | step |write| step |end|   "write" waits for the checkpoint before
        beside it        '-----sum, sync, name, remove-----'     '----------'

    The values are copied where they must go anyway: into the files, which the system keeps in memory until it has
    brought them to the disk. So nothing that is as long as the model stays in the program, whatever the layout is. All
    that waits for the disk or looks at every byte is done beside training.

    Args:
        folder: of the run.
        recorder: its records are brought to the disk first: a checkpoint must not be newer than they are.
        group: all ranks of the run.
        keep: how many checkpoints stay on the disk.

    Attributes:
        spent_s, last_s: what all of them, and the last one, have taken, beside training too; on rank 0.
    """

    def __init__(self, folder: RunFolder, recorder: MetricsRecorder, group: Group, keep: int) -> None:
        self._folder, self._recorder, self._group, self._keep = folder, recorder, group, keep
        self._work: BackgroundWork[float] | None = None  # on rank 0
        self.spent_s = self.last_s = 0.0

    def save(
        self, trainer: Trainer, state: RunState, metadata: Mapping[str, str] | None = None, best: bool = False
    ) -> None:
        """Write a checkpoint of this state, but for what is done beside what follows. Collective.

        Args:
            trainer: whose arrays are written.
            state: where the run stands.
            metadata: what the file of the weights says of its model (see `train.signature`).
            best: whether these are the best weights so far, which stay too.

        Raises:
            CheckpointError: on all ranks, when it cannot be written, or the one before could not; older ones are
                intact.
        """
        began, group = clock.now(), self._group
        writer = CheckpointWriter(self._folder.checkpoints, state.step)  # used on rank 0 alone
        arrays, values = trainer.state(), _values(trainer, state)
        specs = [each.specs() for each in arrays]

        def begin() -> None:
            self._end_last()
            with self._explained(state.step):
                self._recorder.flush()
                writer.begin()
                writer.open(MODEL_FILE, specs[0], metadata)

        def go_on() -> None:
            with self._explained(state.step):
                writer.open(OPTIMIZER_FILE, specs[1])

        def write(name: str, array: Array) -> None:
            with self._explained(state.step):
                writer.write(name, array)

        try:
            for each, prepare in zip(arrays, (begin, go_on), strict=True):
                on_root(group, prepare)
                each.gather(write)
        except BaseException:
            if group.is_root:
                writer.discard()
            raise
        if group.is_root:
            own_s = clock.now() - began
            self._work = group.comm.world.beside(lambda: own_s + self._finish(writer, state.step, values, best))

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Collective.

        Raises:
            CheckpointError: on all ranks, when it cannot be; older ones are intact.
        """
        on_root(self._group, self._end_last)

    def is_affordable(self, share: Callable[[float], float], elapsed_s: float) -> bool:
        """Return whether one more like the last one takes at most a share of the time; call it on rank 0.

        Args:
            share: of the seconds that the last one has taken.
            elapsed_s: the time, up to now.

        Raises:
            CheckpointError: when the last one could not be written.
        """
        if self._work is not None and not self._work.done():
            return False
        self._end_last()
        return self.spent_s + self.last_s <= share(self.last_s) * elapsed_s

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the last checkpoint, which a run that ends with an error leaves too. Not collective."""
        with nullcontext() if error is None else suppress(CheckpointError):
            self._end_last()

    def _end_last(self) -> None:
        """Wait for the last checkpoint, on rank 0."""
        work, self._work = self._work, None
        if work is not None:
            self.last_s = work.result()
            self.spent_s += self.last_s

    def _finish(self, writer: CheckpointWriter, step: int, values: Mapping[str, Any], best: bool) -> float:
        """Do what is done beside training, and return how long it took."""
        began = clock.now()
        try:
            with self._explained(step):
                self._recorder.sync()
                writer.finish(values, self._keep, best)
        finally:
            writer.discard()
        return clock.now() - began

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Turn the system's refusals into a sentence."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint of step {step} can be written into {self._folder.checkpoints} "
                f"({error.strerror or error}); older ones are intact"
            ) from None


def find(folder: RunFolder, group: Group, writes: bool = True, best: bool = False) -> LastCheckpoint | None:
    """Return the run's last good checkpoint; None where there is none yet. Collective.

    Args:
        folder: of the run.
        group: all ranks.
        writes: whether the run will go on there, and write more.
        best: take the one with the best evaluation.

    Raises:
        CheckpointError: on all ranks, when none is whole, it holds what no run writes, or the folder cannot be used.
    """
    found: list[Checkpoint] = []  # on rank 0

    def read() -> list[Any] | None:
        check_folder(folder.checkpoints, writes)
        loaded = load_checkpoint(folder.checkpoints, best)
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
    trainer: Trainer, last: LastCheckpoint | None, folder: RunFolder, first: RunState
) -> tuple[RunState, list[str]]:
    """Give the trainer what `find` found; return the state, and lines to print. Collective.

    Args:
        trainer: which gets the arrays; without a checkpoint it stays as it is.
        last: what was found; None stands for a run that has no checkpoint yet, and begins.
        folder: of the run, for the message.
        first: the state of a run that begins, which says what its data are.

    Raises:
        CheckpointError: on all ranks, when it does not fit the model; nothing is changed then.
        DataError: on all ranks, for other data than it was begun with.
    """
    if last is None:
        return first, [f"{folder.path} has no checkpoint yet: starting at the beginning"]
    state = RunState.from_json(last.values)
    if (state.samples, state.data or first.data) != (first.samples, first.data):
        had, has = f"a run with {state.samples} training samples", f"the data set now gives {first.samples}"
        if state.samples == first.samples:
            had, has = "a run on other data", "the samples or labels have changed since, as many as they are"
        raise DataError(
            f"{last.folder} is of {had}, but {has}; resume with the data that it began with, or start a new run with "
            "another --out"
        )
    arrays = trainer.state()
    sources = [_source(None)] * 2
    if last.checkpoint is not None:
        sources = [_source(last.checkpoint.model), _source(last.checkpoint.optimizer)]
    for each, (_, specs, file) in zip(arrays, sources, strict=True):  # both, before either is written
        each.check(specs, file)
    for each, source in zip(arrays, sources, strict=True):
        each.scatter(*source)
    trainer.load_scalars(last.values["optimizer"])
    return replace(state, data=first.data), [*last.notices, *_moved(last, trainer)]


def load_weights(model: Module, group: Group, where: Arrangement, last: LastCheckpoint) -> None:
    """Give a model the weights that `find` found. Collective.

    Args:
        model: this rank's part, initialized.
        group: all ranks.
        where: how the model lies on them.
        last: what was found.

    Raises:
        CheckpointError: on all ranks, when it does not fit the model; nothing is changed then.
    """
    file = None if last.checkpoint is None else last.checkpoint.model
    model_state(model, group, where).scatter(*_source(file))


def _source(file: TensorFile | None) -> tuple[Callable[[str], Array], Mapping[str, ArraySpec] | None, Path | None]:
    """Return what `ModelState.scatter` takes: on rank 0 how to read the file, what is in it, and its name."""
    if file is None:
        return dict[str, Array]().__getitem__, None, None
    return file.__getitem__, file.specs, file.file


def _values(trainer: Trainer, state: RunState) -> dict[str, Any]:
    """Return what state.json holds. Collective."""
    return {
        **state.to_json(),
        "seed": trainer.seed,
        "ranks": trainer.group.size,
        "layout": dict(zip(AXES, _mesh(trainer).shape, strict=True)),
        "optimizer": trainer.scalars(),
        "fixed": _is_fixed(trainer),
        "algorithms": _algorithms(trainer),
        "cuts": [] if trainer.arrangement is None else [len(cut) for cut in trainer.arrangement.cuts],
    }


def _part(place: Coordinates) -> str:
    """Return the name of the part of the model that the ranks of a data-parallel group have."""
    return f"p{place.p} t{place.t}"


def _algorithms(trainer: Trainer) -> dict[str, list[str]]:
    """Return the all-reduce of each bucket by part of the model, for each has buckets of its own. Collective."""
    own = trainer.algorithms()
    if own is None:
        return {}
    everyones, mesh = trainer.group.gather(own), _mesh(trainer)
    # Several ranks have the same part, and the last of them in this order stays: that is the lowest rank.
    return {_part(mesh.coordinates(rank)): names for rank, names in reversed(list(enumerate(everyones)))}


def _moved(last: LastCheckpoint, trainer: Trainer) -> list[str]:
    """Return a line where a run goes on with another layout: which, and whether its results stay equal to the bit."""
    before, now = last.mesh, _mesh(trainer)
    if before.shape == now.shape:
        return []
    plain = before.dp == before.size and now.dp == now.size
    words = (counted(before.size, "rank"), f"{now.size}") if plain else (str(before), str(now))
    fixed = last.values.get("fixed", False) and _is_fixed(trainer)
    equal = f": equal {'bit for bit' if fixed else 'up to rounding'}" if trainer.in_step else ""
    return [f"the run had {words[0]} and goes on with {words[1]}{equal}"]


def _is_fixed(trainer: Trainer) -> bool:
    """Return whether sums are taken in an order that does not depend on the layout."""
    return trainer.arrangement is not None and trainer.arrangement.layout.fixed


def _mesh(trainer: Trainer) -> Mesh:
    return Mesh(dp=trainer.group.size) if trainer.arrangement is None else trainer.arrangement.mesh.mesh
