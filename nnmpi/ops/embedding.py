"""The embedding: rows of a table picked by integers."""

from collections.abc import Callable
from typing import Any

from nnmpi.backend.array import Array, Dtype, is_array, namespace
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.recording import to_library
from nnmpi.base.errors import DtypeError, ShapeError
from nnmpi.tensor.dtypes import product_dtype
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import refuse_parts, values_of
from nnmpi.tensor.placement import Placement, is_sharded
from nnmpi.tensor.tensor import Tensor


class EmbeddingFunction(Function):
    """table[indices]; an entry picked twice gets the sum of both rows' gradients.

    The rows have a product's dtype, the table's gradient the table's.
    """

    __slots__ = ()

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
        return kernels.embedding(namespace(table), table, indices, self.row_dtype(table))

    def backward(self, grad: Array) -> Grads:
        shape, dtype, indices, kernels = self.saved
        place = self.sum_into(0)
        return kernels.embedding_grad(namespace(grad), grad, indices, shape, dtype, *place), None


class TableRows(EmbeddingFunction):
    """table[indices], in the table's dtype."""

    __slots__ = ()

    def row_dtype(self, table: Array) -> Dtype:
        """Return the table's dtype."""
        return table.dtype


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
    product_dtype("embedding", table)
    values = values_of(indices)
    if not is_array(values):
        values = Tensor(values).data  # checked on the host, also for a table on the device
    if values.dtype.kind not in "iu":
        raise DtypeError(f"embedding needs integer indices, not {values.dtype}")
    if table.ndim != 2:
        raise ShapeError(
            f"embedding needs a table (entries, features), not one of shape {table.shape}"
        )
    rows = values_of(table)
    entries = table.shape[0] if entries is None else entries
    kernels_of(rows).check(_check_indices, values, entries)
    values = to_library(namespace(rows), values)
    return make()(table, indices if is_sharded(indices) else values)


def _check_indices(indices: Array, entries: int) -> None:
    wrong = indices[(indices < 0) | (indices >= entries)]
    if wrong.size:
        raise ShapeError(f"embedding index {wrong[0]} is outside 0..{entries - 1}")
