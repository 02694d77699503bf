"""Linear layers of which each rank has some outputs or some inputs (Shoeybi et al., "Megatron-LM", 2019).

                  column                                   row
    x whole -> [ W0 | W1 ] -> y0 | y1   -> relu ->  y0 | y1 -> [ V0 ] -> add up -> z whole
                                                               [ V1 ]
    forward    nothing                              one all-reduce
    backward   one all-reduce, of x's gradient      nothing

In half precision the parts are added up before they are rounded.

So a pair costs one all-reduce each way, and what stands between works on its rank's features alone.
"""

from nnmpi.nn.linear import Linear, TiedLinear
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.linear import linear_part
from nnmpi.parallel.sharded.collectives import sum_over_ranks
from nnmpi.parallel.sharded.context import LayerContext, Placed, Redistribute, divided
from nnmpi.parallel.sharded.parameters import ParameterSharder
from nnmpi.tensor.operand import read_as
from nnmpi.tensor.placement import REPLICATED, Placement, features
from nnmpi.tensor.tensor import Tensor


class ColumnLinear(Linear):
    """Some outputs of a linear layer: whole (..., inputs) -> (..., this rank's outputs). All else is the layer's.

    Args:
        layer: the whole layer.
        sharder: cuts its parameters.
        result: how the outputs lie on the ranks.
        enter: makes the input whole, and sums its gradients.
    """

    def __init__(self, layer: Linear, sharder: ParameterSharder, result: Placement, enter: Redistribute) -> None:
        self.result = result
        self.weight = sharder.cut(layer.weight, self.result, axis=1)
        self.bias = None if layer.bias is None else sharder.cut(layer.bias, self.result, axis=0)
        self._enter = enter

    def enter(self, x: Tensor) -> Tensor:
        """Return the whole input."""
        return self._enter(x)


class RowLinear(Linear):
    """Some inputs of a linear layer: (..., this rank's inputs) -> whole (..., outputs). The bias is whole.

    Args:
        layer: the whole layer.
        sharder: cuts its parameters.
        cut: how the input lies on the ranks.
        enter: leaves this rank its part of the input.
    """

    def __init__(self, layer: Linear, sharder: ParameterSharder, cut: Placement, enter: Redistribute) -> None:
        self.weight = sharder.cut(layer.weight, cut, axis=0)
        self.bias = layer.bias
        self._group, self._enter = sharder.group, enter

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        x = self._enter(x)
        whole = sum_over_ranks(linear_part(x, self.weight), self._group, self.bias)
        return whole.astype(read_as("linear", x, self.weight))


class VocabularyTiedLinear(TiedLinear):
    """Some entries of a tied output: whole (..., features) -> (..., this rank's entries).

    Args:
        layer: the whole layer.
        sharder: cuts its table, as it does for the embedding.
        enter: makes the input whole, and sums its gradients.
    """

    def __init__(self, layer: TiedLinear, sharder: ParameterSharder, enter: Redistribute) -> None:
        self.result = features(layer.weight.shape[0])
        self.weight = sharder.cut(layer.weight, self.result, axis=0)
        self._enter = enter

    def enter(self, x: Tensor) -> Tensor:
        """Return the whole input."""
        return self._enter(x)


def place_tied_linear(layer: TiedLinear, context: LayerContext) -> Placed:
    """Return the layer as the table wants it."""
    inputs = layer.weight.shape[1]
    if context.sharding is Sharding.VOCAB:
        tied = VocabularyTiedLinear(layer, context.sharder, context.to_each(inputs))
        return tied, tied.result
    if context.sharding not in (None, Sharding.REPLICATED):
        raise context.refuse("is a TiedLinear; choose Sharding.VOCAB or REPLICATED")
    return context.on_replicated(layer, inputs)


def place_linear(layer: Linear, context: LayerContext) -> Placed:
    """Return the layer as the table wants it."""
    inputs = layer.weight.shape[0]
    if context.sharding in (Sharding.COLUMN, Sharding.VOCAB):
        result = divided(layer.weight.shape[1], context.units)
        column = ColumnLinear(layer, context.sharder, result, context.to_each(inputs))
        return column, column.result
    if context.sharding is Sharding.ROW:
        ready = not context.placement.is_replicated and not context.placement.has_rows
        cut = context.placement if ready else divided(inputs, context.units)
        return RowLinear(layer, context.sharder, cut.resolve(inputs), context.to_parts(cut)), REPLICATED
    if context.sharding is Sharding.ROWS:
        raise context.refuse("is a Linear and has no image rows; choose Sharding.COLUMN, ROW or REPLICATED")
    return context.on_replicated(layer, inputs)
