"""Embeddings of which each rank has some entries or some features.

    vocabulary cut    index 5   rank 0 has entries 0..3: zeros     \\
                                rank 1 has entries 4..7: its row 1  >  add up -> the row, whole
    features cut      every rank looks up its part of the row; no exchange
"""

from __future__ import annotations

from typing import Any

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.casting import device_kernels
from nnmpi.errors import DtypeError, ShapeError
from nnmpi.nn.linear import Embedding
from nnmpi.nn.sharding import Sharding
from nnmpi.parallel.sharded.exchange import add_up
from nnmpi.parallel.sharded.parts import Parts
from nnmpi.parallel.sharded.placement import WHOLE, features
from nnmpi.parallel.sharded.site import Placed, Site
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import read_as
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.variable import Variable


class LookUp(Function):
    """table[indices - first], zeros for indices that are not in this part of the table."""

    __slots__ = ("first",)

    def __init__(self, first: int) -> None:
        self.first = first

    def forward(self, table: Array, indices: Array) -> Array:
        xp = namespace(table)
        places = indices.reshape(-1).astype(xp.int64) - self.first
        kernels = device_kernels(table)
        if kernels is not None:  # which wait for nothing, and add up in one order
            self.saved = (table.shape, table.dtype, places, None)
            rows: Array = xp.empty((places.size, table.shape[1]), dtype=table.dtype)
            kernels.embedding(xp.ascontiguousarray(table), places, rows)
            rows = xp.where(((places >= 0) & (places < len(table)))[:, None], rows, 0)
            return rows.reshape(*indices.shape, table.shape[1])
        here = xp.flatnonzero((places >= 0) & (places < len(table)))
        own = places[here]
        self.saved = (table.shape, table.dtype, here, own)
        result: Array = xp.zeros((places.size, table.shape[1]), dtype=table.dtype)
        result[here] = table[own]
        return result.reshape(*indices.shape, table.shape[1])

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        shape, dtype, here, own = self.saved
        xp = namespace(grad)
        spread = self.into(0)
        if spread is None:
            spread = xp.empty(shape, dtype=dtype)
        if own is None:
            device_kernels(grad).embedding_grad(xp.ascontiguousarray(grad), here, spread)
            return spread, None
        spread[...] = 0
        xp.add.at(spread, own, grad.reshape(-1, shape[1])[here])
        return spread, None


class VocabularyEmbedding(Embedding):
    """Some entries of an embedding: whole integers (...) -> whole (..., features).

    Args:
        layer: the whole layer.
        parts: cuts its table.
    """

    def __init__(self, layer: Embedding, parts: Parts) -> None:
        self._entries = layer.weight.shape[0]
        self.weight = parts.cut(layer.weight, features(self._entries), axis=0)
        region = self.weight.region
        self._first = 0 if region is None else region.start
        self._group = parts.group

    @property
    def entries(self) -> int:
        """How many rows there are to pick, on all ranks that share the table."""
        return self._entries

    def forward(self, indices: Any) -> Tensor:
        """Return the rows that the indices pick. Errors are those of `ops.embedding`."""
        values = check_indices(self.weight, indices, self._entries)
        rows = add_up(LookUp(self._first)(self.weight, values), self._group, fresh=True)
        return rows.astype(read_as("embedding", self.weight))


class FeaturesEmbedding(Embedding):
    """Some features of an embedding: whole integers (...) -> (..., this rank's features).

    Args:
        layer: the whole layer.
        parts: cuts its table.
    """

    def __init__(self, layer: Embedding, parts: Parts) -> None:
        self.result = features(layer.weight.shape[1])
        self.weight = parts.cut(layer.weight, self.result, axis=1)


def check_indices(table: Tensor, indices: Any, entries: int) -> Array:
    """Return indices as an array.

    Raises:
        DtypeError: when they are not integers.
        ShapeError: when one is outside 0..entries-1.
    """
    values: Array = indices.data if isinstance(indices, Variable) else namespace(table.data).asarray(indices)
    if values.dtype.kind not in "iu":
        raise DtypeError(f"embedding needs integer indices, not {values.dtype}")
    if device_kernels(values) is not None:
        return values  # nobody waits for a look at them; what no rank has is zero
    wrong = (values < 0) | (values >= entries)
    if wrong.any():
        first = int(values.reshape(-1)[int(wrong.reshape(-1).argmax())])
        raise ShapeError(f"embedding index {first} is outside 0..{entries - 1}")
    return values


def place_embedding(layer: Embedding, site: Site) -> Placed:
    """Return the layer as the table wants it."""
    if not site.placement.is_whole:
        raise site.refuse("is an Embedding, but its indices lie on several ranks; it must come before what is cut")
    if site.sharding is Sharding.VOCAB:
        return VocabularyEmbedding(layer, site.parts), WHOLE
    if site.sharding is Sharding.COLUMN:
        embedding = FeaturesEmbedding(layer, site.parts)
        return embedding, embedding.result
    if site.sharding in (Sharding.ROW, Sharding.ROWS):
        raise site.refuse("is an Embedding; choose Sharding.VOCAB, COLUMN or REPLICATED")
    return layer, WHOLE
