"""Tensor parallelism: layers of one model shared out over the ranks of a group, as a table says.

    table {"1": COLUMN, "3": ROW}        Sequential(Flatten, Linear, ReLU, Linear)

        x whole -> Flatten -> ColumnLinear -> features shared out -> ReLU -> RowLinear -> whole

`shard` goes through the model in the order of computation and keeps track of how the activation lies on the ranks (see
`sharded.placement`). Each layer's rule says what takes its place and how its result lies; where a layer needs the
activation otherwise, an exchange comes before it. What a layer needs of the other ranks is in the module that stands in
its place, so the model can be cut into stages afterwards, anywhere. Parameters keep their names and the values that the
whole model would draw; a part knows its `region`. What stays whole has the same bits on every rank, and so has its
gradient.
"""

from __future__ import annotations

from nnmpi.comm.group import Group
from nnmpi.errors import LayoutError, UsageError
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding, Table, find
from nnmpi.parallel.sharded.parts import Parts
from nnmpi.parallel.sharded.placement import WHOLE, Placement
from nnmpi.parallel.sharded.shapes import Shape
from nnmpi.parallel.sharded.walk import Walk


def shard(
    model: Module, group: Group, table: Table | None = None, sample: Shape | None = None, classes_apart: bool = False
) -> Placement:
    """Replace a model's layers by this rank's parts of them, and return how the model's result lies on the ranks.

    Not collective; initialize the model afterwards. On a group of one rank the model stays as it is.

    Args:
        model: not initialized; any tree of modules. Layers in a `Sequential` or `Residual` get their input as they
            need it. In a module of another kind, whose forward nobody knows, each layer does just what the table says:
            COLUMN takes a whole input and gives its features, ROW takes features and gives a whole result.
        group: the ranks that share each layer.
        table: full names of modules, or patterns -> `Sharding`; by default the model's own.
        sample: the shape of one sample, without the batch; needed for Sharding.ROWS.
        classes_apart: whether the result of a last layer with Sharding.VOCAB stays shared out, for a loss that knows
            it (see `sharded.cross_entropy`); otherwise the result is whole.

    Raises:
        UsageError: when the model is initialized already.
        LayoutError: for a table that names nothing in the model, and layers that cannot be sharded so.
    """
    if "storage" in vars(model):
        raise UsageError("the model has its values already; shard it first, then call model.initialize()")
    table = model.sharding if table is None else table
    _check_table(model, table)
    if group.size == 1:
        return WHOLE
    if not table:
        raise LayoutError(
            f"the model has no table that says how its layers are shared out over {group.size} ranks; give it "
            'one, such as model.sharding = {"0": nn.Sharding.COLUMN}, or leave tp at 1'
        )
    parts = Parts(group)
    placement = Walk(parts, table).model(model, sample, classes_apart)
    parts.check(model)
    return placement


def _check_table(model: Module, table: Table) -> None:
    """Refuse entries that fit no module: most likely a name is wrong; and a model with nothing to replace."""
    names = [name for name, _ in model.named_modules() if name]
    if table and not names:
        raise LayoutError("the model is a single layer; put it into a Sequential, in which it can be replaced")
    used = {found[0] for found in (find(table, name) for name in names) if found is not None}
    for pattern, sharding in table.items():
        if not isinstance(sharding, Sharding):
            raise LayoutError(f"the table says {sharding!r} of {pattern!r}; use a Sharding, such as Sharding.COLUMN")
        if pattern not in used and not any(find({pattern: sharding}, name) for name in names):
            raise LayoutError(f"the table's {pattern!r} names no module; there are {', '.join(map(repr, names))}")
