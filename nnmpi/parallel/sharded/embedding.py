"""Embeddings of which each rank has some entries or some features.

    vocabulary cut    index 5   rank 0 has entries 0..3: zeros     \\
                                rank 1 has entries 4..7: its row 1  >  add up -> the row, whole
    features cut      every rank looks up its part of the row; no exchange
"""

from typing import Any

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import kernels_for
from nnmpi.errors import DtypeError, ShapeError
from nnmpi.nn.linear import Embedding
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.embedding import add_rows, as_indices
from nnmpi.parallel.sharded.collectives import sum_over_ranks
from nnmpi.parallel.sharded.context import LayerContext, Placed
from nnmpi.parallel.sharded.parameters import ParameterSharder
from nnmpi.tensor.function import Function, Variable
from nnmpi.tensor.operand import read_as, whole_values
from nnmpi.tensor.placement import REPLICATED, Placement, features, is_cut
from nnmpi.tensor.tensor import Tensor


class LookUp(Function):
    """table[indices - first], zeros for indices that are not in this part of the table."""

    __slots__ = ("first",)

    def __init__(self, first: int) -> None:
        self.first = first

    def placed(self, *inputs: Any) -> Placement:
        """Return how the rows lie on other ranks, which share the sequences: as the indices do."""
        return as_indices(self, *inputs)

    def forward(self, table: Array, indices: Array) -> Array:
        xp = namespace(table)
        places = indices.reshape(-1).astype(xp.int64) - self.first
        kernels, own = kernels_for(table, "embedding"), (places >= 0) & (places < len(table))
        if kernels is not None:  # nobody waits to see how many are here
            rows = xp.where(own[:, None], kernels.embedding(xp, table, places, table.dtype), 0)
            here = None
        else:
            here = xp.flatnonzero(own)
            places = places[here]
            rows = xp.zeros((indices.size, table.shape[1]), dtype=table.dtype)
            rows[here] = table[places]
        self.saved = (table.shape, table.dtype, kernels, here, places)
        result: Array = rows.reshape(*indices.shape, table.shape[1])
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        shape, dtype, kernels, here, places = self.saved
        xp, to_table = namespace(grad), self.into(0)
        if to_table is None:
            to_table = xp.empty(shape, dtype=dtype)
        rows = grad.reshape(-1, shape[1])
        if kernels is not None:
            kernels.embedding_grad(xp, rows, places, shape, dtype, to_table, False)
        else:
            to_table[...] = 0
            add_rows(xp, to_table, places, rows[here])
        return to_table, None


class VocabularyEmbedding(Embedding):
    """Some entries of an embedding: whole integers (...) -> whole (..., features).

    Args:
        layer: the whole layer.
        sharder: cuts its table.
    """

    def __init__(self, layer: Embedding, sharder: ParameterSharder) -> None:
        self._entries = layer.weight.shape[0]
        self.weight = sharder.cut(layer.weight, features(self._entries), axis=0)
        region = self.weight.region
        self._first = 0 if region is None else region.start
        self._group = sharder.group

    @property
    def num_embeddings(self) -> int:
        """How many rows there are to pick, on all ranks that share the table."""
        return self._entries

    def forward(self, indices: Any) -> Tensor:
        """Return the rows that the indices pick. Errors are those of `ops.embedding`."""
        values = check_indices(self.weight, indices, self._entries)
        look_up = LookUp(self._first)
        rows = sum_over_ranks(look_up(self.weight, indices if is_cut(indices) else values), self._group)
        return rows.astype(read_as("embedding", self.weight))


class FeaturesEmbedding(Embedding):
    """Some features of an embedding: whole integers (...) -> (..., this rank's features).

    Args:
        layer: the whole layer.
        sharder: cuts its table.
    """

    def __init__(self, layer: Embedding, sharder: ParameterSharder) -> None:
        self.result = features(layer.weight.shape[1])
        self.weight = sharder.cut(layer.weight, self.result, axis=1)


def check_indices(table: Tensor, indices: Any, entries: int) -> Array:
    """Return indices as an array.

    Raises:
        DtypeError: when they are not integers.
        ShapeError: when one is outside 0..entries-1.
    """
    given = indices.data if is_cut(indices) else whole_values("embedding", indices)
    values: Array = given if isinstance(indices, Variable) else namespace(table.data).asarray(given)
    if values.dtype.kind not in "iu":
        raise DtypeError(f"embedding needs integer indices, not {values.dtype}")
    if kernels_for(values, "embedding") is not None:
        return values  # nobody waits for a look at them; what no rank has is zero
    wrong = (values < 0) | (values >= entries)
    if wrong.any():
        first = int(values.reshape(-1)[int(wrong.reshape(-1).argmax())])
        raise ShapeError(f"embedding index {first} is outside 0..{entries - 1}")
    return values


def place_embedding(layer: Embedding, context: LayerContext) -> Placed:
    """Return the layer as the table wants it."""
    if not context.placement.is_replicated:
        raise context.refuse("is an Embedding, but its indices lie on several ranks; it must come before what is cut")
    if context.sharding is Sharding.VOCAB:
        return VocabularyEmbedding(layer, context.sharder), REPLICATED
    if context.sharding is Sharding.COLUMN:
        embedding = FeaturesEmbedding(layer, context.sharder)
        return embedding, embedding.result
    if context.sharding in (Sharding.ROW, Sharding.ROWS):
        raise context.refuse("is an Embedding; choose Sharding.VOCAB, COLUMN or REPLICATED")
    return layer, REPLICATED
