"""A run's state and its checkpoints: folders of safetensors and JSON, whole or absent.

    checkpoints/
      step-00000120/  model.safetensors  optimizer.safetensors  state.json
      step-00000180/  ...
      latest          the name of the newest one, written last
      best            the name of the one with the best evaluation, which stays; with --keep-best

    Saver       the trainer's arrays and state.json into a new checkpoint, beside training
    find        the last good checkpoint of a run's folder, verified
    restore     the trainer's arrays and the loop's state from what was found
    save, resume    the same for a loop of one's own

Rank 0 reads and writes, so no shared file system is needed. Arrays go between its file and the
ranks' parts of them one at a time (see `parallel.model_state`): a checkpoint fits a layout that no
single rank's memory would hold, and any layout reads what any other has written.

A checkpoint is written under a temporary name (see `CheckpointWriter`), every file is brought to
disk, and then the folder is renamed: a kill at any moment leaves the older ones as they were.
state.json holds the size and SHA-256 of the other two files, and the SHA-256 of its own values, so
that damage is found before a weight is used. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import nnmpi.clock as clock
from nnmpi.backend.array import Array
from nnmpi.backend.backend import numpy_backend
from nnmpi.comm.agreement import on_root
from nnmpi.comm.buffers import as_bytes
from nnmpi.comm.group import Group
from nnmpi.comm.world import BackgroundWork
from nnmpi.compose.arrange import replicate
from nnmpi.compose.stats import Totals
from nnmpi.compose.trainer import Trainer, Training
from nnmpi.errors import CheckpointError, DataError, UsageError, counted, raised_as
from nnmpi.files import (
    foreign,
    read_json,
    read_text,
    rebuilt,
    sha256,
    sync_folder,
    write_atomically,
    write_synced,
)
from nnmpi.mesh import AXES, Mesh
from nnmpi.models.torch_weights import open_arrays
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.model_state import ArraySpec, ModelState
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import MetricsRecorder

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
LATEST_FILE = "latest"
BEST_FILE = "best"
PREFIX = "step-"
Arrays: TypeAlias = tuple[ModelState, ModelState]  # of the model, and of the optimizer
Loop: TypeAlias = Trainer | tuple[Module, Optimizer, Group]
FORMAT = 1  # of state.json; a change that older programs would misread raises it
KEEP = 3  # checkpoints that stay on disk


# ---- where a run stands ----


@dataclass(frozen=True)
class Extent:
    """How long a run is.

    Attributes:
        epochs, steps: passes over the training data, and updates; the run ends with whichever comes
            first.
        train_batches, test_batches: batches of one pass over the training data, and over the test
            data.
        stop: after how many updates it ends this time.
    """

    epochs: int
    steps: int
    train_batches: int
    test_batches: int
    stop: int

    def passes(self, state: RunState) -> float:
        """Return the passes over the training data so far, with the fraction of the present one."""
        return state.epoch + state.batch / self.train_batches


@dataclass
class RunState:
    """A run's state between two steps. Never changed; not frozen, since that is slower to make.

    Attributes:
        step: updates done.
        epoch, batch: the next batch: its epoch (from 0), and its number in the epoch.
        window: sums since the last line of training metrics.
        in_epoch: sums since the epoch began.
        best, best_step: the accuracy of the best evaluation so far, of tokens and quantities its
            loss, and after how many steps it was; 0 for none.
        elapsed_s: seconds of training, evaluating and saving, over all parts of a resumed run.
        samples: rows of the training set, which `batch` counts in.
        data: what tells the data from others, see `Inputs.identity`.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    window: Totals = field(default_factory=Totals)
    in_epoch: Totals = field(default_factory=Totals)
    best: float = 0.0
    best_step: int = 0
    elapsed_s: float = 0.0
    samples: int = 0
    data: str = ""

    def after(self, totals: Totals, window: Totals) -> RunState:
        """Return the state after steps with these sums, including those since the last record."""
        step, batch = self.step + totals.steps, self.batch + totals.steps
        return replace(
            self, step=step, batch=batch, in_epoch=self.in_epoch.plus(totals), window=window
        )

    def after_epoch(self) -> RunState:
        """Return the state at the beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, batch=0, in_epoch=Totals())

    def after_evaluation(self, report: Totals, by_loss: bool) -> RunState:
        """Return the state with this evaluation of its weights as the best, if it is better."""
        value, sign = (report.loss, -1) if by_loss else (report.accuracy, 1)
        better = isfinite(value) and (not self.best_step or sign * value > sign * self.best)
        return replace(self, best=value, best_step=self.step) if better else self

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunState:
        """Return the state of which the fields are among these JSON values.

        Raises:
            KeyError, TypeError, AttributeError: when a value is missing, or of another kind.
        """
        return rebuilt(cls, {name: values[name] for name in cls.__dataclass_fields__})


# ---- over all ranks ----


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to continue, found and verified once.

    Attributes:
        values: JSON values of state.json: step, epoch, batch, seed, the optimizer's scalars and
            what the loop adds.
        folder: where it lies, on rank 0's node.
        notices: lines to print about it.
        model: parameters and buffers of the whole model by full name, whatever the layout of the
            run was; read when they are asked for. On rank 0 alone, as the optimizer.
        optimizer: state arrays by "slot/full.parameter.name".
    """

    values: Mapping[str, Any]
    folder: Path
    notices: tuple[str, ...] = ()
    model: TensorFile | None = None
    optimizer: TensorFile | None = None

    @property
    def mesh(self) -> Mesh:
        """The layout of the run that wrote it."""
        return rebuilt(Mesh, self.values["layout"])

    def cuts(self, mesh: Mesh, virtual_stages: int) -> list[int] | None:
        """Return each stage's number of layers; None for another number of stages."""
        cuts: list[int] = self.values["cuts"]
        return cuts if len(cuts) == mesh.pp * virtual_stages and mesh.pp > 1 else None


class Saver(AbstractContextManager["Saver"]):
    """Writes the checkpoints of a run beside its training, one at a time.

        training    step |write| step | step | step | step |write| step |end|   "write" waits for the checkpoint before
        beside it        '-----sum, sync, name, remove-----'     '----------'

    The values are copied where they must go anyway: into the files, which the system keeps in
    memory until it has brought them to the disk. So nothing that is as long as the model stays in
    the program, whatever the layout is. All that waits for the disk or looks at every byte is done
    beside training.

    Args:
        folder: of the run.
        recorder: its records are brought to the disk first: a checkpoint must not be newer than
            they are.
        group: all ranks of the run.

    Attributes:
        spent_s, last_s: what all of them, and the last one, have taken, beside training too; on
            rank 0.
    """

    def __init__(self, folder: RunFolder, recorder: MetricsRecorder, group: Group) -> None:
        self._folder, self._recorder, self._group = folder, recorder, group
        self._work: BackgroundWork[float] | None = None  # on rank 0
        self.spent_s = self.last_s = 0.0

    def save(
        self,
        trainer: Trainer,
        state: RunState,
        metadata: Mapping[str, str] | None = None,
        best: bool = False,
    ) -> None:
        """Write a checkpoint of this state, but for what is done beside what follows. Collective.

        Args:
            trainer: whose arrays are written.
            state: where the run stands.
            metadata: what the file of the weights says of its model (see `train.signature`).
            best: whether these are the best weights so far, which stay too.

        Raises:
            CheckpointError: on all ranks, when it cannot be written, or the one before could not;
                older ones are intact.
        """
        began, group, folder = clock.now(), self._group, self._folder.checkpoints
        # used on rank 0 alone
        writer, values = CheckpointWriter(folder, state.step), _values(trainer, state)
        what = f"no checkpoint of step {state.step} can be written into {folder}"
        explained = raised_as(CheckpointError, what, "older ones are intact")

        @explained
        def begin() -> None:
            self._end_last()
            self._recorder.flush()
            writer.begin()

        @explained
        def finish() -> None:
            self._recorder.sync()
            writer.finish(values, KEEP, best)

        def beside(before_s: float) -> float:
            began = clock.now()
            try:
                finish()
            finally:
                writer.discard()
            return before_s + clock.now() - began

        try:
            on_root(group, begin)
            _write(writer, trainer.state(), group, explained, metadata)
        except BaseException:
            if group.is_root:
                writer.discard()
            raise
        if group.is_root:
            self._work = group.comm.world.beside(partial(beside, clock.now() - began))

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Collective.

        Raises:
            CheckpointError: on all ranks, when it cannot be; older ones are intact.
        """
        on_root(self._group, self._end_last)

    def is_affordable(self, limit_s: float) -> bool:
        """True if one more checkpoint keeps their total within these seconds; on rank 0.

        Raises:
            CheckpointError: when the last one could not be written.
        """
        if self._work is not None and not self._work.done():
            return False
        self._end_last()
        return self.spent_s + self.last_s <= limit_s

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the last checkpoint, also after an error. Not collective."""
        with nullcontext() if error is None else suppress(CheckpointError):
            self._end_last()

    def _end_last(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self.last_s = work.result()
            self.spent_s += self.last_s


def find(
    folder: RunFolder, group: Group, writes: bool = True, best: bool = False
) -> Checkpoint | None:
    """Return the run's last good checkpoint; None where there is none yet. Collective.

    Args:
        folder: of the run.
        group: all ranks.
        writes: whether the run will continue there, and write more.
        best: take the one with the best evaluation.

    Raises:
        CheckpointError: on all ranks, when none is whole, it holds what no run writes, or the
            folder cannot be used.
    """
    result: list[Checkpoint] = []  # on rank 0

    def read() -> list[Any] | None:
        check_folder(folder.checkpoints, writes)
        loaded = load_checkpoint(folder.checkpoints, best)
        if loaded is None:
            return None
        with foreign(loaded.folder / STATE_FILE, CheckpointError, "not what a run writes"):
            # before any work is done
            _ = RunState.from_json(loaded.values), loaded.cuts(loaded.mesh, 1)
        result.append(loaded)
        return [
            dict(loaded.values),
            str(loaded.folder),
            [*loaded.notices, f"resuming from {loaded.folder}"],
        ]

    answer: list[Any] | None = on_root(group, read)
    if answer is None:
        return None
    values, place, notices = answer
    return replace(result[0] if result else Checkpoint(values, Path(place)), notices=tuple(notices))


def restore(
    trainer: Trainer, last: Checkpoint | None, folder: RunFolder, first: RunState
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
        had, has = (
            f"a run with {state.samples} training samples",
            f"the data set now gives {first.samples}",
        )
        if state.samples == first.samples:
            had, has = (
                "a run on other data",
                "the samples or labels have changed since, as many as they are",
            )
        raise DataError(
            f"{last.folder} is of {had}, but {has}; resume with the data that it began with, or"
            " start a new run with another --out"
        )
    _read(last, trainer.state())
    with foreign(last.folder / STATE_FILE, CheckpointError, "not what a run writes"):
        trainer.load_scalars(last.values["optimizer"])
    return replace(state, data=first.data), [*last.notices, *_moved(last, trainer)]


def _write(
    writer: CheckpointWriter,
    arrays: Arrays,
    group: Group,
    explained: Any,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write the model's arrays and the optimizer's; errors come through `explained`. Collective."""
    for file, array in zip((MODEL_FILE, OPTIMIZER_FILE), arrays, strict=True):
        on_root(
            group,
            partial(
                explained(writer.open), file, array.specs(), about if file == MODEL_FILE else None
            ),
        )
        array.gather(explained(writer.write))


def _read(last: Checkpoint, arrays: Arrays) -> None:
    """Give the model and the optimizer what a checkpoint holds, or change nothing. Collective."""
    sources = [source_of(last.model), source_of(last.optimizer)]
    for array, (_, specs, file) in zip(arrays, sources, strict=True):
        # both, before either is written
        array.check(specs, file)
    for array, source in zip(arrays, sources, strict=True):
        array.scatter(*source)


# ---- of a loop of your own ----


def save(folder: str | Path, loop: Loop, keep: int = KEEP, **place: Any) -> None:
    """Save a checkpoint of your own loop: weights, optimizer state, place in the data. Collective.

        nnmpi.save("checkpoints", worker, epoch=epoch + 1)

    It is whole or absent, whenever the program is killed, and any layout reads it.

    Args:
        folder: of its checkpoints, which may be made; each is named after the optimizer's steps.
        loop: a `Worker`; or model, optimizer and group, where the ranks of the group have the same
            of both.
        keep: how many of the newest ones stay.
        place: numbers and texts, which `resume` returns.

    Raises:
        UsageError: on all ranks, for a place that JSON does not have.
        CheckpointError: on all ranks, when it cannot be written; older ones are intact.

    Example:
        >>> model = models.mlp((4,), 3).initialize(seed=0)
        >>> optimizer = optim.Adam(model.storage)
        >>> group = nnmpi.simulate(lambda group: group, ranks=1)[0]
        >>> nnmpi.save("checkpoints", (model, optimizer, group), epoch=1)
        >>> nnmpi.resume("checkpoints", (model, optimizer, group))
        {'epoch': 1}
    """
    try:
        json.dumps(place, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the place is numbers and texts of Python's, such as int(epoch): {error}"
        ) from None
    explained = raised_as(
        CheckpointError, f"no checkpoint can be written into {folder}", "older ones are intact"
    )
    with _training(loop) as training:
        writer, group = CheckpointWriter(Path(folder), training.optimizer.steps), training.group
        values = {"optimizer": training.scalars(), "place": place}
        try:
            on_root(group, explained(writer.begin))
            _write(writer, training.state(), group, explained)
            on_root(group, partial(explained(writer.finish), values, keep))
        finally:
            if group.is_root:
                writer.discard()


def resume(folder: str | Path, loop: Loop) -> dict[str, Any]:
    """Restore the last good checkpoint of `save`, and return its place; {} if none. Collective.

    The loop then continues to the bits of one without a break: dropout depends on the optimizer's
    steps, and the order of the data on seed and epoch.

        place = nnmpi.resume("checkpoints", worker)
        for epoch in range(place.get("epoch", 0), 20): ...

    Args:
        folder, loop: as of `save`.

    Raises:
        CheckpointError: on all ranks, when none is whole, it does not fit the model, or it is of
            another program; nothing is changed then.

    Example:
        >>> model = models.mlp((4,), 3).initialize(seed=0)
        >>> group = nnmpi.simulate(lambda group: group, ranks=1)[0]
        >>> nnmpi.resume("no-checkpoints-yet", (model, optim.Adam(model.storage), group))
        {}
    """
    result: list[Checkpoint] = []  # on rank 0

    def read() -> dict[str, Any] | None:
        check_folder(Path(folder))
        last = load_checkpoint(Path(folder))
        if last is None:
            return None
        if "place" not in last.values:
            raise CheckpointError(
                f"{last.folder} is of the train command, which goes on by --resume; nnmpi.load"
                " opens it"
            )
        for notice in last.notices:
            warnings.warn(notice, stacklevel=2)
        result.append(last)
        return dict(last.values)

    with _training(loop) as training:
        values = on_root(training.group, read)
        if values is None:
            return {}
        _read(result[0] if result else Checkpoint(values, Path(folder)), training.state())
        training.load_scalars(values["optimizer"])
        return dict(values["place"])


@contextmanager
def _training(loop: Loop) -> Iterator[Training]:
    if isinstance(loop, Trainer):
        yield loop
        return
    model, optimizer, group = loop
    where = replicate(model, group, numpy_backend())
    yield Training(model, optimizer, group, where)
    where.free()


def source_of(
    file: TensorFile | None,
) -> tuple[Callable[[str], Array], Mapping[str, ArraySpec] | None, Path | None]:
    """Return the source for `ModelState.scatter`: on rank 0 a reader, contents and name."""
    if file is None:
        return dict[str, Array]().__getitem__, None, None
    return file.__getitem__, file.specs, file.file


def _values(trainer: Trainer, state: RunState) -> dict[str, Any]:
    """Return what state.json holds. Collective."""
    return {
        **asdict(state),
        "seed": trainer.seed,
        "ranks": trainer.group.size,
        "layout": dict(zip(AXES, trainer.arrangement.mesh.mesh.shape, strict=True)),
        "optimizer": trainer.scalars(),
        "fixed": trainer.arrangement.layout.fixed,
        "cuts": [len(cut) for cut in trainer.arrangement.cuts],
    }


def _moved(last: Checkpoint, trainer: Trainer) -> list[str]:
    """Return a line where a run continues with another layout: which, and whether its results stay
    equal to the bit.
    """
    before, now = last.mesh, trainer.arrangement.mesh.mesh
    if before.shape == now.shape:
        return []
    plain = before.dp == before.size and now.dp == now.size
    words = (counted(before.size, "rank"), f"{now.size}") if plain else (str(before), str(now))
    fixed = last.values.get("fixed", False) and trainer.arrangement.layout.fixed
    equal = f": equal {'bit for bit' if fixed else 'up to rounding'}" if trainer.in_step else ""
    return [f"the run had {words[0]} and goes on with {words[1]}{equal}"]


# ---- a checkpoint's folder, by one process ----


def check_folder(folder: Path, writes: bool = True) -> None:
    """Check that a run can resume here and save more, before any work that could be lost.

    A folder that is not there yet is fine.

    Raises:
        CheckpointError: when it is no folder, or may not be read or written.
    """
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        # a file, or a link that leads nowhere: there is no checkpoint, and none can be written
        raise CheckpointError(
            f"{folder} is not a folder; put the run's checkpoints there, or move it away"
        )
    if not os.access(folder, os.R_OK | os.X_OK | (os.W_OK if writes else 0)):
        raise CheckpointError(
            f"{folder} cannot be used; let this user read and write it, or copy the run to where"
            " that is so"
        )


def load_checkpoint(folder: Path, best: bool = False) -> Checkpoint | None:
    """Return the checkpoint that `latest` names; None where there is none yet.

    Where that one is damaged the newest good one is taken, and a notice says so.

    Args:
        folder: of the checkpoints.
        best: take the one that `best` names, and no other.

    Raises:
        CheckpointError: when there are checkpoints and none of them is whole.
    """
    if best:
        result = _named(folder, BEST_FILE)
        if result is None:
            raise CheckpointError(f"{folder} keeps no best checkpoint; train with --keep-best")
        return read_checkpoint(result)
    notices: list[str] = []
    for candidate in _candidates(folder):
        try:
            return replace(read_checkpoint(candidate), notices=tuple(notices))
        except CheckpointError as error:
            notices.append(f"{error}; an older checkpoint is used instead")
    if notices:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole: {notices[0].rpartition(';')[0]}"
        )
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in this folder.

    Raises:
        CheckpointError: when a file is missing, unreadable, cut, changed, or of a newer format; the
            message names it.
    """
    file = folder / STATE_FILE
    with foreign(file, CheckpointError, "damaged or missing"):
        state = read_json(file)
        result, files = state.pop("sha256"), state["files"]
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has another format than {FORMAT}; use the version of nnmpi that wrote it"
        )
    if result != digest(state):
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in it")
    try:
        with raised_as(CheckpointError, f"{folder} cannot be read"):
            _verify(folder, files)
    except (AttributeError, KeyError, TypeError):
        raise CheckpointError(f"{file} does not say the sizes and sums of its files") from None
    del state["format"], state["files"]
    return Checkpoint(
        state, folder, (), TensorFile(folder / MODEL_FILE), TensorFile(folder / OPTIMIZER_FILE)
    )


def digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, however they are laid out in a file."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _verify(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Check sizes first (cheap, finds a cut file), then the sums."""
    for name in (MODEL_FILE, OPTIMIZER_FILE):
        file, expected = folder / name, files.get(name)
        if expected is None:
            raise CheckpointError(f"{folder / STATE_FILE} says nothing of {name}")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes, not {expected['bytes']}"
            )
        if sha256(file) != expected["sha256"]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in {STATE_FILE}")


def steps(folder: Path) -> list[Path]:
    """Return the checkpoints' folders, newest first, without temporary ones."""
    return sorted((item for item in folder.glob(f"{PREFIX}*") if item.is_dir()), reverse=True)


def _candidates(folder: Path) -> list[Path]:
    """Return the folders to try: what `latest` names first, then from the newest on."""
    result, named = steps(folder), _named(folder, LATEST_FILE)
    return result if named is None else [named, *(item for item in result if item != named)]


def _named(folder: Path, file: str) -> Path | None:
    """Return the checkpoint that a file names; None where it names none."""
    try:
        named = folder / read_text(folder / file).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return named if named in steps(folder) else None


class CheckpointWriter:
    """Writes a checkpoint under a temporary name, which `finish` renames once it is whole.

        writer = CheckpointWriter(folder, step=120)
        try:
            writer.begin()
            writer.open(MODEL_FILE, outlines)
            writer.write("0.weight", array)     # one array at a time, in the order of the outlines
            ...
            writer.finish(state, keep=3)        # all that waits for the disk, or looks at every
                                                byte, is done here
        finally:
            writer.discard()                    # what is not finished is removed

    All methods but `discard` raise OSError when the disk is full or not writable. Older checkpoints
    are then as before.

    Args:
        folder: of the run's checkpoints; it is made if needed.
        step: the updates done, which give the checkpoint its name.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._final = folder / f"{PREFIX}{step:08d}"
        self._temporary = folder / f".{self._final.name}.tmp"
        self._writers: dict[str, TensorWriter] = {}

    def begin(self) -> None:
        """Make the folder."""
        if not self._folder.is_dir():
            self._folder.mkdir()  # not the run's folder: somebody may have removed it
            sync_folder(self._folder.parent)
        for left in self._folder.glob(f".{PREFIX}*.tmp"):  # by a kill
            shutil.rmtree(left, ignore_errors=True)
        self._temporary.mkdir()

    def open(
        self, name: str, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Begin a file of arrays."""
        self._writers[name] = TensorWriter(self._temporary / name, specs, metadata)

    def write(self, name: str, array: Array) -> None:
        """Write the next array of the file that was opened last."""
        self._writers[next(reversed(self._writers))].write(name, array)

    def finish(self, state: Mapping[str, Any], keep: int, best: bool = False) -> str:
        """Write state.json, sync to disk, and rename the checkpoint; return its folder.

        Keeps the `keep` newest ones, and the best. Checkpoints of later steps are removed too: they
        belong to a future that a resumed run has left.

        Args:
            state: JSON values.
            keep: how many of the newest ones stay.
            best: whether this is the best one so far, which stays too.
        """
        files = {name: writer.close() for name, writer in self._writers.items()}
        values = {"format": FORMAT, **state, "files": files}
        text = json.dumps({**values, "sha256": digest(values)}, indent=1, allow_nan=False)
        write_synced(self._temporary / STATE_FILE, text.encode() + b"\n")
        sync_folder(self._temporary)
        if self._final.exists():  # the same step again, after an older one was resumed
            shutil.rmtree(self._final)
        self._temporary.rename(self._final)
        sync_folder(self._folder)
        for file in (LATEST_FILE, BEST_FILE)[: 1 + best]:
            write_atomically(self._folder / file, f"{self._final.name}\n".encode())
        _prune(self._folder, self._final, keep)
        return self._final.name

    def discard(self) -> None:
        """Remove what is not finished; after `finish` this does nothing."""
        for writer in self._writers.values():
            writer.abandon()
        shutil.rmtree(self._temporary, ignore_errors=True)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    result, best = steps(folder), _named(folder, BEST_FILE)
    past = [item for item in result if item <= newest]
    for entry in result:
        if entry not in past[:keep] and not (entry == best and entry in past):
            shutil.rmtree(entry, ignore_errors=True)


# ---- one file of arrays ----
#
# The library writes all arrays at once, so that all of them would have to be there; here they come
# one at a time:
#
#     8 bytes      N, the length of the header, little-endian
#     N bytes      the header, JSON: {"0.weight": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}, ...}
#     the rest     the arrays' elements, little-endian, in C order, one array right after the other
#
# Source of the format: https://github.com/huggingface/safetensors

HEADER_STEP_BYTES = 8  # the header is filled up with spaces, so that the elements are aligned
NAMES = {
    **{
        f"{kind}{bits}": f"{short}{bits}"
        for kind, short in (("int", "I"), ("uint", "U"))
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "complex64": "C64",
    "bool": "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class TensorWriter:
    """Writes one file.

    Args:
        file: a new file; it is seen half-written, so it belongs into a folder that nobody reads
            yet.
        specs: shape and dtype of each array, in the order in which they will come.
        metadata: texts by name, which the file holds too.

    Raises:
        CheckpointError: for a dtype that the format has not.
        OSError: when the disk is full or not writable; so do the methods.
    """

    def __init__(
        self, file: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str] | None = None
    ) -> None:
        self._file = file
        header = _header(file, specs, metadata or {})
        self._stream = file.open("wb")
        try:
            self._put(np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8))
        except OSError:
            self.abandon()
            raise

    def write(self, name: str, array: Array) -> None:
        """Write the next array, as announced; any strides."""
        # order="C" copies what has gaps and, unlike ascontiguousarray, leaves a 0-d array 0-d
        self._put(as_bytes(np.asarray(array, array.dtype.newbyteorder("<"), order="C")))

    def close(self) -> dict[str, str | int]:
        """Wait until the disk has the file, and return its "bytes" and "sha256".

        The sum is taken here, of what the file holds, so that whoever waits for `write` does not
        wait for it.
        """
        self._stream.flush()
        result: dict[str, str | int] = {"bytes": self._stream.tell(), "sha256": sha256(self._file)}
        os.fsync(self._stream.fileno())
        self._stream.close()
        return result

    def abandon(self) -> None:
        """Close the file as it is; after `close` this does nothing."""
        with suppress(OSError):  # what is buffered may find no room: the file is of no use anyway
            self._stream.close()

    def _put(self, content: Array) -> None:
        self._stream.write(content.data)


class TensorFile:
    """The arrays of a file by name, each read when it is asked for.

    Args:
        file: any safetensors file.

    Attributes:
        specs: shape and dtype of each array, in the order in which they stand there.
        metadata: texts by name; empty where there are none.

    Raises:
        CheckpointError: when it is missing or damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        with open_arrays(file, CheckpointError) as opened:
            self.metadata: dict[str, str] = opened.metadata() or {}
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            self.specs = {
                name: ArraySpec(
                    tuple(item.get_shape()), DTYPES.get(item.get_dtype(), item.get_dtype())
                )
                for name, item in slices.items()
            }

    def __getitem__(self, name: str) -> Array:
        """Read one array.

        Raises:
            CheckpointError: when it cannot be read, or there is none of this name.
        """
        with open_arrays(self.file, CheckpointError) as opened:
            # kept open, it would keep a removed file on the disk
            array: Array = opened.get_tensor(name)
        return array


def _header(file: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str]) -> bytes:
    """Return the header as bytes: which array is where."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, spec in specs.items():
        if spec.dtype not in NAMES:
            raise CheckpointError(
                f"{name} is {spec.dtype}, which {file.name} cannot hold; use float32 or float64"
            )
        entries[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [at, at + spec.bytes],
        }
        at += spec.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % HEADER_STEP_BYTES)
