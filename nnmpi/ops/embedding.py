"""The embedding: rows of a table picked by integers.

A recurrent layer multiplies each row by its weight. `TokenRows` gives it table and integers
instead, so that it multiplies the table, which may have fewer rows (see `ops.recurrent`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape, is_array, namespace
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.precision import is_low, rounds_products
from nnmpi.backend.recording import to_library
from nnmpi.base.errors import DtypeError, ShapeError
from nnmpi.base.words import answered
from nnmpi.tensor.dtypes import product_dtype
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import refuse_parts, values_of
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.placement import Placement, is_sharded
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import Channels, NotExported, Sample, Traits

__all__ = ["embedding"]


class EmbeddingFunction(Function):
    """table[indices]; an entry picked twice gets the sum of both rows' gradients.

    The rows have a product's dtype, the table's gradient the table's.
    """

    __slots__ = ()

    traits = Traits(
        onnx=lambda f, y, table, indices: table.take(indices, 0),
        channels=Channels.LAST,
        samples=(
            Sample(
                "embedding",
                lambda table, indices: embedding(table, indices),
                ((4, 3),),
                (np.array([[2, 0], [2, 3], [1, 1]]),),
                parameters=1,
            ),
        ),
    )

    is_call = captured = True

    def row_dtype(self, table: Array) -> Dtype:
        """Return the dtype of the rows."""
        return product_dtype("embedding", table)

    def placed(self, *inputs: Any) -> Placement:
        """Return the indices' placement; a sharded table is refused."""
        table, indices = inputs
        refuse_parts(self, table, why="needs a whole table")
        return indices.shard.placement

    def forward(self, table: Array, indices: Array) -> Array:
        kernels = kernels_of(table)
        self.saved = (table.shape, table.dtype, indices, kernels)
        return kernels.embedding(table, indices, self.row_dtype(table))

    def backward(self, grad: Array) -> Grads:
        shape, dtype, indices, kernels = self.saved
        place = self.sum_into(0)
        return kernels.embedding_grad(grad, indices, shape, dtype, *place), None


class TableRows(EmbeddingFunction):
    """table[indices], in the table's dtype."""

    __slots__ = ()

    traits = Traits(
        onnx=NotExported(), channels=Channels.LAST, tested_in="tests/nn/test_experts.py"
    )

    def row_dtype(self, table: Array) -> Dtype:
        """Return the table's dtype."""
        return table.dtype


class TokenRows(NamedTuple):
    """Rows of a table that nobody has picked yet: an operation's input in place of an embedding.

    Attributes:
        table: (entries, features).
        indices: integers (...), within the table.
    """

    table: Parameter
    indices: Array

    @classmethod
    def of(cls, table: Parameter, indices: Any) -> "TokenRows":
        """Return the rows at indices. Same errors as `embedding`."""
        return cls(table, _checked(table, indices, None))

    @property
    def shape(self) -> Shape:
        """The shape of the picked rows."""
        return (*self.indices.shape, self.table.shape[1])

    @property
    def ndim(self) -> int:
        """The number of axes of the picked rows."""
        return len(self.shape)

    @property
    def are_many(self) -> bool:
        """Whether products of the table take clearly less time than those of the picked rows.

        With a weight of n columns, forward and backward, a row or an entry takes 3 features n
        multiplications, and the sum of the entries' gradients entries n for each row. On a device
        the launches of its steps take a recurrent layer's time. Half precision rounds each row.
        """
        return (
            is_small(self.table)
            and self.table.region is None  # else it is a shard
            and 4 * self.table.shape[0] <= self.indices.size
            and isinstance(self.table._data, np.ndarray)
            and not is_low(product_dtype("embedding", self.table))
            and not rounds_products(self.table._data)  # of each row: sums of rows would differ
        )


def is_small(table: Any) -> bool:
    """Return whether a full table (entries, features) is worth multiplying, not many rows."""
    entries, features = table.shape if table.region is None else table.region.shape
    return bool(entries <= features)


def opened(x: Any) -> tuple[Any, Any, Any]:
    """Return an operation's first input, its table or None, and which of both has the numbers."""
    return (x.indices, x.table, x.table) if isinstance(x, TokenRows) else (x, None, x)


@answered
def embedding(
    table: Tensor,
    indices: Any,
    entries: int | None = None,
    make: Callable[[], Function] = EmbeddingFunction,
) -> Tensor:
    """Return rows of a table (entries, features) at integer indices (...): (..., features).

    The rows have the table's dtype, in mixed precision the low dtype (see `backend.precision`).
    Indices in device memory are not checked, since the host would have to wait for the result: an
    index out of range gives a row of NaN.

    Args:
        entries: of the full table, if `table` is a rank's shard.
        make: the operation. Tensor parallelism passes its own, for a table
            sharded by entries.

    Raises:
        DtypeError: when the indices are not integers.
        ShapeError: for an index outside 0..entries-1 (the first such is named), or a table that is
            no matrix.
    """
    values = _checked(table, indices, entries)
    places = indices if is_sharded(indices) else values
    if table.kept is not None:
        return make()(table.kept, places).astype(product_dtype("embedding", table))
    return make()(table, places)


def _checked(table: Tensor, indices: Any, entries: int | None) -> Array:
    """Return indices as an array of the table's library. Same errors as `embedding`."""
    product_dtype("embedding", table)
    values = values_of(indices)
    if not is_array(values):
        values = Tensor(values)._data  # checked on the host, also for a table on the device
    if values.dtype.kind not in "iu":
        raise DtypeError(
            f"embedding needs integer indices, not {values.dtype}; a data set's tokens are uint32"
        )
    if table.ndim != 2:
        raise ShapeError(
            f"embedding needs a table (entries, features), not one of shape {table.shape}"
        )
    rows = values_of(table if table.kept is None else table.kept)
    entries = table.shape[0] if entries is None else entries
    kernels_of(rows).check(_check_indices, values, entries)
    return to_library(namespace(rows), values)


def _check_indices(indices: Array, entries: int) -> None:
    wrong = indices[(indices < 0) | (indices >= entries)]
    if wrong.size:
        raise ShapeError(f"embedding index {wrong[0]} is outside 0..{entries - 1}")
