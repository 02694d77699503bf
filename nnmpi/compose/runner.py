"""A runner takes a batch forward and backward, wherever the model lies; here is what goes into one and what comes out.

    DeviceBatch         a part of a batch where the model lives, with its labels checked on the host
    DeferredScalars     loss and right answers of a step, read from a device all at once at its end
    Runner, Outcome     the interface that a Worker uses; `replica_runner` and `pipeline_runner` implement it
    sum_cross_entropy   the default loss; score_of: what gives the score beside a loss

To read a number from a device is to wait until it has done all that was given to it before, and meanwhile nobody gives
it anything to do. So a step's losses and right answers are read at its end, in one copy.

NumPy's numbers are there at once, and are taken as they come. For the same reason labels and indices are checked on the
host, before they go to a device or while it works: a kernel cannot raise an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.backend.kernels import to_float32
from nnmpi.comm.buffers import to_host
from nnmpi.comm.gradients import Traffic
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.losses import ERRORS, SumError, squared_errors
from nnmpi.custom import fault
from nnmpi.data.dataset import IGNORED
from nnmpi.data.loader import Batch
from nnmpi.errors import NnmpiError, ShapeError, UsageError
from nnmpi.nn.linear import Embedding
from nnmpi.nn.module import Module
from nnmpi.ops.loss import cross_entropy
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.data import DataParallel
from nnmpi.parallel.pipeline.pass_report import PassReport
from nnmpi.parallel.sharded.cross_entropy import best_classes
from nnmpi.parallel.sharded.cross_entropy import cross_entropy as sharded_cross_entropy
from nnmpi.tensor.tensor import Tensor

CROSS_ENTROPY = "cross-entropy"


class DeferredScalars:
    """Sums by name, in float64, of numbers that arise on the host or a device."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def clear(self) -> None:
        """Forget all numbers."""
        self._values.clear()

    def add(self, name: Hashable, value: Array | float) -> None:
        """Add a number to the sum of this name; nothing is waited for.

        Args:
            value: a Python number, or an array of one element, here or on the device.
        """
        self._values[name] = self._values[name] + _number(value) if name in self._values else _number(value)

    def put(self, name: Hashable, value: Array | float) -> None:
        """Let the sum of this name be this number; as `add` otherwise."""
        self._values[name] = _number(value)

    def read(self) -> dict[Hashable, float]:
        """Return the sums by name. A device is waited for once; without numbers there not at all."""
        there = {name: value for name, value in self._values.items() if not isinstance(value, float)}
        if not there:
            return dict(self._values)
        numbers = to_host(namespace(next(iter(there.values()))).concatenate(list(there.values())))
        return self._values | dict(zip(there, map(float, numbers), strict=True))


def _number(value: Array | float) -> Any:
    """Return a number as float, or a new array (1,) of float64 on the device."""
    if isinstance(value, float | int | np.generic | np.ndarray):
        return float(value)
    return value.reshape(1).astype("float64")


Check: TypeAlias = Callable[["DeviceBatch", int, Tensor], None]


class DeviceBatch(NamedTuple):
    """What a model gets of a batch.

    Attributes:
        x, y: samples and labels where the model lives.
        labels: the labels on the host; None if they are only on a device.
        length: see `data.loader.Batch`.
    """

    x: Array
    y: Array
    labels: NDArray[Any] | None
    length: int | None = None

    def rows(self, part: slice) -> DeviceBatch:
        """Return some of its rows."""
        labels = None if self.labels is None else self.labels[part]
        return DeviceBatch(self.x[part], self.y[part], labels, self.length)


def to_device(batch: Batch, model: Module, backend: Backend) -> DeviceBatch:
    """Return a batch where a backend has its arrays.

    Raises:
        ShapeError: for an index, on its way to a device, that no embedding of the model has a row for.
    """
    if backend.is_device and isinstance(batch.x, np.ndarray) and batch.x.dtype.kind in "iu":
        _check_indices(batch.x, model)
    return DeviceBatch(backend.asarray(batch.x), backend.asarray(batch.y), batch.labels, batch.length)


def label_check(loss: Callable[[Tensor, Array], Tensor], classes: int) -> Check:
    """Return what looks at a microbatch's labels on the host, where a loss on a device does not.

    Called with a microbatch, the place of its first row in the batch, and its logits, it raises ShapeError for a label
    that is no class. Of losses that are not nnmpi's own nothing is known, and nothing is checked.

    Args:
        classes: where they are shared out over ranks; else 0, and there are as many as logits in a row.
    """
    function = getattr(loss, "func", loss)
    known = isinstance(loss, SumCrossEntropy) or function in (cross_entropy, sharded_cross_entropy)

    def check(device_batch: DeviceBatch, first: int, logits: Tensor) -> None:
        labels = device_batch.labels
        if not known or labels is None or isinstance(device_batch.y, np.ndarray):
            return
        if labels.dtype.kind not in "iu" or not labels.size:
            return
        count = classes or logits.shape[-1]
        ignored = _ignored(loss, labels)
        if labels.min() >= 0 and labels.max() < count:
            return
        wrong = ((labels < 0) | (labels >= count)) & (labels != ignored if ignored is not None else True)
        if wrong.any():
            place = np.argwhere(wrong)[0]
            raise ShapeError(
                f"label {int(labels[tuple(place)])} in row {first + place[0]} of the batch is outside 0..{count - 1}"
            )

    return check


def _check_indices(indices: NDArray[Any], model: Module) -> None:
    entries = [module.num_embeddings for _, module in model.named_modules() if isinstance(module, Embedding)]
    if not entries or not indices.size or (indices.min() >= 0 and indices.max() < max(entries)):
        return
    row, *_ = np.argwhere((indices < 0) | (indices >= max(entries)))[0]
    wrong = indices[row][(indices[row] < 0) | (indices[row] >= max(entries))]
    raise ShapeError(f"index {int(np.ravel(wrong)[0])} in row {row} of the batch is outside 0..{max(entries) - 1}")


LOSS, SCORE = "loss", "score"  # the names of their sums in `DeferredScalars`

SumLoss: TypeAlias = Callable[[Tensor, Array], Tensor]
Score: TypeAlias = Callable[[Tensor, DeviceBatch], Array | float]
Values: TypeAlias = Mapping[Hashable, float]
Sums: TypeAlias = Callable[[Values], tuple[float, float]]


class Outcome(NamedTuple):
    """What a batch gave on this rank. Of ranks that compute the same, one counts and the others give zeros.

    Attributes:
        sums: to be called with what `scalars.read()` returned; returns what this rank contributes: the sum of its
            targets' losses, and how many were predicted correctly, or their score otherwise. Ranks that
            duplicate another's work return zeros. It may communicate, so call it on all ranks.
        targets: how many labels that count this rank contributes.
        traffic: what was communicated for it.
        report: of the pass through the pipeline; None without one.
        staleness: by how many updates the weights of each microbatch's forward were older than those that its
            gradient changed; empty where there is only one update.
    """

    sums: Sums
    targets: int
    traffic: Traffic = Traffic()
    report: PassReport | None = None
    staleness: tuple[int, ...] = ()


class Runner(Protocol):
    """Takes batches through a model that lies on the ranks in one way or another. Everything is collective.

    Attributes:
        scalars: the numbers that are to be known of a step at its end.
        parallel: sums the gradients over the replicas.
        updates: whether weights are updated on the way, and not once by the Worker.
    """

    scalars: DeferredScalars
    parallel: DataParallel
    updates: bool

    @property
    def replays(self) -> int:
        """How many passes were replayed so far."""

    @property
    def held_bytes(self) -> int:
        """What recorded passes keep of memory between two steps."""

    def run(self, batch: Batch, step: int, scale: float, replays: bool = False) -> Outcome:
        """Compute the gradients of the batch's mean loss, summed over the replicas; on a device, do not wait for them.

        Args:
            step: the number of the update, which keys dropout.
            scale: what the gradients are multiplied by (see `optim.clip`).
            replays: whether passes may be recorded and replayed (see `compose.replayed`), if the runner can.
        """

    def evaluate(self, batch: Batch, scalars: DeferredScalars) -> bool:
        """Add LOSS and SCORE of a batch in evaluation mode, if this rank's count; return whether they do."""

    def explain(self, batch: Batch, step: int, value: float) -> Exception:
        """Return the error that says where a loss or gradient that is not finite came from."""

    def summary(self) -> list[str]:
        """Return lines about the batches since the last call, if there is something to tell."""

    def release(self) -> None:
        """Take everything off the model again; a second call does nothing."""


def check_cuts(batch: Batch, fixed: bool) -> None:
    """Refuse a batch that was dealt to the replicas in another way than they sum gradients.

    Raises:
        UsageError: for whole microbatches without a fixed order of sums, as layers that communicate would not meet; and
            for parts of them with one.
    """
    if not fixed and len(batch.cuts) != batch.microbatches:
        raise UsageError(
            f"this rank has {len(batch.cuts)} of {batch.microbatches} microbatches, as Loader(whole=True) deals them "
            'for reduction "fixed"; leave whole out'
        )
    if fixed and len(batch.cuts) == batch.microbatches and len(batch.y) != batch.global_rows:
        raise UsageError(
            f'this rank has a part of each of {batch.microbatches} microbatches, but with reduction "fixed" each is '
            "one replica's alone; give Loader(whole=True)"
        )


class SumCrossEntropy:
    """The sum of the labels' cross-entropies. Called with logits and labels.

    Where a sample has several labels, those that are `IGNORED` count for nothing. Where it has one, it counts: looking
    for what does not would take a sixth of a small model's step.

    Args:
        function: `ops.cross_entropy`, or the one for classes that are shared out, with its options.

    Attributes:
        shared: whether it is for classes that are shared out over ranks.
        is_own: whether the function is one of nnmpi's.
    """

    def __init__(self, function: Callable[..., Tensor], shared: bool) -> None:
        self._function, self.shared = function, shared
        self.is_own = getattr(function, "func", function) in (cross_entropy, sharded_cross_entropy)

    def __repr__(self) -> str:
        options = getattr(self._function, "keywords", {})
        return f"{CROSS_ENTROPY} with label_smoothing {options.get('label_smoothing', 0.0)}"

    def __call__(self, logits: Tensor, labels: Array) -> Tensor:
        return self._function(logits, labels, reduction="sum", ignore_index=_ignored(self, labels))


def sum_cross_entropy(arrangement: Arrangement | None, label_smoothing: float = 0.0) -> SumCrossEntropy:
    """Return the sum of the labels' cross-entropies for logits as an arrangement's model gives them.

    That is of this rank's classes alone, where they are shared out: no rank gathers them.
    """
    options: dict[str, Any] = {"label_smoothing": label_smoothing}
    if arrangement is None or not arrangement.classes:
        return SumCrossEntropy(partial(cross_entropy, **options), shared=False)
    options |= {"group": arrangement.mesh.tp, "classes": arrangement.classes}
    return SumCrossEntropy(partial(sharded_cross_entropy, **options), shared=True)


def named_loss(loss: SumLoss | str | None, arrangement: Arrangement | None) -> SumLoss:
    """Return the loss of this name ("cross-entropy", "mse" ...), the cross-entropy for None; a function as it is.

    Raises:
        UsageError: for a name that is not known.
    """
    if callable(loss):
        return loss
    if loss in ERRORS:
        return SumError(loss)
    if loss not in (None, CROSS_ENTROPY):
        raise UsageError(f"the loss {loss!r} is unknown; choose one of {', '.join((CROSS_ENTROPY, *ERRORS))}")
    return sum_cross_entropy(arrangement)


def _ignored(loss: Callable[..., Tensor], labels: Array) -> int | None:
    """Return which label counts for nothing in a cross-entropy; None for none."""
    if isinstance(loss, SumCrossEntropy):
        return IGNORED if labels.ndim > 1 else None
    ignored: int | None = getattr(loss, "keywords", {}).get("ignore_index")
    return ignored


def check_optimizer(model: Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that would update other arrays than the model's.

    Raises:
        UsageError: saying what to do.
    """
    if not isinstance(optimizer, Optimizer):
        what = type(optimizer).__name__
        raise UsageError(f"a {what} stands where the optimizer belongs: nnmpi.Worker(model, optimizer, group)")
    if optimizer.storage is not model.storage:
        raise UsageError(
            "the optimizer works on other arrays than the model's; make it over model.storage, after the last "
            "model.initialize()"
        )


def check_loss(loss: SumLoss, arrangement: Arrangement | None) -> None:
    """Refuse a loss that is a mean, ignores what is counted, or would take this rank's classes alone for all.

    Raises:
        UsageError: naming what to do.
    """
    _refuse_mean(loss)
    ignored = getattr(loss, "keywords", {}).get("ignore_index")
    if ignored is not None and ignored >= 0:
        raise UsageError(
            f"the loss ignores label {ignored}, but it is divided by the number of labels from 0 on; give what does "
            f"not count the label {IGNORED}, and the loss ignore_index={IGNORED}"
        )
    if arrangement is None or not arrangement.classes:
        return
    is_shared = isinstance(loss, SumCrossEntropy) and loss.shared
    if not is_shared and getattr(loss, "func", None) is not sharded_cross_entropy:
        raise UsageError(
            f"the {arrangement.classes} classes are shared out over tp {arrangement.mesh.tp.size} (Sharding.VOCAB), so "
            "this loss would see a part of them alone; take compose.runner.sum_cross_entropy(arrangement), or "
            "Sharding.COLUMN, after which the logits are whole"
        )


def summed(loss: SumLoss, logits: Tensor, labels: Array) -> Tensor:
    """Return what a loss makes of logits.

    Raises:
        UsageError: for what is no Tensor, or not a sum; for an exception in a loss, with its line.
    """
    try:
        found: object = loss(logits, labels)
    except (NnmpiError, MemoryError):
        raise
    except Exception as error:
        raise UsageError(fault(loss, ("logits", "labels"), error)) from error
    if not isinstance(found, Tensor):
        raise UsageError(f"the loss gave a {type(found).__name__}; return the sum of the losses, a Tensor")
    if found.size != 1:
        raise UsageError(f"the loss gave a Tensor of shape {found.shape}; return the sum of the losses, one number")
    return found


def _refuse_mean(loss: SumLoss) -> None:
    """Refuse a loss that says by its arguments that it is no sum, such as `cross_entropy` as it stands."""
    if isinstance(loss, Module) and getattr(loss, "reduction", "sum") != "sum":
        raise UsageError(
            f"the loss has reduction={loss.reduction!r}, but a Worker divides the sum of all ranks' losses once: "
            f'make it by nn.{type(loss).__name__}(reduction="sum")'
        )
    try:
        reduction = inspect.signature(loss).parameters.get("reduction")
    except (TypeError, ValueError):  # a callable that has no signature
        return
    if reduction is not None and reduction.default != "sum":
        raise UsageError(
            f"the loss has reduction={reduction.default!r}, but a Worker divides the sum of all ranks' losses once: "
            'give it partial(loss, reduction="sum")'
        )


def score_of(loss: SumLoss, arrangement: Arrangement | None) -> Score:
    """Return what gives the score of outputs as an arrangement's model gives them; see `compose.losses`."""
    if isinstance(loss, SumError):
        return lambda outputs, device_batch: loss.score(outputs, device_batch.y)
    if arrangement is None or not arrangement.classes:
        return count_correct
    group, classes = arrangement.mesh.tp, arrangement.classes

    def count(logits: Tensor, device_batch: DeviceBatch) -> float:
        labels = Tensor(device_batch.y).numpy() if device_batch.labels is None else device_batch.labels
        return float((best_classes(logits.data, group, classes) == labels).sum())

    return count


def count_correct(logits: Tensor, device_batch: DeviceBatch) -> Array | float:
    """Return how many labels have their row's largest logit; of quantities the score of their squared errors.

    On a device that is an array of one number, for which nobody has waited. Where neither is defined it is NaN.
    """
    y = device_batch.y
    if y.dtype.kind == "f":
        return squared_errors(logits, y)
    if logits.ndim != y.ndim + 1 or y.dtype.kind not in "iu":
        return float("nan")
    values = to_float32(namespace(logits.data), logits.data)  # of bfloat16 not every library finds the largest
    equal: Array = values.argmax(axis=-1) == y
    return float(np.count_nonzero(equal)) if isinstance(equal, np.ndarray) else equal.sum()
