"""Data sets of other libraries: any object with a length and items.

data.Loader(torchvision.datasets.CIFAR10(...), 64)
    items (x, y): PyTorch's map-style data sets, lists of pairs

data.Loader(datasets.load_dataset("mnist")["train"], 64)
    items {"image": x, "label": y}: Hugging Face's data sets
"""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nnmpi.backend.array import Array, Integers, Shape, asarray
from nnmpi.base.errors import DataError, UsageError, shortened
from nnmpi.base.settled import Settled
from nnmpi.data.dataset import TOKEN_TYPES, Dataset, Samples, count_targets, read_array
from nnmpi.data.names import CLASSES, Names
from nnmpi.data.tables import is_frame

# what a generator raises a RuntimeError for: a loop would take it for the end of the data
USED_UP = (
    "raised StopIteration, as next(...) does at an end; let it return a default: next(..., None)"
)
LABELS = ("label", "labels", "y", "target", "targets")  # keys of an item's label
TOKENS = "input_ids"  # Hugging Face's key of tokens
ROW_NUMBERS = ("idx", "__index_level_0__")  # its keys of an item's place, which is no feature


def as_samples(source: Any) -> Samples:
    """Convert a data set of any library to `Samples`; `Samples` pass unchanged.

    Raises:
        UsageError: for an object without length or items.
    """
    if isinstance(source, Samples):
        return source
    kind, what = type(source), type(source).__name__
    if is_frame(source):
        raise UsageError(
            f"a Loader takes samples, and a {what} is a table; give what data.load(table) returns,"
            " or its columns: data.Dataset(name, table[['rooms', 'area']], table['price'],"
            " classes=0)"
        )
    if hasattr(kind, "to_pandas") and hasattr(kind, "__array__"):
        raise UsageError(f"a {what} is a table; give data.load(x.to_pandas())")
    source = asarray(source)
    if isinstance(source, Mapping):
        raise UsageError(
            f"a Loader takes one data set, not a {what} of"
            f" {shortened(', '.join(map(str, source)))}; give one of its values, or columns as a"
            " table: data.load(pandas.DataFrame(columns))"
        )
    if hasattr(kind, "__len__") and hasattr(kind, "__getitem__"):
        return Items(source)
    raise UsageError(
        f"a Loader takes a data set, with a length and items (x, y), not a {what}; make one of"
        " arrays: data.Dataset(name, x, y, classes=10), or call worker.step(x, y)"
    )


class Items(Settled, Samples, read_once="name classes"):
    """The items of another library's data set, each read when its batch is made.

    As in a `Dataset`, uint16, uint32, and integers in the shape of y are tokens, and so are those
    under the key TOKENS; all other values are quantities. Bytes are divided by 255.

    Args:
        source: `len(source)` items `source[i]`. An item is (x, y), or a mapping with the label
            under one of LABELS and x under another key. If all other keys have single numbers, x is
            the list of these, in the mapping's order. x is an array, a tensor or a Pillow image, of
            the same shape in each item.
    """

    def __init__(self, source: Any) -> None:
        self.name, self._source = type(source).__name__, source
        if not len(source):
            raise DataError(f"the {self.name} has no items; give one or more")
        self.classes = len(getattr(source, "classes", ()))  # 0: unknown without reading all items

    def __len__(self) -> int:
        return len(self._source)

    @property
    def names(self) -> Names:
        """The source's `classes`, as of a folder of images, if these are texts."""
        classes = [*getattr(self._source, "classes", ())]
        return {CLASSES: classes if all(isinstance(name, str) for name in classes) else []}

    @cached_property
    def _first(self) -> Dataset:
        return self._read(np.arange(1))

    @property
    def sample_shape(self) -> Shape:
        """The shape of the first sample."""
        return self._first.sample_shape

    @property
    def is_tokens(self) -> bool:
        """Whether the first sample is tokens."""
        return self._first.is_tokens

    @property
    def vocabulary(self) -> int:
        """0: the largest token is unknown without reading all items."""
        return 0

    @cached_property
    def identity(self) -> str:
        """A hash of all items; reads each of them."""
        result = hashlib.sha256()
        for i in range(len(self)):
            result.update(self._read(np.array([i])).identity.encode())
        return result.hexdigest()

    @cached_property
    def targets(self) -> Any:
        """Counts the targets of items at some indices; None if each has one. See `_Targets`."""
        return None if self._first.targets is None else _Targets(self)

    def pair(
        self, indices: Integers, dtype: DTypeLike = "float32", length: int | None = None
    ) -> tuple[Array, Array]:
        """Return the samples at these indices and their labels; each item is read once."""
        items = self._read(indices) if len(indices) else self._first
        rows = np.arange(len(indices))
        return items.rows(rows, dtype), items.labels(rows)

    def rows(
        self, indices: Integers, dtype: DTypeLike = "float32", length: int | None = None
    ) -> Array:
        """See `Samples`."""
        return self.pair(indices, dtype)[0]

    def labels(self, indices: Integers, length: int | None = None) -> NDArray[Any]:
        """See `Samples`; reads one item at a time, so that the samples need not fit into memory."""
        return np.concatenate(
            [self._first.y[:0], *(self._read(item).y for item in indices.reshape(-1, 1))]
        )

    def _read(self, indices: Integers) -> Dataset:
        items = list[tuple[Array, Array]]()
        for i in indices.tolist():
            items.append(item := self._item(i))
            if _kinds(*item) != _kinds(*self._item_0):
                here, first = (f"{x.dtype} with labels {y.dtype}" for x, y in (item, self._item_0))
                raise DataError(
                    f"{self.name}: item {i} is {here}, but item 0 {first}, so a batch would mean"
                    " something else without it; give all the same types"
                )
        try:
            x, y = (np.stack(item) for item in zip(*items, strict=True))
        except ValueError:
            shapes = sorted({str(x.shape) for x, _ in items} or {"none"})
            raise DataError(
                f"{self.name}: samples of a batch have the shapes {' and '.join(shapes)}; give all"
                " the same, for example by cropping or padding them in the data set"
            ) from None
        if x.dtype == np.uint8 and x.ndim == 3:
            x = x[..., None]  # gray
        classes = 0 if y.dtype.kind == "f" else int(y.max()) + 1
        return Dataset(self.name, x, y, classes, 1 / 255 if x.dtype == np.uint8 else 1.0)

    @cached_property
    def _item_0(self) -> tuple[Array, Array]:
        return self._item(0)

    def _item(self, i: int) -> tuple[Array, Array]:
        try:
            return self._read_item(i)
        except StopIteration as error:
            raise DataError(f"{self.name}: item {i} {USED_UP}") from error

    def _read_item(self, i: int) -> tuple[Array, Array]:
        item, is_tokens = self._source[i], False
        if isinstance(item, Mapping) and (labels := [name for name in LABELS if name in item]):
            inputs = [name for name in item if name not in labels]
            values, is_tokens = [item[name] for name in inputs], inputs == [TOKENS]
            is_row = not any(map(np.ndim, values)) and not {*inputs} & {*ROW_NUMBERS}
            for names, what in ((labels, "label"), ([] if is_row else inputs, "sample")):
                if len(names) > 1:
                    kept = [name for name in inputs if name not in ROW_NUMBERS][:1]
                    raise DataError(
                        f"{self.name}: item {i} has {' and '.join(names)}, of which one alone can"
                        f" be the {what}; leave the others out, as"
                        f" select_columns({[*kept, labels[0]]}) of Hugging Face's data sets does"
                    )
            item = *([values] if len(values) > 1 else values), item[labels[0]]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"{self.name}: item {i} is neither (x, y) nor a mapping of samples and a label"
                f" ({', '.join(LABELS)}); give it such items, or read it yourself and call"
                " worker.step(x, y)"
            )
        x, y = [read_array(entry, f"{self.name}, item {i}") for entry in item]
        return x.astype(np.uint32) if is_tokens else x, y


def _kinds(x: Array, y: Array) -> tuple[bool, bool, bool]:
    """Return whether a sample is bytes or tokens, and whether its label is a quantity."""
    return x.dtype == np.uint8, x.dtype in TOKEN_TYPES, y.dtype.kind == "f"


class _Targets:
    """The number of labels of each item that are not `IGNORED`, counted when it is asked for.

    Args:
        items: with several labels each.
    """

    def __init__(self, items: Items) -> None:
        self._items, self._known = items, np.full(len(items), -1)

    def __getitem__(self, indices: Integers) -> Integers:
        for i in indices[self._known[indices] < 0].tolist():
            self._known[i] = count_targets(self._items.labels(np.array([i])))
        return self._known[indices]
