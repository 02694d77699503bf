"""Dataset: samples and labels, in memory or read by rows; and the split into two parts."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property, partial
from math import prod
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nnmpi.backend.array import Array, Integers, Shape, asarray, is_array, plain
from nnmpi.backend.random import stream
from nnmpi.base.errors import DataError, UsageError, check_int, shortened
from nnmpi.data.facts import Moments, moments
from nnmpi.data.hdf5 import in_place
from nnmpi.data.lazy import (
    Chosen,
    as_rows,
    blocks,
    change_rows,
    is_lazy,
    read_all,
    sampled,
)
from nnmpi.data.names import CLASSES, COLUMNS, Names

Predicts: TypeAlias = Literal["classes", "yes-or-no", "quantities"]
LabelKind: TypeAlias = Literal["classes", "quantities", "any"]  # of the labels in a file
TOKEN_TYPES = (np.uint16, np.uint32)
FEW_CLASSES = 10  # a set may have this many, however small it is
MOST_CLASSES = 20  # more are said
SURE_CLASSES = 1000  # up to this number, a set may have fewer labels than classes
MOST_LOST = 0.01  # largest rounding error of float32 allowed, in standard deviations of the column
OTHER_SCALE = 100.0  # images whose largest numbers differ by this factor have different units
IGNORED = -1  # the label of positions that count neither in the loss nor in the score: padding
# What a statistic reads at a time: samples, and their bytes in float64.
BLOCK_ROWS, BLOCK_BYTES = 4096, 2**25
THEIRS = -100  # the same in PyTorch and Hugging Face's libraries
# Names of parts, in any capitals: of folders, tables in a folder, arrays in a file. The first
# held-out one that there is, is used.
TRAIN = "train", "training"
HELD_OUT = "test", "testing", "val", "valid", "validation", "eval", "dev", "holdout"
# spellings of a missing value in tables, in lower case
_MISSING = "? - -- . na n/a n.a. #n/a nan <na> none null nil nat"
MISSING = frozenset(["", *_MISSING.split()])


def no_number(value: object, label: bool = False) -> str:
    """Return the end of an error sentence about a cell: what is wrong, and a remedy."""
    if str(value).strip().lower() in MISSING:
        return (
            "the value is missing; fill it in or leave its row out, as pandas' table.fillna(0) and"
            " table.dropna() do"
        )
    remedy = "scale the column, or leave the row out"
    if not isinstance(value, Real):
        remedy = "convert it to a number"
    if isinstance(value, date):
        remedy = "give days: (column - column.min()).dt.days of a pandas table"
    if isinstance(value, str):
        remedy = "number classes from 0 on: names, y = numpy.unique(labels, return_inverse=True)"
    if isinstance(value, str) and not label:
        remedy = (
            "data.load encodes the texts of a DataFrame, data.load(table), and keeps the"
            " encoding; or make columns of categories by pandas.get_dummies(table)"
        )
    return f"{shortened(repr(value))} is not a finite float32 number; {remedy}"


def read_array(values: Any, name: str, label: bool = False) -> Array:
    """Return an array: arrays of any library unchanged, also lazy ones (see `data.lazy`); other
    values converted by NumPy.

    Args:
        values: an array, a table, a tensor, or nested lists of numbers.
        name: for messages.
        label: whether the values are labels; changes the remedy in the error sentence.

    Raises:
        DataError: for values other than numbers; the message has a remedy for categories and
            missing values.
    """
    # an ndarray is as it should be, also a mapped one: a step's batch is not asked
    if not isinstance(values, np.ndarray) and is_lazy(values) and values.dtype.kind in "biuf":
        return plain(as_rows(in_place(values)))
    values = asarray(values)
    if is_array(values) and values.dtype.kind in "biuf":
        return plain(values)
    try:
        result = np.asarray(values)
        if result.dtype.kind == "O":  # a table with columns of several dtypes
            result = result.astype(np.float64)
    except (TypeError, ValueError):
        result = np.asarray(values, object)
    if result.dtype.kind in "biuf":
        return result
    wrong = [
        item for item in result.reshape(-1).tolist() if not isinstance(item, bool | int | float)
    ]
    if not wrong:
        raise DataError(f"{name}: {result.dtype} is no dtype of NumPy's; give x.astype('float32')")
    raise DataError(f"{name}: {no_number(wrong[0], label)}")


def as_float32(name: str, values: Array) -> Array:
    """Return real numbers in float32; converted values must be finite, float32 input is unchecked.

    Of a lazy array, rows are converted and checked when they are read; whether float32 can tell
    the values of a table apart is judged by some rows.

    Raises:
        DataError: with the name and the index of the first value that is not finite.
    """
    if values.dtype == np.float32:
        return values
    if is_lazy(values):
        if values.ndim <= 2 and not narrowed(some := sampled(values))[1]:
            _check_told_apart(name, some)
        return change_rows(values, partial(_narrow, name))
    result = _narrow(name, values, range(len(values)))
    if result.ndim <= 2:  # numbers of a table, not pixels
        _check_told_apart(name, values)
    return result


def _check_told_apart(name: str, values: Array) -> None:
    """Refuse a table's numbers, (n,) or (n, columns), that float32 cannot tell apart."""
    if not values.size:
        return
    columns = values.reshape(len(values), -1)
    for column in lost_columns(columns, columns.astype(np.float32))[:1]:
        where = f"[:, {column}]" if values.ndim == 2 else ""
        raise DataError(f"{name}{where}: {lost(columns[:, column])}")


def _narrow(name: str, values: Array, numbers: Sequence[int] | Integers) -> Array:
    """Return the rows with these numbers in float32; refuse what is not finite there."""
    result, wrong = narrowed(values)
    for index in wrong:
        where = [int(numbers[index[0]]), *index[1:]]
        raise DataError(f"{name}{where}: {no_number(values[tuple(index)].item())}")
    return result


def narrowed(values: Array, dtype: DTypeLike = "float32") -> tuple[Array, list[list[int]]]:
    """Return numbers in a float type, and the index of the first one that is not finite in it."""
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        result = values.astype(dtype)
    return result, np.argwhere(~np.isfinite(result))[:1].tolist()


def lost_columns(exact: Array, narrow: Array) -> list[int]:
    """Return the columns of (n, columns) numbers that float32 cannot tell apart.

    Args:
        exact: the numbers.
        narrow: the same in float32.
    """
    error = np.abs(narrow.reshape(exact.shape) - exact).max(axis=0)
    varies = (exact != exact[0]).any(axis=0)
    return [*map(int, np.flatnonzero(varies & (error > MOST_LOST * exact.std(axis=0))))]


def lost(column: Array) -> str:
    """Return the end of an error sentence about a column that float32 cannot tell apart."""
    return (
        f"float32 cannot tell its values apart, from {column.min():.10g} to {column.max():.10g};"
        " subtract their common offset"
    )


def judge_classes(
    source: object, what: str, labels: Array, remedy: str
) -> tuple[int, tuple[str, ...]]:
    """Return the number of classes of a training set's labels, and a note if they may be none.

    Args:
        source, what: the file and what the labels are in it, for messages.
        labels: whole numbers, which may be a lazy array; negative ones do not count.
        remedy: for labels that are numbers to predict.

    Raises:
        DataError: for nearly a class for each sample, and for numbers of which most do not occur.
    """
    some = [np.unique(rows[rows >= 0]) for _, rows in blocks(labels)]
    values = np.unique(np.concatenate([np.zeros(0, labels.dtype), *some]))
    is_one = labels.ndim == 1
    count, classes = len(values), int(values.max(initial=0)) + 1
    has = f"{source}: {what} has {count} different labels"
    share = labels.size // (2 if count <= SURE_CLASSES else 10)
    if is_one and count > max(FEW_CLASSES, share):
        raise DataError(f"{has} in {labels.size} rows, nearly a class for each row; {remedy}")
    if classes > (max(FEW_CLASSES, 2 * count) if is_one else max(labels.size, SURE_CLASSES)):
        raise DataError(
            f"{has}, and one of them is {classes - 1}; number the classes from 0, as"
            " numpy.unique(labels, return_inverse=True) does"
        )
    if is_one and classes > count:
        first = np.setdiff1d(np.arange(classes), values)[0]
        return classes, (f"{what}: no sample of class {first}; number the classes from 0",)
    many = is_one and count > MOST_CLASSES
    return classes, (f"{what}: {count} labels are a class each; {remedy}",) * many


def count_targets(labels: Array) -> int:
    """Return the number of targets: the non-negative integer labels, or the samples otherwise."""
    return int((labels >= 0).sum()) if labels.dtype.kind in "iu" else len(labels)


class Samples(ABC):
    """The source of a loader's batches: a `Dataset` in memory, a text, or another library's items.

    Attributes:
        name: for messages and headers.
        classes: the number of classes; for texts, the size of the vocabulary.
        places: (n,), the row of each sample where it is stored, if samples have another order
            there, as after a `split`; else None.
        weights: (n,), by which the training multiplies the samples' losses; None for equal ones.
    """

    name: str
    classes: int
    places: Integers | None = None
    weights: NDArray[Any] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def sample_shape(self) -> Shape:
        """The shape of a sample; of the longest possible one if lengths differ."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A hash of the samples, which a checkpoint compares on resume."""

    @property
    def names(self) -> Names:
        """What the numbers of samples and labels stand for; nothing if that is unknown."""
        return {}

    @property
    def is_tokens(self) -> bool:
        """Whether samples are tokens: indices of an embedding, not quantities."""
        return True

    @property
    def vocabulary(self) -> int:
        """The number of rows that a model's embedding needs; 0 for quantities."""
        return self.classes

    @property
    def targets(self) -> Integers | None:
        """The number of targets per sample, (n,); None if each sample has one."""
        return None

    @property
    def lengths(self) -> Integers | None:
        """The length of each sample, (n,); None if all samples have the same shape."""
        return None

    @property
    def variance(self) -> float | None:
        """The variance of predicted quantities; None for classes."""
        return None

    @abstractmethod
    def rows(
        self, indices: Integers, dtype: DTypeLike = "float32", length: int | None = None
    ) -> Array:
        """Return the samples at these indices as model input: (rows, *shape), C-contiguous, new.

        Args:
            indices: (rows,).
            dtype: of quantities; tokens are int64.
            length: to pad to, for samples of different lengths.
        """

    @abstractmethod
    def labels(self, indices: Integers, length: int | None = None) -> NDArray[Any]:
        """Return labels (rows,) or (rows, ...): int64 padded with `IGNORED`, or float32 numbers."""

    def pair(
        self, indices: Integers, dtype: DTypeLike = "float32", length: int | None = None
    ) -> tuple[Array, Array]:
        """Return `rows` and `labels` of the same samples."""
        return self.rows(indices, dtype, length), self.labels(indices, length)


@dataclass(frozen=True, eq=False)
class Dataset(Samples):
    """Labelled samples, in memory or read when their batch is made.

    Attributes:
        name: for messages and headers.
        x: (n, *sample_shape): an array, a pandas or polars DataFrame, a PyTorch tensor, or lists;
            or an array that is not in memory, such as a memmap, h5py's or zarr's (`data.lazy`),
            whose rows are read, converted and checked batch by batch.
            uint16 and uint32 are tokens, and so are other integers in the shape of y. All else is
            quantities: uint8 stays uint8 and `rows` converts it batch by batch, to save memory;
            other dtypes become float32. Images are (n, height, width, channels), grayscale with
            1 channel.
        y: (n,) or (n, ...). Integers become int64: labels in 0..classes-1, and `IGNORED` where a
            sample has several. Floats become float32: predicted quantities, or with classes=2
            the probability of class 1. Several numbers per sample may be a lazy array, too.
        classes: the number of classes; 0 for quantities.
        scale: factor from x to model input (1/255 for bytes, 1/16 for the 8x8 digits, 1 for
            floats).
        class_names: one name per class, or empty.
        columns: the names of a table's features, or empty.
        target: the name or number of a table's label column, or empty.
        encoding: the rules that made features of a table's columns, or empty; see `data.columns`.
        notes: sentences about what was left out of a table or replaced in it; files beside images.
        places: see `Samples`.
        weights: (n,), of the samples' losses in the training, 0 or more; None for equal ones. The
            loss of a batch is sum(weight * loss) / sum(weight) over all ranks, as that of
            PyTorch's class weights. Evaluations count all samples alike.

    Raises:
        DataError: when the shapes of x and y do not match, or a label or a weight is out of range.

    Example:
        >>> x, y = np.random.default_rng(0).random((100, 5)), np.arange(100) % 3
        >>> train = data.Dataset("mine", x, y, classes=3)
        >>> len(train), train.sample_shape
        (100, (5,))
    """

    name: str
    x: Array
    y: NDArray[Any]
    classes: int
    scale: float = 1.0
    class_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    target: str = ""
    encoding: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    places: Integers | None = field(default=None, repr=False)
    weights: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_int("classes", self.classes, 0)
        x = read_array(self.x, f"samples of {self.name}")
        y = read_array(self.y, f"labels of {self.name}", True)
        if prod(y.shape[1:]) == 1:  # few bytes, beside those of a sample
            y = read_all(y)
        full = y.dtype.kind in "biu"
        if not full:
            y = as_float32(f"{self.name}: the target", y)
        elif y.dtype != np.int64:
            y = change_rows(y, lambda rows, _: rows.astype(np.int64))
        if x.dtype not in (np.uint8, *TOKEN_TYPES) and (
            x.dtype.kind not in "iu" or x.shape != y.shape
        ):
            # Integers are ambiguous. They are tokens only if uint16 or uint32 says so, or if
            # each has a label of its own.
            x = as_float32(f"{self.name}: sample", x)
        columns = self.columns or tuple(map(str, getattr(self.x, "columns", ())))
        if columns[:1] in (("",), ("Unnamed: 0",)):  # it would become a feature
            raise DataError(
                f"{self.name}: the first column has no name, as when pandas writes its index; write"
                " the table with to_csv(path, index=False), read it with index_col=0, or give the"
                " column a name if it is a feature"
            )
        for name, value in (("x", x), ("y", y), ("columns", columns)):
            object.__setattr__(self, name, value)
        if self.x.ndim < 2 or self.y.ndim < 1 or len(self.x) != len(self.y):
            raise DataError(
                f"{self.name}: samples of shape {self.x.shape} and labels of shape {self.y.shape}; "
                "give (n, ...) samples and as many labels"
            )
        if self.x.dtype in TOKEN_TYPES and self.x.ndim > 2:
            raise DataError(
                f"{self.name}: samples of {self.x.dtype} are tokens, (n, positions), but these have"
                f" shape {self.x.shape}; give images of 16 bits as (x / 65535).astype('float32')"
            )
        if self.class_names and len(self.class_names) != self.classes:
            raise DataError(
                f"{self.name}: {len(self.class_names)} class names for {self.classes} classes;"
                " give one per class"
            )
        if not full and (self.classes not in (0, 2) or self.y.size == 0):
            raise DataError(
                f"{self.name}: quantities are predicted in {self.classes} classes; give classes=0,"
                " or whole numbers"
            )
        if not self._reads_targets:
            for first, rows in blocks(self.y):
                self._check_targets(rows, range(first, first + len(rows)))
        if self.weights is not None:
            weights = read_all(read_array(self.weights, f"weights of {self.name}"))
            object.__setattr__(self, "weights", weights.astype(np.float64))
            self._check_weights(self.weights)

    def _check_weights(self, weights: NDArray[np.float64]) -> None:
        """Refuse another number of weights than of samples, and what is no weight."""
        if weights.shape != (len(self),):
            raise DataError(
                f"{self.name}: {len(self)} samples and weights of shape {weights.shape}; give one"
                " weight for each sample"
            )
        most = np.finfo(np.float32).max
        for index in np.flatnonzero(~((weights >= 0) & (weights <= most)))[:1].tolist():
            raise DataError(
                f"{self.name}: the weight {weights[index]} of sample {index} is not a finite number"
                " from 0"
            )

    @cached_property
    def _reads_targets(self) -> bool:
        """Whether targets are read, and checked, when their batch is made."""
        return prod(self.target_shape) > 1 and is_lazy(self.y)

    def _check_targets(self, y: NDArray[Any], numbers: Sequence[int] | Integers) -> None:
        """Refuse labels outside of the classes, and quantities that are not finite.

        Args:
            y: rows of labels.
            numbers: of their samples.
        """
        if y.dtype.kind in "iu":
            fits = (y >= (IGNORED if y.ndim > 1 else 0)) & (y < self.classes)
            what, expected = "label", f"in 0..{self.classes - 1}"
        else:
            most, expected = (
                (np.finfo(np.float32).max, "a finite number")
                if self.classes == 0
                else (1, "from 0 to 1")
            )
            fits, what = np.abs(y) <= most, "target"
        if fits.all():
            return
        index = np.argwhere(~fits)[0].tolist()
        value = y[tuple(index)]
        mark = f"; what does not count is {IGNORED}, nnmpi.data.IGNORED"
        raise DataError(
            f"{self.name}: {what} {value} of sample {numbers[index[0]]} is not {expected}"
            + (mark if value == THEIRS else "")
        )

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.sample_shape))
        return (
            f"Dataset({self.name}: {len(self):,} samples of {shape}, {self.x.dtype},"
            f" {self.describe_targets()})"
        )

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays of a row for each sample, by name: samples, labels, and weights if given."""
        weights = {} if self.weights is None else {"weights": self.weights}
        return {"x": self.x, "y": self.y, **weights}

    @property
    def names(self) -> Names:
        """The names of classes, and of a table's features."""
        return {CLASSES: self.class_names, COLUMNS: self.columns}

    @property
    def sample_shape(self) -> Shape:
        """Return the shape of one sample: (features,) or (height, width, channels)."""
        return tuple(self.x.shape[1:])

    @property
    def target_shape(self) -> Shape:
        """Return the shape of one sample's labels; () for one label or quantity."""
        return tuple(self.y.shape[1:])

    @property
    def predicts(self) -> Predicts:
        """The kind of labels, and so the kind of a model's output."""
        if self.y.dtype.kind == "i":
            return "classes"
        return "yes-or-no" if self.classes else "quantities"

    @cached_property
    def variance(self) -> float | None:
        """The variance of the quantities, averaged over `target_shape`; None for classes.

        R2 compares a model's squared error with it.
        """
        if self.predicts != "quantities":
            return None
        mean = sum(y.sum(axis=0, dtype=np.float64) for y in self.label_blocks()) / len(self)
        squares = sum(np.square(y - mean).sum(axis=0) for y in self.label_blocks())
        return float((squares / len(self)).mean())

    @cached_property
    def target_scale(self) -> tuple[list[float], float]:
        """Of quantities the mean of each column (channel), and one standard deviation of all.

        It is one, so that the columns keep their weights in the loss.
        """
        axes = tuple(range(max(self.y.ndim - 1, 1)))
        count = len(self) * prod(self.target_shape)
        columns = prod(self.target_shape[-1:])
        sums = sum(y.astype(np.float64).sum(axes) for y in self.label_blocks())
        mean = np.asarray(sums) / (count // columns)
        squares = sum(np.square(y - mean).sum() for y in self.label_blocks())
        return np.ravel(mean).tolist(), float(np.sqrt(squares / count))

    @cached_property
    def moments(self) -> Moments:
        """Mean, standard deviation and largest value of x, before the scale."""
        return moments(self.x, self.places)

    def describe_targets(self) -> str:
        """Return the number of classes or quantities as text."""
        if self.predicts != "quantities":
            return f"{self.classes} classes"
        count = prod(self.target_shape)
        return (
            "1 quantity" if count == 1 else f"{' x '.join(map(str, self.target_shape))} quantities"
        )

    @cached_property
    def is_tokens(self) -> bool:
        """Whether samples are tokens, not quantities."""
        return self.x.dtype.kind in "iu" and self.x.dtype != np.uint8

    @cached_property
    def vocabulary(self) -> int:
        """The largest token plus one; 0 for quantities.

        Raises:
            DataError: for a token below 0.
        """
        if not self.is_tokens:
            return 0
        least = most = 0
        for _, x in blocks(self.x):
            least, most = min(least, int(x.min(initial=0))), max(most, int(x.max(initial=0)))
        if least < 0:
            raise DataError(
                f"{self.name} has the token {least}; tokens are whole numbers from 0 on"
            )
        return 1 + most

    @cached_property
    def targets(self) -> Integers | None:
        """The number of targets per sample, (n,); None if each sample has one.

        Labels that are not in memory are all read for it, in blocks.
        """
        if self.y.ndim == 1 or self.predicts != "classes":
            return None
        axes = tuple(range(1, self.y.ndim))
        counts = [(rows >= 0).sum(axis=axes, dtype=np.int64) for _, rows in blocks(self.y)]
        return np.concatenate([np.zeros(0, np.int64), *counts])

    @cached_property
    def identity(self) -> str:
        """A hash of samples, labels and scale; what is not in memory is read in blocks."""
        result = hashlib.sha256(
            f"{self.x.dtype} {self.x.shape} {self.y.shape} {self.classes} {self.scale}".encode()
        )
        for array in self.arrays.values():
            if isinstance(array, Chosen):  # its source in the order of storage
                result.update(array.places.data)
                array = array.source
            for _, rows in blocks(array):
                result.update(np.ascontiguousarray(rows).data)
        return result.hexdigest()

    def rows(
        self, indices: Integers, dtype: DTypeLike = "float32", length: int | None = None
    ) -> Array:
        """Return the samples at these indices as floats, scaled; tokens as int64."""
        x = self.x.take(indices, axis=0).astype(np.int64 if self.is_tokens else dtype, copy=False)
        if not self.is_tokens and self.scale != 1.0:
            x *= self.scale
        return x

    def labels(self, indices: Integers, length: int | None = None) -> NDArray[Any]:
        """Return the labels at these indices."""
        y = self.y[indices]
        if self._reads_targets:
            self._check_targets(y, indices)
        return y

    def label_blocks(self) -> Iterator[NDArray[Any]]:
        """Yield all labels, in the order in which they are stored, in blocks for a statistic."""
        order = np.arange(len(self)) if self.places is None else np.argsort(self.places)
        step = min(BLOCK_ROWS, max(1, BLOCK_BYTES // (8 * max(1, prod(self.target_shape)))))
        for first in range(0, len(self), step):
            yield self.labels(order[first : first + step])

    def take(self, indices: Integers) -> "Dataset":
        """Return a data set of the samples at these indices, in that order.

        They are copied if they are in memory; else they are still read when their batch is made.
        """
        places = indices if self.places is None else self.places[indices]
        arrays = {name: _chosen(array, indices) for name, array in self.arrays.items()}
        return replace(self, **arrays, places=places)

    def with_targets(self, y: NDArray[Any], **changes: Any) -> "Dataset":
        """Return the same samples with targets that were made of these.

        Args:
            y: made of each sample's own targets.
            changes: of other fields that belong to targets.
        """
        result = replace(self, y=y, **changes)
        known = vars(self).keys() & {"moments", "vocabulary"}
        vars(result).update({name: getattr(self, name) for name in known})
        if is_lazy(self.x):  # to read all samples once more would say the same
            text = f"{self.identity} {result.y.dtype} {result.classes}"
            vars(result)["identity"] = hashlib.sha256(text.encode()).hexdigest()
        return result


def _chosen(array: Any, indices: Integers) -> Any:
    return Chosen(array, indices) if is_lazy(array) else array[indices]


def as_yes_or_no(dataset: Dataset) -> Dataset:
    """Return a two-class data set with labels 0.0 and 1.0, the probability of class 1.

    Raises:
        DataError: for more than 2 classes, `IGNORED` labels, and quantities outside 0..1.
    """
    least = min((y.min() for y in dataset.label_blocks()), default=0)
    if dataset.predicts == "quantities":
        if least < 0:
            raise DataError(
                f"{dataset.name}: a target is {least}; for yes or no give numbers from 0 to 1"
            )
        return dataset.with_targets(dataset.y, classes=2)
    if dataset.classes > 2 or least < 0:
        raise DataError(
            f"{dataset.name} has {dataset.classes} classes; for yes or no give two, 0 and 1"
        )
    # one class alone, of a file to evaluate: its name says which of the model's two it is
    names = (dataset.class_names * 2)[:2]
    y = change_rows(dataset.y, lambda rows, _: rows.astype(np.float32))
    return dataset.with_targets(y, classes=2, class_names=names)


def split(
    dataset: Dataset, test_fraction: float, seed: int = 0, stratify: bool = False
) -> tuple[Dataset, Dataset]:
    """Return training and test parts; the test part begins a seeded permutation.

    By default class shares may differ between the parts. Both parts get at least one sample.

    Args:
        dataset: to split.
        test_fraction: the share of the test part, between 0 and 1.
        seed: of the permutation.
        stratify: hold out this share of each class, rounded so that the sum is that of all.

    Raises:
        UsageError: for a fraction that is not between 0 and 1.
        DataError: for a set of fewer than 2 samples.
    """
    if not isinstance(dataset, Dataset):
        what = type(dataset).__name__
        raise UsageError(
            f"split takes a data set, not a {what}; make one: data.Dataset(name, x, y, classes=10)"
        )
    if (n := len(dataset)) < 2:
        raise DataError(
            f"{dataset.name}: {n} samples cannot be split into a training and a test part; give 2"
            " or more"
        )
    labels = None
    if stratify:
        if dataset.predicts != "classes" or dataset.y.ndim > 1:
            raise UsageError(
                f"stratify splits each class, and {dataset.name} has none, one for each sample;"
                " leave it out"
            )
        labels = dataset.y
    train, test = map(dataset.take, split_indices(n, test_fraction, seed, labels))
    return train, test


def split_indices(
    count: int, test_fraction: float, seed: int, labels: NDArray[Any] | None = None
) -> tuple[Integers, Integers]:
    """Return the indices of the two parts of a `split`, in random order.

    Args:
        count: samples.
        test_fraction, seed: see `split`.
        labels: (count,), of classes that are split each, by whatever names; None to split all
            together.
    """
    if not (isinstance(test_fraction, Real) and 0 < test_fraction < 1):
        raise UsageError(
            f"test_fraction is {test_fraction!r}; give one between 0 and 1, such as 0.2"
        )
    tests = min(max(round(count * test_fraction), 1), count - 1)
    order = stream(seed, "split").permutation(count)
    if labels is None:
        return order[tests:], order[:tests]
    _, firsts, classes, sizes = np.unique(labels[order], True, True, True)
    exact = sizes * (tests / count)
    held_out = exact.astype(np.int64)
    # of equal remainders the one that the order has first, so that names do not count
    largest_remainders = np.lexsort((firsts, held_out - exact))
    held_out[largest_remainders[: tests - held_out.sum()]] += 1
    is_test = np.zeros(count, bool)
    for number, size in enumerate(held_out.tolist()):
        is_test[np.flatnonzero(classes == number)[:size]] = True
    return order[~is_test], order[is_test]


def check_pair(train: Dataset, test: Dataset) -> tuple[Dataset, Dataset]:
    """Return both parts unchanged, after checking that one model fits both.

    Raises:
        DataError: for a part without samples, or parts with samples of different shapes.
    """
    for part, what in ((train, "training"), (test, "test")):
        if len(part) == 0:
            raise DataError(f"{part.name}: the {what} part has no samples")
    first, second = (
        f"samples of shape {part.sample_shape} with {part.predicts} of shape {part.target_shape}"
        for part in (train, test)
    )
    if first != second:
        raise DataError(
            f"{train.name}: the training part has {first}, the test part {second}; give both the"
            " same"
        )
    return train, test


def check_scales(train: Dataset, test: Dataset) -> None:
    """Refuse images of floats in other units than the training's, unless both were one set.

    Raises:
        DataError: with the largest numbers of both.
    """
    if train.places is not None or train.x.dtype != np.float32 or train.x.ndim <= 2:
        return
    tops = [abs(part.moments.top) for part in (train, test)]
    if min(tops) * OTHER_SCALE < max(tops):
        raise DataError(
            f"{train.name}: the training part holds numbers up to {tops[0]:.4g}, and the test part"
            f" up to {tops[1]:.4g}; give the images of both parts in one scale"
        )
