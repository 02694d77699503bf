"""Branches: each rank computes some of them at the same time; all ranks get every result.

    rank 0    x --> branch 0 --> y0 --+--> y0 --+              |   gradient of y0 --> branch 0
              |                       |         +--> join --> ...
    rank 1    x --> branch 1 --> y1 --+--> y1 --+              |   gradient of y1 --> branch 1

    forward   one broadcast of each result          backward   one all-reduce of x's gradient

`join` and all that follows is the same on every rank, and so are the gradients of the results: each
rank uses those of its own branches. The gradients of x are summed, if x needs any.
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.precision import dtype_named, precision
from nnmpi.base.errors import UsageError
from nnmpi.base.shard import split
from nnmpi.comm.group import Group
from nnmpi.nn.container import Branches
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.collectives import CATEGORY, copy
from nnmpi.parallel.sharded.context import LayerContext, ParameterSharder, Placed
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import OF_RANKS, Traits


class FromRank(Function):
    """Broadcast one rank's tensor for replicated work; its gradient returns to that rank.

    Args:
        group: the ranks.
        root: the rank with the tensor.
        shape, dtype: of the tensor.
    """

    __slots__ = ("_dtype", "_shape", "group", "root")

    traits = Traits(
        onnx=OF_RANKS,
        tested_in="tests/parallel/sharded/test_branches.py",
    )

    is_call = True

    def __init__(
        self, group: Group, root: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.group, self.root, self._shape, self._dtype = group, root, shape, dtype

    def forward(self, value: Array | None, *inputs: Array) -> Array:
        """Return the root's tensor.

        Args:
            value: the tensor at the root, None on other ranks.
            inputs: of this rank's branches. Their gradients from here are zero. They are inputs so
                that all ranks sum their gradients in the same backward passes.
        """
        self.saved = tuple((x.shape, x.dtype) for x in inputs)
        xp = namespace(inputs[0] if value is None else value)
        y = xp.empty(self._shape, self._dtype) if value is None else xp.ascontiguousarray(value)
        with self.group.collective("broadcast", None, CATEGORY, y.nbytes):
            self.group.broadcast(y, self.root, check=False)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        xp = namespace(grad)
        nothing = (xp.broadcast_to(xp.zeros((), dtype), shape) for shape, dtype in self.saved)
        zeros = (
            zero if needed else None for zero, needed in zip(nothing, self.needs[1:], strict=True)
        )
        return grad if self.needs[0] else None, *zeros


class DealtBranches(Branches):
    """Branches divided among ranks: this rank computes its own; the others have no values.

    Args:
        full: the model's branches.
        sharder: keeps this rank's parameters.
    """

    def __init__(self, full: Branches, sharder: ParameterSharder) -> None:
        self.branches, self.join, self._group = full.branches, full.join, sharder.group
        dealt = split(len(self.branches), sharder.group.size)
        self._roots = tuple(rank for rank, numbers in enumerate(dealt) for _ in numbers)
        for branch, root in zip(self.branches, self._roots, strict=True):
            sharder.deal(branch, root == sharder.group.rank)
        # shapes and dtypes of the results, by those of the inputs
        self._forms: dict[Any, list[tuple[tuple[int, ...], str]]] = {}

    def forward(self, x: Any) -> Tensor:
        """Return `join` of all ranks' results."""
        inputs = list({id(item): item for item in self.inputs(x)}.values())
        copies = {
            id(item): copy(item if isinstance(item, Tensor) else Tensor(item), self._group)
            for item in inputs
        }
        results = [
            branch(copies[id(item)]) if root == self._group.rank else None
            for branch, root, item in zip(self.branches, self._roots, self.inputs(x), strict=True)
        ]
        key = (precision(), *((item.shape, str(item.dtype)) for item in copies.values()))
        if key not in self._forms:
            self._forms[key] = self._agreed(results)
        forms = self._forms[key]
        return self.joined(
            [
                FromRank(self._group, root, tuple(shape), dtype_named(dtype))(
                    result, *copies.values()
                )
                for root, result, (shape, dtype) in zip(self._roots, results, forms, strict=True)
            ]
        )

    def _agreed(self, results: list[Any]) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of each branch's result. Collective, once per inputs' shapes."""
        forms = [
            [result.shape, str(result.dtype)] if isinstance(result, Tensor) else None
            for result in results
        ]
        by_rank = self._group.gather(forms)
        agreed = [by_rank[root][i] for i, root in enumerate(self._roots)]
        if None in agreed:
            raise UsageError(
                f"branch {agreed.index(None)} does not return one Tensor; let it return one, for"
                " join"
            )
        return agreed


def place_branches(layer: Branches, context: LayerContext) -> Placed:
    """Return the branches, divided among the ranks."""
    if context.sharding is not Sharding.BRANCHES:
        raise context.error(
            "is made of branches; choose Sharding.BRANCHES, or name the layers in them"
        )
    if context.group.size > len(layer.branches):
        raise context.error(
            f"has {len(layer.branches)} branches, which {context.group.size} ranks cannot share; "
            f"let tp be {len(layer.branches)} at most"
        )
    return context.on_replicated(DealtBranches(layer, context.sharder))
