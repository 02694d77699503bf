"""A run's state and its checkpoints: folders of safetensors and JSON, written atomically.

    checkpoints/
      step-00000120/  model.safetensors  optimizer.safetensors  state.json
      step-00000180/  ...
      latest          the name of the newest checkpoint, written last

    Saver           saves the trainer's arrays and state.json in the background of training
    find            returns the last intact checkpoint of a run's folder
    restore         restores the trainer and the loop's state from a checkpoint
    save, resume    the same for a user's loop

Rank 0 reads and writes, so that no shared file system is needed. It gathers or scatters one array
at a time (see `parallel.model_state`): a model may be larger than one rank's memory, and any layout
reads any other layout's checkpoint. One file per rank would be written in parallel, but would need
a shared file system or the same nodes, and a conversion for every other layout.

A checkpoint is written under a temporary name (see `CheckpointWriter`) and synced to disk; then its
folder is renamed; then `latest` is replaced, in one operation. From this operation on it is the
run's newest checkpoint, and only afterwards are older ones removed. So a kill at any moment leaves
the old state or the new one. There is no second file that could disagree with `latest`: the best
evaluation is the one that the newest checkpoint's state.json names, as `best_step`.

A second checkpoint of one step has the name of the first, so that `latest` names both. There the
renaming decides: the first one is renamed, too, and is found by its other name until the second one
has the step's (see `steps`).

state.json also holds size and SHA-256 of the other two files, and the SHA-256 of its own values:
damage is found before a weight is used. There is no pickle, which could execute code.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar
from uuid import uuid4

import numpy as np

import nnmpi.base.clock as clock
from nnmpi.backend.array import Array
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.gemm import name_products
from nnmpi.base.errors import (
    CheckpointError,
    DataError,
    UsageError,
    check_int,
    counted,
    raised_as,
    shortened,
)
from nnmpi.base.files import (
    foreign,
    json_text,
    make_folder,
    opened_to_write,
    read_json,
    read_text,
    rebuilt,
    remove_folder,
    rename,
    sha256,
    sync_folder,
    write_atomically,
    write_synced,
)
from nnmpi.comm.agreement import on_root
from nnmpi.comm.buffers import as_bytes
from nnmpi.comm.group import Group
from nnmpi.comm.mesh import AXES, Mesh
from nnmpi.compose.arrange import Arrangement, replicate
from nnmpi.compose.evaluation import Evaluation
from nnmpi.compose.state import adapter_alphas, base_digest, spread
from nnmpi.compose.stats import Totals
from nnmpi.compose.trainer import Trainer, Training
from nnmpi.metrics.metric import Metric
from nnmpi.models.torch_weights import open_arrays
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import EMA, Optimizer
from nnmpi.parallel.model_state import ArraySource, ArraySpec, ArraySpecs, check_fit
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import MetricsRecorder

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
FILES = frozenset([MODEL_FILE, OPTIMIZER_FILE, STATE_FILE])  # of a checkpoint
LATEST_FILE = "latest"
# The folders that are a run's own. All others, such as step-good, are its user's, and are kept.
NAME = re.compile(r"step-(?:[0-9]{8}|[1-9][0-9]{8,})")
REPLACED = ".replaced"  # after the name of a checkpoint while a new one of its step takes its place
TEMPORARY = re.compile(rf"\.{NAME.pattern}\.tmp")
Trained: TypeAlias = Trainer | tuple[Module, Optimizer, Group | Arrangement]
Found = TypeVar("Found")
FORMAT = 1  # of state.json; increased by a change that older programs would misread
KEEP = 3  # newest checkpoints on disk


# ---- the state of a run ----


@dataclass(frozen=True)
class Extent:
    """The length of a run.

    Attributes:
        epochs, steps: passes over the training data, and updates; the run ends with the earlier
            one.
        train_batches, test_batches: batches in one pass over the training data and the test data.
        stop: updates after which this start ends (--stop-after).
    """

    epochs: int
    steps: int
    train_batches: int
    test_batches: int
    stop: int

    def passes(self, state: RunState) -> float:
        """Return the passes over the training data so far, with a fraction for the current one."""
        return state.epoch + state.batch / self.train_batches


@dataclass
class RunState:
    """A run's state between two steps.

    Attributes:
        step: updates done.
        epoch, batch: the epoch of the next batch, from 0, and its number in the epoch.
        window: sums since the last line of training metrics.
        in_epoch: sums since the epoch began.
        best, best_step: the metric that decides (see `RunMetrics.best_by`), and the step of the
            best evaluation so far; 0 for none.
        elapsed_s: seconds of training, evaluation and saving, over all starts of the run.
        samples: rows of the training set, on which `batch` depends.
        data: a hash of the data, see `Inputs.identity`.
        base: a hash of the weights that adapters are added to, see `base_digest`.
        rate_scale: factor on the schedule's learning rate, of plateaus and callbacks.
        rate_step: the step of the last plateau; 0 for none.
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
    base: str = ""
    rate_scale: float = 1.0
    rate_step: int = 0

    def add(self, totals: Totals) -> None:
        """Count steps with these sums."""
        self.step += totals.steps
        self.batch += totals.steps
        self.in_epoch.add(totals)

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.batch, self.in_epoch = self.epoch + 1, 0, Totals()

    def after_evaluation(self, report: Evaluation, by: Metric | None, gain: float) -> RunState:
        """Return the state with this evaluation of its weights as the best if it gains more.

        Args:
            report: the evaluation.
            by: the metric that decides; None for the loss.
            gain: by how much it must beat the best one.
        """
        value = report.loss if by is None else report.metrics[by.name]
        improvement = value - self.best
        if by is None or not by.higher_is_better:
            improvement = -improvement
        better = isfinite(value) and (not self.best_step or improvement > gain)
        return replace(self, best=value, best_step=self.step) if better else self

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunState:
        """Return the state with these JSON values, which may have more keys.

        Raises:
            KeyError, TypeError, AttributeError: for a missing value, or one of another type.
        """
        earlier = {"rate_scale": 1.0, "rate_step": 0, "base": ""}  # versions had none
        values = {**earlier, **values}
        return rebuilt(cls, {name: values[name] for name in cls.__dataclass_fields__})


# ---- over all ranks ----


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        values: of state.json: step, epoch, batch, seed, the optimizer's scalars and the loop's
            values.
        folder: on rank 0's node.
        notices: lines to print.
        model: on rank 0, parameters and buffers of the full model by name, independent of the
            layout; each is read from the file on demand.
        optimizer: on rank 0, state arrays by "slot/full.parameter.name".
    """

    values: Mapping[str, Any]
    folder: Path
    notices: tuple[str, ...] = ()
    model: TensorFile | None = None
    optimizer: TensorFile | None = None

    def warn(self, group: Group) -> None:
        """Issue the notices as a warning, on one rank for all, each time."""
        if self.notices and group.is_root:
            warnings.warn_explicit("; ".join(self.notices), UserWarning, "nnmpi", 0)

    def check_model(self, model: Module) -> None:
        """Refuse a full model of other sizes before it takes memory; only rank 0 knows.

        The sizes of a foreign run's options need not be those of its weights.

        Raises:
            CheckpointError: with the first parameter that differs.
        """
        if self.model is not None:
            specs = self.model.specs
            expected = {
                name: ArraySpec(tuple(item.declared), specs[name].dtype if name in specs else "")
                for name, item in model.named_parameters()
            }
            given = {name: spec for name, spec in specs.items() if name in expected}
            check_fit(given, expected, self.model.file)

    def check_base(self, now: str) -> None:
        """Refuse adapters to other weights than those that they were trained on.

        Args:
            now: of the model, see `base_digest`.

        Raises:
            CheckpointError: if it is not that of the checkpoint.
        """
        if self.values.get("base", "") != now:
            raise CheckpointError(
                f"{self.folder} has adapters of another base than this model's: its weights have"
                " changed since; give the model that they were trained on"
            )

    def check_alphas(self, now: Mapping[str, float]) -> None:
        """Refuse adapters that would be added with another factor.

        Args:
            now: of the model, see `adapter_alphas`.

        Raises:
            CheckpointError: for one whose alpha is not that of the checkpoint.
        """
        for name, alpha in self.values.get("alphas", {}).items():  # earlier versions had none
            if now.get(name, alpha) != alpha:
                raise CheckpointError(
                    f"{self.folder} has {name} of an adapter of alpha {alpha:g}, and the model's"
                    f" adapter has alpha {now[name]:g}; give it the checkpoint's"
                )

    def weights(self) -> ArraySource:
        """Return what gives the weights to use, `source_of` a file: the average if one is kept."""
        (read, specs, file), state = source_of(self.model), self.optimizer

        def used(name: str) -> Array:
            average = f"{EMA}/{name}"
            return state[average] if state and average in state.specs else read(name)

        return used, specs, file

    @property
    def mesh(self) -> Mesh:
        """The layout of the run that wrote it."""
        return rebuilt(Mesh, self.values["layout"])

    def cuts(self, mesh: Mesh, virtual_stages: int) -> list[int] | None:
        """Return each stage's number of layers; None if the mesh has another number of stages."""
        cuts: list[int] = self.values["cuts"]
        return cuts if len(cuts) == mesh.pp * virtual_stages and mesh.pp > 1 else None


class Saver(AbstractContextManager["Saver"]):
    """Write the checkpoints of a run in the background of training, one at a time.

        training      step |write| step | step | step | step |write| step |end|
        background         '---hash, sync, rename, remove---'     '----------'

    "write" first waits for the previous checkpoint. It copies the arrays into the files, that is
    into the system's page cache, so that the program needs no second copy of the model. Hashing and
    syncing, which look at every byte or wait for the disk, run in the background.

    Args:
        folder: of the checkpoints.
        recorder: of the metrics, which are synced before the checkpoint: a checkpoint must not be
            newer than its metrics.
        group: all ranks of the run.
        keep: the number of newest checkpoints to keep.
        root: the run's folder, below which no link is followed; None: `folder` itself.

    Attributes:
        spent_s, last_s: seconds of all checkpoints and of the last one, background work included;
            on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        recorder: MetricsRecorder,
        group: Group,
        keep: int = KEEP,
        root: Path | None = None,
    ) -> None:
        self._folder, self._recorder, self._group, self._keep = folder, recorder, group, keep
        self._root = root
        self._work: Future[float] | None = None  # on rank 0
        self.spent_s = self.last_s = 0.0

    def save(
        self,
        training: Training,
        step: int,
        values: Mapping[str, Any],
        metadata: Mapping[str, str] | None = None,
        best_step: int = 0,
    ) -> None:
        """Write a checkpoint; its background part may still run on return. Collective.

        Args:
            training: to save.
            step: the updates done.
            values: of state.json.
            metadata: of the weights' file (see `train.signature`).
            best_step: the step whose checkpoint stays beside the newest ones; 0 for none.

        Raises:
            CheckpointError: on all ranks, when this checkpoint or the previous one cannot be
                written; older ones, of which the error tells, are intact.
        """
        began, group = clock.now(), self._group
        writer = CheckpointWriter(self._folder, step, self._root)  # rank 0 alone uses it
        as_error = writer.explained()

        @as_error
        def begin() -> None:
            self._end_last()
            self._recorder.flush()
            writer.begin()

        @as_error
        def finish() -> None:
            self._recorder.sync()
            writer.finish(values, self._keep, best_step)

        def in_background(before_s: float) -> float:
            began = clock.now()
            try:
                finish()
            finally:
                writer.discard()
            return before_s + clock.now() - began

        try:
            on_root(group, begin)
            for file, array in zip((MODEL_FILE, OPTIMIZER_FILE), training.state(), strict=True):
                about = metadata if file == MODEL_FILE else None
                on_root(group, partial(as_error(writer.open), file, array.specs(), about))
                array.gather(as_error(writer.write))
        except BaseException:
            if group.is_root:
                writer.discard()
            raise
        if group.is_root:
            self._work = group.comm.world.beside(partial(in_background, clock.now() - began))

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Collective.

        Raises:
            CheckpointError: on all ranks, when it cannot be written; older ones are intact.
        """
        on_root(self._group, self._end_last)

    def is_affordable(self, limit_s: float) -> bool:
        """Return whether another checkpoint keeps `spent_s` within the limit; on rank 0.

        The next checkpoint is assumed to take as long as the last one.

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


class MemorySaver(AbstractContextManager["MemorySaver"]):
    """Keep the best evaluation's weights in rank 0's memory, for a run without a folder.

    Attributes:
        best: parameters and buffers of the full model by name; on rank 0.
    """

    def __init__(self) -> None:
        self.best: dict[str, Array] = {}

    def save(
        self,
        trainer: Trainer,
        step: int,
        values: Mapping[str, Any],
        metadata: Mapping[str, str] | None = None,
        best_step: int = 0,
    ) -> None:
        """Keep the weights, or their average, if this step is the best; see `Saver`. Collective."""

        def keep(name: str, array: Array) -> None:
            self.best[name] = array.copy()

        if step == best_step:
            with trainer.averaged():
                trainer.state()[0].gather(keep)

    def wait(self) -> None:
        """Do nothing: nothing is written."""

    def is_affordable(self, limit_s: float) -> bool:
        """Return False: there are no checkpoints."""
        return False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Keep the weights."""


def find(
    folder: RunFolder, group: Group, writes: bool = True, best: bool = False
) -> Checkpoint | None:
    """Return the run's last intact checkpoint; None if there is none yet. Collective.

    Args:
        folder: of the run.
        group: all ranks.
        writes: whether the run will write more checkpoints there.
        best: return the checkpoint of the best evaluation; see `load_best`.

    Raises:
        CheckpointError: on all ranks, when all are damaged, the values are not a run's, or the
            folder is inaccessible.
    """

    def check(loaded: Checkpoint) -> list[str]:
        with foreign(loaded.folder / STATE_FILE, CheckpointError, "not what a run writes"):
            # raises for bad values here, before the data are loaded
            state, _ = RunState.from_json(loaded.values), loaded.cuts(loaded.mesh, 1)
        known = best or loaded.notices
        return [] if known else _against_end(folder.finished, loaded, state.step)

    return _load_together(folder.checkpoints, group, check, writes, best)


def _against_end(file: Path, last: Checkpoint, step: int) -> list[str]:
    """Compare a checkpoint with the weights with which the run finished, if it did."""
    if not file.is_file():
        return []
    try:
        end, stored = read_json(file), read_json(last.folder / STATE_FILE)["files"][MODEL_FILE]
        differs = (end["step"], end["weights_sha256"]) != (step, stored["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{file} is damaged, so the weights of {last.folder} may not be the final ones"]
    return [f"{last.folder} has other weights than the run had at its end, says {file}"] * differs


def _load_together(
    folder: Path,
    group: Group,
    check: Callable[[Checkpoint], list[str]],
    writes: bool = True,
    best: bool = False,
) -> Checkpoint | None:
    """Return rank 0's checkpoint on every rank, its arrays on rank 0 alone. Collective.

    Args:
        folder, writes: see `check_folder`.
        best: whether to call `load_best` instead of `load_checkpoint`.
        group: all ranks.
        check: returns more notices, or raises a CheckpointError for wrong values; called on rank 0.
    """
    result: list[Checkpoint] = []  # on rank 0

    def read() -> list[Any] | None:
        check_folder(folder, writes)
        loaded = load_best(folder) if best else load_checkpoint(folder)
        if loaded is None:
            return None
        loaded = replace(loaded, notices=(*loaded.notices, *check(loaded)))
        result.append(loaded)
        return [dict(loaded.values), str(loaded.folder), loaded.notices]

    answer: list[Any] | None = on_root(group, read)
    if answer is None:
        return None
    values, path, notices = answer
    return result[0] if result else Checkpoint(values, Path(path), tuple(notices))


def restore(
    trainer: Trainer, last: Checkpoint | None, folder: RunFolder, first: RunState
) -> tuple[RunState, list[str]]:
    """Restore a trainer from a checkpoint; return the state, and lines to print. Collective.

    Args:
        trainer: to restore.
        last: the result of `find`. None restores nothing and returns `first`.
        folder: of the run, for the message.
        first: the state of a new run on the current data.

    Raises:
        CheckpointError: on all ranks, when the checkpoint does not fit the model; nothing is
            changed then.
        DataError: on all ranks, when the run began with other data.
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
                "a run on different data",
                "the samples, labels or weights have changed since",
            )
        raise DataError(
            f"{last.folder} is of {had}, but {has}; resume with the original data, or start a new"
            " run with another --out"
        )
    last.check_base(first.base)
    _read(last, trainer)
    with foreign(last.folder / STATE_FILE, CheckpointError, "not what a run writes"):
        trainer.load_scalars(last.values["optimizer"])
    lines = [*last.notices, f"resuming from {last.folder}", *_moved(last, trainer)]
    return replace(state, data=first.data), lines


def _read(last: Checkpoint, training: Training) -> None:
    """Restore model and optimizer from a checkpoint, or change nothing. Collective."""
    training.check_scalars(last.values["optimizer"], last.folder)
    arrays, replicas = training.state(), training.arrangement.mesh.replicas.size
    sources = [source_of(last.model), spread(source_of(last.optimizer), replicas)]
    for array, (_, specs, file) in zip(arrays, sources, strict=True):
        # both are checked before either is changed
        array.check(specs, file)
    for array, source in zip(arrays, sources, strict=True):
        array.scatter(*source)


# ---- for a user's loop ----


def save(folder: str | Path, loop: Trained, keep: int = KEEP, **position: Any) -> None:
    """Save a checkpoint of your own loop: weights, optimizer state, position. Collective.

        nnmpi.save("checkpoints", worker, epoch=epoch + 1)
        nnmpi.save("checkpoints", worker, loader=loader, plateau=plateau)

    The write is atomic: a kill leaves older checkpoints intact. Any layout reads the checkpoint. A
    folder holds the checkpoints of one run.

    Args:
        folder: of the checkpoints, created if missing; each is named after the optimizer's steps.
        loop: a `Worker`; or (model, optimizer, group), with both replicated on the group's ranks or
            sharded by ZeRO; or (model, optimizer, arrangement), of `nnmpi.arrange`.
        keep: the number of newest checkpoints to keep.
        position: in the data, as numbers and strings, which `resume` returns; and objects with
            `state` and `load`, such as a Loader or ReduceOnPlateau, which `resume` restores.

    Raises:
        UsageError: on all ranks, for values that JSON cannot hold, to keep none, for a folder with
            another run's checkpoints, for a rate of a ReduceOnPlateau that is not saved, and for
            gradients that are accumulated, but not used by an update yet.
        CheckpointError: on all ranks, when it cannot be written; older ones are intact.

    Example:
        >>> model = models.mlp((4,), 3).initialize(seed=0)
        >>> optimizer = optim.Adam(model.storage)
        >>> group = nnmpi.simulate(lambda group: group, ranks=1)[0]
        >>> nnmpi.save("checkpoints", (model, optimizer, group), epoch=1)
        >>> nnmpi.resume("checkpoints", (model, optimizer, group))
        {'epoch': 1}
    """
    check_int("keep", keep)
    objects = {name: item for name, item in position.items() if hasattr(item, "load")}
    position |= {name: item.state() for name, item in objects.items()}
    try:
        json_text(position)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"give Python's numbers and strings, such as int(epoch): {error}"
        ) from None
    with (
        _training(loop) as training,
        MetricsRecorder(None) as recorder,
        Saver(Path(folder), recorder, training.group, keep) as saver,
    ):
        optimizer, group, storage = training.optimizer, training.group, training.model.storage
        if isinstance(loop, tuple) and storage.has_gradients and not storage.spent:
            raise UsageError(
                "a checkpoint has no gradients, and the model has some that no update has used;"
                " save after optimizer.step(), or after model.zero_grad() if they are not wanted"
            )
        optimizer.check_saved(objects.values())
        plateau = getattr(optimizer.lr, "plateau", None)
        if plateau is not None and all(item is not plateau for item in objects.values()):
            raise UsageError(
                "the learning rate is that of a ReduceOnPlateau, whose losses would be forgotten;"
                " give it to save and to resume: plateau=plateau"
            )
        optimizer.run_id = on_root(group, partial(_claim, Path(folder), optimizer.run_id))
        values = {
            "run": optimizer.run_id,
            "base": base_digest(training.arrangement),
            "alphas": adapter_alphas(training.arrangement),
            "optimizer": training.scalars(),
            "place": position,
            "objects": list(objects),
            "iterated": optimizer.place_besides(objects.values()),
        }
        saver.save(training, training.optimizer.steps, values)
        saver.wait()


def _claim(folder: Path, run_id: str | None) -> str:
    """Return the number of the run that saves into a folder: a new one for a run without.

    Raises:
        UsageError: for a folder with checkpoints of another run, which this run's would replace, or
            with something else that is called `latest`.
    """
    existing, latest = steps(folder), folder / LATEST_FILE
    if not existing and os.path.lexists(latest) and not _may_be_replaced(latest):
        raise UsageError(
            f"{latest} is not of nnmpi, which would replace it by the name of a checkpoint; give"
            " another folder"
        )
    for item in existing:
        owner = run_id  # a damaged one may be replaced by a run that has resumed
        with suppress(OSError, ValueError):
            owner = read_json(item / STATE_FILE).get("run", "")
        if run_id is None or owner != run_id:
            raise UsageError(
                f"{folder} has checkpoints of another run, which this one would replace; continue"
                " it by nnmpi.resume(folder, loop) before the first step, or give another folder"
            )
    return uuid4().hex if run_id is None else run_id


def _may_be_replaced(latest: Path) -> bool:
    """Return whether a file has a checkpoint's name, or nothing, as after a power failure."""
    with suppress(OSError, ValueError):
        text = read_text(latest).strip()
        return not latest.is_symlink() and (not text or NAME.fullmatch(text) is not None)
    return False


def resume(folder: str | Path, loop: Trained, **objects: Any) -> dict[str, Any]:
    """Restore the last intact checkpoint of `save` and return its position; {} if none. Collective.

    The loop then computes the same bits as an uninterrupted one: dropout depends on the optimizer's
    steps, and the order of the data on seed and epoch. The learning rate is the checkpoint's.

        position = nnmpi.resume("checkpoints", worker)
        for epoch in range(position.get("epoch", 0), 20): ...

    Args:
        folder, loop: see `save`.
        objects: those that `save` got, by the same names; they are restored, too.

    Raises:
        CheckpointError: on all ranks, when all are damaged, the checkpoint does not fit the model,
            the optimizer or the objects, or the train command wrote it; nothing is changed then.

    Example:
        >>> model = models.mlp((4,), 3).initialize(seed=0)
        >>> group = nnmpi.simulate(lambda group: group, ranks=1)[0]
        >>> nnmpi.resume("no-checkpoints-yet", (model, optim.Adam(model.storage), group))
        {}
    """

    def check(loaded: Checkpoint) -> list[str]:
        if "place" not in loaded.values:
            raise CheckpointError(
                f"{loaded.folder} is from the train command; continue it with --resume, or open it"
                " with nnmpi.load"
            )
        return []

    with _training(loop) as training:
        last = _load_together(Path(folder), training.group, check)
        if last is None:
            return {}
        last.warn(training.group)
        saved, place = last.values.get("objects", []), dict(last.values["place"])
        if {*saved} != {*objects}:
            had, has = (", ".join(sorted(names)) or "nothing" for names in (saved, objects))
            raise CheckpointError(
                f"{last.folder} was saved with {had} besides the loop, but resume got {has}; give"
                " both the same objects by the same names"
            )
        last.check_base(base_digest(training.arrangement))
        last.check_alphas(adapter_alphas(training.arrangement))
        _read(last, training)
        training.load_scalars(last.values["optimizer"])
        training.optimizer.run_id = last.values.get("run", "")
        for name, item in objects.items():
            item.load(place.pop(name))
        training.optimizer.resume_after(last.values.get("iterated"))
        return place


@contextmanager
def _training(loop: Trained) -> Iterator[Training]:
    if isinstance(loop, Trainer):
        yield loop
        return
    if not isinstance(loop, tuple | list):
        what = type(loop).__name__
        raise UsageError(
            f"save and resume take a Worker, or (model, optimizer, group), not a {what}; a model's"
            " weights alone: numpy.savez(file, **model.state())"
        )
    model, optimizer, group = loop
    if isinstance(group, Arrangement):
        yield Training(model, optimizer, group.mesh.world, group)
        return
    if model.storage.is_sharded:
        raise UsageError(
            "each rank has only part of this model's parameters; instead of the group give what"
            " nnmpi.arrange returned"
        )
    where = replicate(model, group, numpy_backend())
    yield Training(model, optimizer, group, where)
    where.free()


def source_of(file: TensorFile | None) -> ArraySource:
    """Return the arguments of `ModelState.scatter`: on rank 0 a reader, specs and name."""
    if file is None:
        return dict[str, Array]().__getitem__, None, None
    return file.__getitem__, file.specs, file.file


def state_values(trainer: Trainer, state: RunState) -> dict[str, Any]:
    """Return the values of state.json. Collective."""
    return {
        **asdict(state),
        "seed": trainer.seed,
        "ranks": trainer.group.size,
        "layout": dict(zip(AXES, trainer.arrangement.mesh.sizes.shape, strict=True)),
        "optimizer": trainer.scalars(),
        "fixed": fixed_kernels(trainer.arrangement, trainer.group),
        "cuts": [len(cut) for cut in trainer.arrangement.cuts],
    }


def fixed_kernels(where: Arrangement, group: Group) -> list[str]:
    """Return the BLAS kernels that all ranks have, if sums have a fixed order. Collective.

    Another order of ranks changes no bit then; products by another processor's kernel do.
    """
    if not where.layout.fixed_order:
        return []
    return sorted(set(group.gather(name_products())))


def _moved(last: Checkpoint, trainer: Trainer) -> list[str]:
    """Return lines on a changed layout, and whether the results stay equal to the bit."""
    before, now, lines = last.mesh, trainer.arrangement.mesh.sizes, list[str]()
    was, kernels = last.values.get("fixed"), fixed_kernels(trainer.arrangement, trainer.group)
    same_bits = was and kernels and was in (True, kernels)  # true: of an earlier version
    if before.shape != now.shape:
        plain = before.dp == before.size and now.dp == now.size
        had, has = (
            (counted(before.size, "rank"), f"{now.size}") if plain else (str(before), str(now))
        )
        equal = (
            f": equal {'bit for bit' if same_bits else 'up to rounding'}" if trainer.in_step else ""
        )
        lines = [f"the run had {had} and continues with {has}{equal}"]
    if was and kernels and not same_bits:
        lines.append(
            f"the run had products by {' and '.join(was)} and continues with"
            f" {' and '.join(kernels)}: equal up to rounding; OPENBLAS_CORETYPE chooses one"
        )
    return lines


# ---- a checkpoint's folder, by one process ----


def check_folder(folder: Path, writes: bool = True) -> None:
    """Check that checkpoints can be read and written here, before any work that could be lost.

    A missing folder is fine.

    Raises:
        CheckpointError: for a path that is no folder, or without permissions.
    """
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        # a file or a dangling link: no checkpoint can be written
        raise CheckpointError(
            f"{folder} is not a folder; put the run's checkpoints there, or move it away"
        )
    if not os.access(folder, os.R_OK | os.X_OK | (os.W_OK if writes else 0)):
        raise CheckpointError(
            f"{folder} cannot be used; let this user read and write it, or copy the run to a"
            " folder where it can"
        )


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint that `latest` names; None if there is none yet.

    If it is damaged, return the newest intact one, with a notice.

    Args:
        folder: of the checkpoints.

    Raises:
        CheckpointError: when all checkpoints are damaged.
    """
    found = _first_intact(folder, read_checkpoint)
    if found is None:
        return None
    read, used, problems = found
    notices = list[str]()
    if (folder / LATEST_FILE).is_file() and _latest(folder) is None:
        notices.append(
            f"{folder / LATEST_FILE} names a checkpoint that is not here; the newest one is used"
        )
    notices += [f"{item}; an older checkpoint is used instead, {used.name}" for item in problems]
    return replace(read, notices=(*read.notices, *notices))


def load_best(folder: Path) -> Checkpoint | None:
    """Return the checkpoint of the run's best evaluation; None if there is no checkpoint yet.

    Which one it is stands in state.json of the newest checkpoint, and nowhere else.

    Args:
        folder: of the checkpoints.

    Raises:
        CheckpointError: when there was no evaluation yet, or the weights of the best one are gone
            or damaged: others never take their place.
    """
    while True:
        newest = _latest(folder)
        try:
            return _read_best(folder)
        except CheckpointError:
            # A training run may have written a better one, and removed this one, while it was read.
            if _latest(folder) == newest:
                raise


def _read_best(folder: Path) -> Checkpoint | None:
    found = _first_intact(folder, _read_state)
    if found is None:
        return None
    (state, _), newest, problems = found
    step = state.get("best_step", 0)
    instead = "leave --best out to use the last ones"
    if not step:
        raise CheckpointError(
            f"{newest} has no best weights, as no evaluation came before; {instead}"
        )
    gone = f"the weights of the best evaluation, of step {shortened(str(step))}, are gone"
    best = next((item for item in steps(folder) if step_of(item) == step), None)
    if best is None:
        raise CheckpointError(f"{gone} from {folder}; {instead}")
    try:
        read = read_checkpoint(best)
    except CheckpointError as error:
        raise CheckpointError(f"{gone}: {error}; {instead}") from None
    known = f"the best evaluation up to step {step_of(newest)} is used, that of step {step}"
    notices = [f"{problem}; {known}" for problem in problems]
    named = folder / LATEST_FILE
    if named.is_file() and _latest(folder) is None:
        notices.append(f"{named} names a checkpoint that is not here; {known}")
    return replace(read, notices=tuple(notices))


def _first_intact(
    folder: Path, read: Callable[[Path], Found]
) -> tuple[Found, Path, list[str]] | None:
    """Read the newest checkpoint for which that works; None if there is none yet.

    Returns:
        What was read, the checkpoint, and what is wrong with each newer one.

    Raises:
        CheckpointError: when it works for none.
    """
    problems = list[str]()
    for candidate in candidates(folder):
        try:
            return read(candidate), candidate, problems
        except CheckpointError as error:
            problems.append(f"{error}")
    if problems:
        raise CheckpointError(f"no checkpoint in {folder} is complete: {problems[0]}")
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in this folder, verified.

    Raises:
        CheckpointError: for a missing, unreadable, truncated or changed file, and for a newer
            format; the message names the file.
    """
    state, files = _read_state(folder)
    try:
        with raised_as(CheckpointError, f"{folder} cannot be read"):
            _verify(folder, files)
    except (AttributeError, KeyError, TypeError):
        raise CheckpointError(
            f"{folder / STATE_FILE} lacks the sizes and checksums of its files"
        ) from None
    return Checkpoint(
        state, folder, (), TensorFile(folder / MODEL_FILE), TensorFile(folder / OPTIMIZER_FILE)
    )


def _read_state(folder: Path) -> tuple[dict[str, Any], Mapping[str, Mapping[str, Any]]]:
    """Return the values of a checkpoint's state.json, and sizes and hashes of the other files.

    Raises:
        CheckpointError: for a missing or damaged file, and for a newer format.
    """
    file = folder / STATE_FILE
    with foreign(file, CheckpointError, "damaged or missing"):
        state = read_json(file)
        result, files = state.pop("sha256"), state["files"]
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has a format other than {FORMAT}; use the version of nnmpi that wrote it"
        )
    if result != digest(state):
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in it")
    del state["format"], state["files"]
    return state, files


def digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values; the layout of the file does not matter."""
    return hashlib.sha256(json_text(state, sort_keys=True).encode()).hexdigest()


def _verify(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Check sizes first, which is cheap and finds truncated files, then the hashes."""
    for name in (MODEL_FILE, OPTIMIZER_FILE):
        file, expected = folder / name, files.get(name)
        if expected is None:
            raise CheckpointError(f"{folder / STATE_FILE} has no entry for {name}")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes, not {expected['bytes']}"
            )
        if sha256(file) != expected["sha256"]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in {STATE_FILE}")


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removesuffix(REPLACED).rpartition("-")[2])


def steps(folder: Path) -> list[Path]:
    """Return the checkpoints' folders, newest first: without temporary ones, and the user's own.

    One that is being replaced stands for its step until the new one is there.
    """
    own = dict[int, Path]()
    with suppress(OSError):  # it may vanish meanwhile
        # in this order a replaced one comes behind the one that replaces it
        for item in sorted(folder.iterdir()):
            if NAME.fullmatch(item.name.removesuffix(REPLACED)) and item.is_dir():
                own.setdefault(step_of(item), item)
    return [own[step] for step in sorted(own, reverse=True)]


def candidates(folder: Path) -> list[Path]:
    """Return the folders to try: the one `latest` names, then the others from the newest on."""
    result, named = steps(folder), _latest(folder)
    return result if named is None else [named, *(item for item in result if item != named)]


def _latest(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` names, or None."""
    try:
        name = read_text(folder / LATEST_FILE).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return next((item for item in steps(folder) if item.name.removesuffix(REPLACED) == name), None)


class CheckpointWriter:
    """Write a checkpoint under a temporary name; `finish` renames it when it is complete.

        writer = CheckpointWriter(folder, step=120)
        try:
            writer.begin()
            writer.open(MODEL_FILE, specs)
            writer.write("0.weight", array)     # one array at a time, in the order of `specs`
            ...
            writer.finish(state, keep=3)        # hashes every byte and waits for the disk
        finally:
            writer.discard()                    # removes an unfinished checkpoint

    All methods except `discard` raise OSError when the disk is full or not writable; `explained`
    makes an error for the user of it. Older checkpoints stay intact.

    Args:
        folder: of the run's checkpoints, created if missing.
        step: the updates done, for the checkpoint's name.
        root: the folder that the user named, see `files.entered`; None: `folder`.
    """

    def __init__(self, folder: Path, step: int, root: Path | None = None) -> None:
        self._folder, self._step, self._root = folder, step, root
        self._final = folder / name_of(step)
        self._temporary = folder / f".{self._final.name}.tmp"
        self._is_named = False  # whether `_final` is this checkpoint
        self._streams: dict[str, BinaryIO] = {}

    def begin(self) -> None:
        """Create the temporary folder; tidy up what killed runs have left."""
        if not self._folder.is_dir():
            # not its parents: a removed run folder is not recreated
            make_folder(self._folder, self._root)
            sync_folder(self._folder.parent)
        for leftover in self._folder.iterdir():
            if TEMPORARY.fullmatch(leftover.name):
                remove_folder(leftover, self._root)
            elif _is_replaced(leftover):
                _put_back(leftover, self._root)
        make_folder(self._temporary, self._root)

    def open(self, name: str, specs: ArraySpecs, metadata: Mapping[str, str] | None = None) -> None:
        """Open the next file of arrays.

        Args:
            specs: shape and dtype of each array, in the order of the calls of `write`.
            metadata: {name: text}, stored in the header.

        Raises:
            CheckpointError: for a dtype that the format lacks.
        """
        header = _header(name, specs, metadata or {})
        self._streams[name] = stream = opened_to_write(self._temporary / name, root=self._root)
        stream.write(len(header).to_bytes(8, "little") + header)

    def write(self, name: str, array: Array) -> None:
        """Write the next array of the file opened last, with any strides."""
        *_, stream = self._streams.values()
        # order="C" copies non-contiguous arrays; unlike ascontiguousarray, it keeps 0-d arrays 0-d
        in_order = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        stream.write(as_bytes(in_order).data)

    def finish(self, state: Mapping[str, Any], keep: int, best_step: int = 0) -> str:
        """Write state.json, sync to disk, name the checkpoint, and let `latest` name it.

        Then older checkpoints are removed, except the `keep` newest and the best. Checkpoints of
        later steps are removed, too: they are left from before the run was resumed at an older
        step.

        Args:
            state: JSON values.
            keep: the number of newest checkpoints to keep.
            best_step: a step whose checkpoint is kept, too; 0 for none.

        Returns:
            The checkpoint's name.
        """
        files = {
            name: seal(self._temporary / name, stream) for name, stream in self._streams.items()
        }
        values = {"format": FORMAT, **state, "files": files}
        text = json_text({**values, "sha256": digest(values)}, indent=1)
        write_synced(self._temporary / STATE_FILE, text.encode() + b"\n", self._root)
        sync_folder(self._temporary, self._root)
        if self._final.is_dir():
            # The same step is saved twice, or a run that was resumed at an older one reaches it
            # again: what is there stays until the new one has its name.
            rename(self._final, _replaced(self._final).name, self._root)
        rename(self._temporary, self._final.name, self._root)
        self._is_named = True
        sync_folder(self._folder, self._root)
        write_atomically(self._folder / LATEST_FILE, f"{self._final.name}\n".encode(), self._root)
        _prune(self._folder, self._final, keep, best_step, self._root)
        return self._final.name

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an OSError into a CheckpointError that says what the folder has now."""
        try:
            yield
        except OSError:
            self.discard()
            of, step = self._folder, self._step
            if self._is_latest():
                what, advice = f"the checkpoint of step {step} is complete in {of}, but may not", ""
                what += " survive a power failure"
            else:
                new = "new checkpoint" if os.path.lexists(self._final) else "checkpoint"
                what = f"no {new} of step {step} can be written into {of}"
                advice = "older ones are intact" if steps(of) else "there is none yet"
            with raised_as(CheckpointError, what, advice):
                raise

    def _is_latest(self) -> bool:
        """Return whether `latest` names this checkpoint, as far as that can be known."""
        if not self._is_named:
            return False
        try:
            return read_text(self._folder / LATEST_FILE).strip() == self._final.name
        except FileNotFoundError:
            return False
        except (OSError, ValueError):
            return True

    def discard(self) -> None:
        """Remove an unfinished checkpoint; after `finish` this does nothing."""
        for stream in self._streams.values():
            with suppress(OSError):  # flushing may fail on a full disk, which does not matter
                stream.close()
        remove_folder(self._temporary, self._root)
        if self._is_named and not self._is_latest():
            _remove(self._final, self._root)
            self._is_named = False
        if not self._is_named:
            _put_back(_replaced(self._final), self._root)


def seal(file: Path, stream: BinaryIO) -> dict[str, str | int]:
    """Sync a written file to disk and close it; return its "bytes" and "sha256".

    The hash is computed here, not while the file is written: this runs in the background, while the
    ranks wait for each array.
    """
    with stream:
        stream.flush()
        result: dict[str, str | int] = {"bytes": stream.tell(), "sha256": sha256(file)}
        os.fsync(stream.fileno())
    return result


def _prune(
    folder: Path, newest: Path, keep: int, best_step: int = 0, root: Path | None = None
) -> None:
    """Remove all checkpoints but the newest of `keep` steps, and that of the best step."""
    past = [item for item in steps(folder) if step_of(item) <= step_of(newest)]
    kept = [*past[:keep], *(item for item in past if step_of(item) == best_step)]
    for item in (_replaced(newest), *steps(folder)):
        if item not in kept:
            _remove(item, root)


def _remove(checkpoint: Path, root: Path | None) -> None:
    """Remove a checkpoint, first its name, so that a kill leaves no half of one.

    A folder of that name with anything else in it is the user's, or has something of theirs.
    """
    with suppress(OSError):
        if not {item.name for item in checkpoint.iterdir()} <= FILES:
            return
    hidden = checkpoint.with_name(f".{name_of(step_of(checkpoint))}.tmp")
    with suppress(OSError):
        rename(checkpoint, hidden.name, root)
    remove_folder(hidden, root)


def _replaced(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + REPLACED)


def _is_replaced(entry: Path) -> bool:
    name = entry.name.removesuffix(REPLACED)
    return name != entry.name and NAME.fullmatch(name) is not None


def _put_back(replaced: Path, root: Path | None) -> None:
    """Give a checkpoint that was being replaced its own name again, unless the new one has it."""
    own = replaced.with_name(replaced.name.removesuffix(REPLACED))
    if own.is_dir():
        _remove(replaced, root)
    elif replaced.is_dir():
        with suppress(OSError):  # it is found under the other name, too
            rename(replaced, own.name, root)


# ---- one file of arrays ----
#
# The library safetensors writes all arrays at once, so that all would have to be in rank 0's
# memory. `CheckpointWriter` writes them one at a time.
#
#     8 bytes      N, the length of the header, little-endian
#     N bytes      JSON: {name: {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}, ...}
#     the rest     the arrays' elements, little-endian, in C order, without gaps
#
# Source of the format: https://github.com/huggingface/safetensors

HEADER_STEP_BYTES = 8  # the header is padded with spaces to align the elements
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


class TensorFile:
    """The arrays of a safetensors file by name, each read on demand.

    Attributes:
        file: its path.
        specs: shape and dtype of each array, in the file's order.
        metadata: {name: text}; may be empty.

    Raises:
        CheckpointError: for a missing or damaged file.
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
            CheckpointError: for an unreadable file, and for an unknown name.
        """
        # The file is opened for each array: an open one would stay on the disk when removed.
        with open_arrays(self.file, CheckpointError) as opened:
            return opened.get_tensor(name)


def _header(file: str, specs: ArraySpecs, metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, spec in specs.items():
        if spec.dtype not in NAMES:
            raise CheckpointError(
                f"{name} is {spec.dtype}, which {file} cannot hold; use float32 or float64"
            )
        entries[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [at, at + spec.bytes],
        }
        at += spec.bytes
    text = json_text(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % HEADER_STEP_BYTES)
