"""Losses and scores of a model's outputs.

    mse, mae, huber     quantities      score: minus the squared error; RMSE and R2 derive from it
    bce                 yes or no       score: the number of outputs on the right side of 0
    cross-entropy       classes         score: the number of labels with the largest logit

A score is a sum over targets, the higher the better; `stats.Totals` computes its mean. A target is
a sample here, with all its elements: its loss and its score are means over them, so the mean over
samples is the mean over all elements of the global batch.

Labels and indices are checked on the host, before or while a device computes: a kernel cannot raise
an error, and to read one from the device would wait for it (see `compose.scalars`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import nan, prod
from typing import Annotated, Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array, Shape
from nnmpi.backend.backend import Backend
from nnmpi.backend.kernels import to_float32
from nnmpi.base.custom import fault
from nnmpi.base.errors import NnmpiError, ShapeError, UsageError, counted, translated
from nnmpi.base.settled import Settled
from nnmpi.comm.agreement import as_text
from nnmpi.comm.buffers import to_host
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement
from nnmpi.data.dataset import IGNORED
from nnmpi.data.loader import Batch
from nnmpi.nn.linear import Embedding
from nnmpi.nn.module import Module
from nnmpi.ops.loss import binary_cross_entropy, cross_entropy, huber, mae, mse, nll
from nnmpi.parallel.sharded.cross_entropy import best_classes
from nnmpi.parallel.sharded.cross_entropy import cross_entropy as sharded_cross_entropy
from nnmpi.tensor.function import kind_of
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import Tensor

CROSS_ENTROPY = "cross-entropy"

SumLoss: TypeAlias = Callable[..., Tensor]  # of (logits, labels), nnmpi's own also of weights

YES_OR_NO = "bce"
ERRORS: dict[str, Callable[..., Tensor]] = {
    "mse": mse,
    YES_OR_NO: binary_cross_entropy,
    "mae": mae,
    "huber": huber,
}
NAMES = CROSS_ENTROPY, *ERRORS
LossName: TypeAlias = Annotated[str, NAMES]


class SumError(Settled, read_once="name std factor"):
    """The sum over samples of each one's mean error, for float targets.

    Args:
        name: one of ERRORS; with bce the outputs are logits.
        std: the data's targets were divided by it. Sums of losses times `factor`, and scores, are
            those of the data's own units.

    Raises:
        ShapeError: when called, for more or fewer outputs than targets.
    """

    def __init__(self, name: str, std: float = 1.0) -> None:
        self.name, self.std = name, std
        self.factor = std if name == "mae" else std**2
        self._function = ERRORS[name]

    def __repr__(self) -> str:
        return self.name if self.std == 1 else f"{self.name} of targets divided by {self.std!r}"

    def __call__(self, outputs: Tensor, targets: Array, weights: Array | None = None) -> Tensor:
        item = prod(targets.shape[1:])
        if not _fits(outputs._data, targets):
            expected = counted(item, "output")
            raise ShapeError(
                f"the model's outputs have shape {outputs.shape} and the targets {targets.shape};"
                f" let it return {expected} for each sample"
            )
        reshaped = outputs if outputs.shape == targets.shape else outputs.reshape(targets.shape)
        if weights is None:
            total = self._function(reshaped, targets, reduction="sum")
        else:
            total = _weighted(self._function(reshaped, targets, reduction="none"), weights)
        return total if item == 1 else total / item

    def score(self, outputs: Array, targets: Array) -> Array | float:
        """Return the sum of the samples' scores; on a device a 0-d array, without waiting."""
        if self.name != YES_OR_NO:
            return squared_errors(outputs, targets) * self.std**2
        values = to_float32(outputs).reshape(targets.shape)
        return ((values > 0) == (targets > 0.5)).sum() / prod(targets.shape[1:])


class SumCrossEntropy(Settled, read_once="label_smoothing classes"):
    """The sum of the labels' cross-entropies. Called with logits and labels.

    In samples with several labels, those that are `IGNORED` do not count. A single label always
    counts: a search for ignored ones would take a sixth of a small model's step.

    Args:
        arrangement: of the model, or None. If it shards the classes, the logits are those of this
            rank's classes, and are not gathered.
        label_smoothing: see `ops.cross_entropy`.

    Attributes:
        classes: the number of classes of all ranks; 0 if they are not sharded.
    """

    def __init__(
        self, arrangement: Arrangement | None = None, label_smoothing: float = 0.0
    ) -> None:
        self.label_smoothing = label_smoothing
        self.classes = 0
        self._group: Group | None = None  # over which the classes are sharded
        function: Callable[..., Tensor] = cross_entropy
        if arrangement is not None and arrangement.classes:
            self.classes, self._group = arrangement.classes, arrangement.mesh.tp
            function = partial(sharded_cross_entropy, group=self._group, classes=self.classes)
        self._function = partial(function, label_smoothing=label_smoothing, reduction="sum")

    def __repr__(self) -> str:
        return f"{CROSS_ENTROPY} with label_smoothing {self.label_smoothing}"

    def __call__(self, logits: Tensor, labels: Array, weights: Array | None = None) -> Tensor:
        ignored = _ignored(self, labels)
        if weights is None:
            return self._function(logits, labels, ignore_index=ignored)
        values = self._function(logits, labels, ignore_index=ignored, reduction="none")
        return _weighted(values, weights)

    def score(self, logits: Array, labels: Array) -> Array | float:
        """Return the number of labels with their row's largest logit.

        Args:
            labels: on the host if the classes are sharded.
        """
        if self._group is None:
            return count_correct(logits, labels)
        return float((best_classes(logits, self._group, self.classes) == labels).sum())


class LabelLoss(Settled, read_once="function func keywords scale"):
    """The sum of a user's loss over labels, or over samples of quantities.

    Args:
        function: (logits, labels) -> values of the labels' shape. Float labels may have several
            elements in a sample: its loss is their mean, or the function returns one value for each
            sample.
        scale: a factor of the sum, see `balanced`.

    Raises:
        UsageError: when called, for values of other shapes. A single number is refused: it could be
            a sum, a mean, or neither, such as a Dice over all samples, which depends on the
            samples that a rank has. (A function with an argument `reduction="sum"` declares a sum
            over labels, and is used as it is.)
    """

    def __init__(self, function: SumLoss, scale: float = 1.0) -> None:
        self.function, self.func = function, getattr(function, "func", function)
        self.keywords = _options(function)
        self.scale = scale
        self.__name__ = getattr(self.func, "__qualname__", type(self.func).__name__)

    def __repr__(self) -> str:
        return as_text(self.function)

    def __call__(self, logits: Tensor, labels: Array, weights: Array | None = None) -> Tensor:
        values: object = self.function(logits, labels)
        are_quantities = labels.dtype.kind == "f"
        expected = [labels.shape]
        if are_quantities:
            expected.append(labels.shape[:1])  # one value for each sample
        if not isinstance(values, Tensor) or values.shape not in expected:
            raise UsageError(
                f"the loss returned {_described(values)} for labels of shape {labels.shape}; return"
                ' one value for each label, as reduction="none" does: the Worker divides them by'
                " the global batch's labels. A function that returns their sum declares it:"
                ' def loss(logits, labels, reduction="sum"). A number of the batch as a whole, such'
                " as a Dice over all samples, is no sum: it would depend on which samples a rank"
                " has; return one for each sample, of float labels"
            )
        values_per_target = prod(values.shape[1:]) if are_quantities else 1
        factor = self.scale / max(values_per_target, 1)
        total = values.sum() if weights is None else _weighted(values, weights)
        return total if factor == 1 else total * factor


def _weighted(values: Tensor, weights: Array) -> Tensor:
    """Return the sum of the losses, (rows, ...), of samples with weights, (rows,)."""
    factors = Tensor(weights).reshape(-1, *[1] * (values.ndim - 1))
    return (values * factors).sum()


def _described(values: object) -> str:
    """Return what a loss returned that is not one value for each label, in words."""
    if not isinstance(values, Tensor):
        return kind_of(values)
    return f"values of shape {values.shape}" if values.shape else "one number"


def named_loss(loss: SumLoss | str | None, arrangement: Arrangement | None) -> SumLoss:
    """Return the loss of a name, the cross-entropy for None, or a function's loss.

    Raises:
        UsageError: for an unknown name, and a mean.
    """
    if callable(loss):
        return _as_sum(loss)
    if loss in ERRORS:
        return SumError(loss)
    if loss not in (None, CROSS_ENTROPY):
        raise UsageError(f"the loss {loss!r} is unknown; choose one of {', '.join(NAMES)}")
    return SumCrossEntropy(arrangement)


def _as_sum(loss: SumLoss) -> SumLoss:
    """Return a function's or a layer's loss as a sum, which it is or `LabelLoss` makes of it.

    Raises:
        UsageError: for a mean; with class weights, also for a sum: `balanced` needs the values.
    """
    reduction = "sum" if is_own_loss(loss) else _reduction(loss)
    if reduction == "none":
        return LabelLoss(loss)
    if reduction == "sum" and not has_class_weights(loss):
        return loss
    raise UsageError(
        f"the loss has reduction={reduction!r}, but a Worker divides all ranks' losses once: give"
        ' it partial(loss, reduction="none"), or a layer made with reduction="none"'
    )


def _reduction(loss: SumLoss) -> object:
    """Return a loss's reduction by its arguments or attributes; "none" without one."""
    if isinstance(loss, Module):
        return getattr(loss, "options", vars(loss)).get("reduction", "none")
    with suppress(TypeError, ValueError):  # a callable without a signature
        parameter = inspect.signature(loss).parameters.get("reduction")
        return "none" if parameter is None else parameter.default
    return "none"


def is_own_loss(loss: SumLoss) -> bool:
    """Return whether a loss is nnmpi's own."""
    return type(loss) in (SumError, SumCrossEntropy)


def balanced(loss: SumLoss, batch: Batch, group: Group, counts: bool) -> SumLoss:
    """Return the loss of a batch; collective with class weights.

    The mean of a loss with class weights is over the weights of the labels, and all losses are
    divided by the number of labels. So such a loss is multiplied by their quotient.

    Args:
        loss: see `named_loss`.
        batch: with this rank's rows.
        group: the ranks that share the batch.
        counts: whether this rank's losses count; others have the same rows.
    """
    if not has_class_weights(loss):
        return loss
    (total,) = group.sum_floats([label_weights(loss, batch, True) if counts else 0.0])
    return LabelLoss(getattr(loss, "function", loss), batch.global_targets / (total or 1.0))


def has_class_weights(loss: SumLoss) -> bool:
    """Return whether a loss of labels was given weights of their classes."""
    given = loss.function if isinstance(loss, LabelLoss) else loss
    # `func` of a partial, `function` of a layer
    operation = getattr(given, "func", getattr(given, "function", given))
    return operation in (cross_entropy, nll) and _options(given).get("weight") is not None


def label_weights(loss: SumLoss, batch: Batch, trains: bool = False) -> float:
    """Return the sum of the class weights of this rank's labels that count.

    Args:
        trains: whether the weights of the samples count, too.
    """
    class_weights = Tensor(_options(loss)["weight"]).numpy()
    labels = batch.on_host
    counts = labels >= 0
    # the loss itself refuses labels outside
    known = class_weights[np.minimum(labels[counts], len(class_weights) - 1)]
    if trains and batch.weights is not None:
        rows, *_ = np.nonzero(counts)
        known = known * to_host(batch.weights)[rows]
    return float(known.sum(dtype="float64"))


def _options(loss: SumLoss) -> Mapping[str, Any]:
    """Return the arguments that a `partial` or a layer gives its loss."""
    given = loss.function if isinstance(loss, LabelLoss) else loss
    # `keywords` of a partial, `options` of a layer; a user's class may use these names otherwise
    options: object = getattr(given, "keywords", getattr(given, "options", None))
    return options if isinstance(options, Mapping) else {}


def check_loss(loss: SumLoss, arrangement: Arrangement | None) -> None:
    """Refuse a loss that ignores counted labels, or would use this rank's classes as all.

    Raises:
        UsageError: with the remedy.
    """
    ignored = _options(loss).get("ignore_index")
    if ignored is not None and ignored >= 0:
        raise UsageError(
            f"the loss ignores label {ignored}, but is divided by the number of labels that are 0"
            f" or more; label ignored positions {IGNORED}, and give the loss ignore_index={IGNORED}"
        )
    knows_shards = isinstance(loss, SumCrossEntropy) and loss.classes
    if arrangement is not None and arrangement.classes and not knows_shards:
        raise UsageError(
            f"the {arrangement.classes} classes are sharded over tp {arrangement.mesh.tp.size}"
            " (Sharding.VOCAB), so this loss would see only part of them; use"
            " compose.losses.SumCrossEntropy(arrangement), or Sharding.COLUMN, after which the"
            " logits are whole"
        )


def refuse_weights(have: str) -> NoReturn:
    """Refuse weights where updates are of parts of a batch.

    Args:
        have: what has them, as the beginning of the sentence.

    Raises:
        UsageError: with the remedy.
    """
    raise UsageError(
        f"{have} weights, whose mean needs all labels of a global batch; updates of single workers"
        " or microbatches have none: train with a synchronous Worker, or without weights"
    )


def sum_of(loss: SumLoss, logits: Tensor, labels: Array, weights: Array | None = None) -> Tensor:
    """Return the loss of logits.

    Args:
        weights: (rows,), of the samples; None for equal ones.

    Raises:
        UsageError: when the result is not a Tensor of one number; for an exception in a loss, with
            its line; for weights with a loss that returns a sum.
    """
    if weights is not None and not isinstance(loss, SumError | SumCrossEntropy | LabelLoss):
        raise UsageError(
            "the samples have weights, by which the loss of each is multiplied, but this loss"
            ' declares a sum; return one value for each label, without reduction="sum"'
        )
    given = () if weights is None else (weights,)
    try:
        total: object = loss(logits, labels, *given)
    except (NnmpiError, MemoryError):
        raise
    except Exception as error:
        raise _explained(loss, error) from error
    if not isinstance(total, Tensor):
        raise UsageError(
            f"the loss returned {kind_of(total)}; return the sum of the losses, a Tensor"
        )
    if total.size != 1:
        raise UsageError(
            f"the loss returned a Tensor of shape {total.shape}; return the sum of the losses, one"
            " number"
        )
    if not is_own_loss(loss):
        _refuse_sharded(logits, total)
    return total


def _explained(loss: SumLoss, error: Exception) -> BaseException:
    """Return the error for an exception in a loss: a known one's, or one with its line."""
    if isinstance(error, FloatingPointError):
        known = translated(error)
        if known is not error:
            return known
    return UsageError(fault(getattr(loss, "function", loss), ("logits", "labels"), error))


def _refuse_sharded(logits: Tensor, total: Tensor) -> None:
    """Refuse a loss that uses parameters of which this rank has a part, or no gradient."""
    if total.tape is None:
        return
    last_of_model = -1 if logits.node is None else logits.node.number
    for node in total.tape.find().nodes:
        if node.number <= last_of_model:
            continue
        for edge in node.edges or ():
            if isinstance(edge, Parameter) and _is_partly_here(edge):
                raise UsageError(
                    f"the loss uses {edge.name} of a model that is sharded over ranks; use it in"
                    " the model's forward, or choose a layout with a full replica on each rank,"
                    " such as data parallelism or ZeRO 1"
                )


def _is_partly_here(parameter: Parameter) -> bool:
    """Return whether this rank lacks some of a parameter's values or gradients."""
    storage = None if parameter.version is None else parameter.version.storage()
    if storage is None:
        return False
    # of ZeRO's stages the first alone keeps all values and gradients on each rank
    return storage.is_sharded or getattr(storage, "stage", 1) > 1


def count_correct(logits: Array, y: Array) -> Array | float:
    """Return the number of correct labels; for quantities the score of their squared errors.

    The result on a device is an array of one number, without waiting. If the logits fit neither
    labels nor quantities, it is NaN.
    """
    if y.dtype.kind == "f":
        return squared_errors(logits, y)
    if logits.ndim != y.ndim + 1 or y.dtype.kind not in "iu":
        return float("nan")
    # not every library finds the largest of bfloat16
    equal = to_float32(logits).argmax(axis=-1) == y
    return float(np.count_nonzero(equal)) if isinstance(equal, np.ndarray) else equal.sum()


def score_of(loss: SumLoss) -> Callable[[Array, Array], Array | float]:
    """Return a loss's score: (logits, labels) -> the sum over samples.

    Call it on every rank, since it communicates if the classes are sharded.
    """
    return loss.score if isinstance(loss, SumCrossEntropy | SumError) else count_correct


def squared_errors(outputs: Array, targets: Array) -> Array | float:
    """Return minus the sum of samples' mean squared errors; NaN if the shapes do not fit."""
    if not _fits(outputs, targets):
        return nan
    difference = to_float32(outputs).reshape(targets.shape) - targets
    return -(difference * difference).sum() / max(prod(targets.shape[1:]), 1)


def _fits(outputs: Array, targets: Array) -> bool:
    return bool(outputs.shape[:1] == targets.shape[:1] and outputs.size == targets.size)


def to_device(batch: Batch, model: Module, backend: Backend) -> Batch:
    """Return a batch on the model's backend, with its labels on the host, too.

    Raises:
        ShapeError: when samples for a device have an index that is outside every embedding of the
            model.
    """
    if not backend.is_device:
        return batch
    if isinstance(batch.x, np.ndarray) and batch.x.dtype.kind in "iu":
        entries = vocabulary_of(model)
        if entries is not None:
            _check_range("index", batch.x, entries)
    return batch.to(backend)


def check_labels(loss: SumLoss, batch: Batch, first: int, shape: Shape) -> None:
    """Check a microbatch's labels on the host, for a loss on a device, which cannot check them.

    Only the labels of nnmpi's cross-entropy are checked: another loss may define labels
    differently.

    Args:
        loss: the loss.
        batch: the microbatch.
        first: the index of its first row in the batch.
        shape: of this rank's logits of the microbatch.

    Raises:
        ShapeError: for a label outside the classes.
    """
    if not isinstance(batch.y, np.ndarray):
        check_classes(loss, batch.labels, shape[-1], first)


def check_classes(loss: SumLoss, labels: Array | None, classes: int, first: int = 0) -> None:
    """Check labels on the host, of nnmpi's cross-entropy alone; see `check_labels`.

    Args:
        loss, first: see `check_labels`.
        labels: of the rows, or None.
        classes: this rank's logits of a row.
    """
    is_cross_entropy = (
        isinstance(loss, SumCrossEntropy) or getattr(loss, "func", loss) is cross_entropy
    )
    if labels is not None and is_cross_entropy and labels.dtype.kind in "iu":
        count = getattr(loss, "classes", 0) or classes
        _check_range("label", labels, count, first, _ignored(loss, labels))


def _ignored(loss: SumLoss, labels: Array) -> int | None:
    """Return the label that a cross-entropy ignores; None for none."""
    if isinstance(loss, SumCrossEntropy):
        return IGNORED if labels.ndim > 1 else None
    return getattr(loss, "keywords", {}).get("ignore_index")


def vocabulary_of(model: Module) -> int | None:
    """Return the number of rows of the model's largest embedding; None without one."""
    modules = (module for _, module in model.named_modules())
    rows = (module.num_embeddings for module in modules if isinstance(module, Embedding))
    return max(rows, default=None)


def _check_range(
    what: str, numbers: NDArray[Any], count: int, first: int = 0, ignored: int | None = None
) -> None:
    """Refuse numbers outside 0..count-1, except the ignored one; `first` numbers their rows."""
    if not numbers.size or (numbers.min() >= 0 and numbers.max() < count):
        return
    is_outside = (numbers < 0) | (numbers >= count)
    if ignored is not None:
        is_outside &= numbers != ignored
    if not is_outside.any():
        return
    place = tuple(np.argwhere(is_outside)[0].tolist())
    raise ShapeError(
        f"{what} {int(numbers[place])} in row {first + place[0]} of the batch is outside"
        f" 0..{count - 1}"
    )
