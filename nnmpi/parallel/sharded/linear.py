"""Linear layers and embeddings of which each rank has some outputs, some inputs or some entries.

                  column                                   row
    x whole -> [ W0 | W1 ] -> y0 | y1   -> relu ->  y0 | y1 -> [ V0 ] -> add up -> z whole
                                                               [ V1 ]
    forward    nothing                              one all-reduce
    backward   one all-reduce, of x's gradient      nothing

So a pair costs one all-reduce each way (Shoeybi et al., "Megatron-LM", 2019), and what stands between works on its
rank's features alone. In half precision the parts are added up before they are rounded.

    vocabulary cut    index 5   rank 0 has entries 0..3: zeros     \\
                                rank 1 has entries 4..7: its row 1  >  add up -> the row, whole
    features cut      every rank looks up its part of the row; no exchange
"""

from typing import Any

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import kernels_for
from nnmpi.comm.group import Group
from nnmpi.errors import DtypeError, ShapeError
from nnmpi.nn.linear import Embedding, Linear, TiedLinear
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.embedding import add_rows, as_indices
from nnmpi.ops.linear import linear_part
from nnmpi.parallel.sharded.collectives import sum_over_ranks
from nnmpi.parallel.sharded.context import LayerContext, Part, Placed, divided
from nnmpi.tensor.function import Function, Variable
from nnmpi.tensor.operand import read_as, whole_values
from nnmpi.tensor.placement import REPLICATED, Placement, features, is_cut
from nnmpi.tensor.tensor import Tensor


class ColumnLinear(Part, Linear):
    """Some outputs of a linear layer: whole (..., inputs) -> (..., this rank's outputs)."""


class RowLinear(Part, Linear):
    """Some inputs of a linear layer: (..., this rank's inputs) -> whole (..., outputs). The bias is whole."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        x = self.enter(x)
        whole = sum_over_ranks(linear_part(x, self.weight), self.group, self.bias)
        return whole.astype(read_as("linear", x, self.weight))


class VocabularyTiedLinear(Part, TiedLinear):
    """Some entries of a tied output: whole (..., features) -> (..., this rank's entries)."""


def place_tied_linear(layer: TiedLinear, context: LayerContext) -> Placed:
    """Return the layer as the table wants it."""
    inputs = layer.weight.shape[1]
    if context.sharding is Sharding.VOCAB:
        result = features(layer.weight.shape[0])  # the table is cut as the embedding's is
        weight = context.sharder.cut(layer.weight, result, axis=0)
        return VocabularyTiedLinear(layer, context.to_each(inputs), weight=weight), result
    if context.sharding not in (None, Sharding.REPLICATED):
        raise context.refuse("is a TiedLinear; choose Sharding.VOCAB or REPLICATED")
    return context.on_replicated(layer, inputs)


def place_linear(layer: Linear, context: LayerContext) -> Placed:
    """Return the layer as the table wants it."""
    inputs = layer.weight.shape[0]
    if context.sharding in (Sharding.COLUMN, Sharding.VOCAB):
        result = divided(layer.weight.shape[1], context.units)
        weight, bias = context.sharder.cut(layer.weight, result, 1), context.sharder.cut(layer.bias, result, 0)
        return ColumnLinear(layer, context.to_each(inputs), weight=weight, bias=bias), result
    if context.sharding is Sharding.ROW:
        ready = not context.placement.is_replicated and not context.placement.has_rows
        cut = context.placement if ready else divided(inputs, context.units)
        weight = context.sharder.cut(layer.weight, cut.resolve(inputs), axis=0)
        return RowLinear(layer, context.to_parts(cut), weight=weight, group=context.group), REPLICATED
    if context.sharding is Sharding.ROWS:
        raise context.refuse("is a Linear and has no image rows; choose Sharding.COLUMN, ROW or REPLICATED")
    return context.on_replicated(layer, inputs)


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
        return rows.reshape(*indices.shape, table.shape[1])

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


class VocabularyEmbedding(Part, Embedding):
    """Some entries of an embedding: whole integers (...) -> whole (..., features)."""

    group: Group
    entries: int

    @property
    def num_embeddings(self) -> int:
        """How many rows there are to pick, on all ranks that share the table."""
        return self.entries

    def forward(self, indices: Any) -> Tensor:
        """Return the rows that the indices pick. Errors are those of `ops.embedding`."""
        values, region = check_indices(self.weight, indices, self.entries), self.weight.region
        look_up = LookUp(0 if region is None else region.start)
        rows = sum_over_ranks(look_up(self.weight, indices if is_cut(indices) else values), self.group)
        return rows.astype(read_as("embedding", self.weight))


class FeaturesEmbedding(Part, Embedding):
    """Some features of an embedding: whole integers (...) -> (..., this rank's features)."""


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
        entries = layer.weight.shape[0]
        weight = context.sharder.cut(layer.weight, features(entries), axis=0)
        return VocabularyEmbedding(layer, weight=weight, group=context.group, entries=entries), REPLICATED
    if context.sharding is Sharding.COLUMN:
        result = features(layer.weight.shape[1])
        return FeaturesEmbedding(layer, weight=context.sharder.cut(layer.weight, result, axis=1)), result
    if context.sharding in (Sharding.ROW, Sharding.ROWS):
        raise context.refuse("is an Embedding; choose Sharding.VOCAB, COLUMN or REPLICATED")
    return layer, REPLICATED
