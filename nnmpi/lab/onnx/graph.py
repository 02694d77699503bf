"""The nodes and constants of an ONNX file, while they are collected.

nnmpi's images are (batch, height, width, channels), ONNX's convolutions read (batch, channels,
height, width). A value has a name in nnmpi's layout, and maybe another with the channels first.
What works on each channel or element by itself takes the one that is there, so that a chain of
convolutions has no transposition inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array

END = np.iinfo(np.int64).max  # of a slice: to the end


class Node(NamedTuple):
    """One operator, by its name in ONNX; `line` of the user's code is "" or " (net.py:12)"."""

    op: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    line: str


class OnnxGraph:
    """See the head of this file.

    Attributes:
        nodes: so far, in the order of their execution.
        constants: the arrays in the forms in which nodes read them.
        line: of what is converted.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}
        self.line, self._count = "", 0

    def new(self, prefix: str) -> str:
        """Return a new name, which no parameter can have."""
        self._count += 1
        return f"/{prefix}_{self._count}"

    def node(self, op: str, inputs: Iterable[str], outputs: Any = "", **attributes: Any) -> str:
        """Add a node that reads names as they are; return that of its result."""
        names = [outputs or self.new(op)] if isinstance(outputs, str) else outputs
        self.nodes.append(Node(op, [*inputs], names, attributes, self.line))
        return str(names[0])


@dataclass(eq=False)
class GraphValue:
    """A value of the graph. Arithmetic with it adds nodes.

    Attributes:
        graph: where they are added.
        like: an array of its dtype; of an operation's inputs and result the recorded one.
        name: of a node's result, or of a constant; "" if only that with channels first is known.
        planes: its name with channels first; "" before it has one.
        forms: of a constant, the arrays that are read, by name.
    """

    graph: OnnxGraph
    like: Array
    name: str = ""
    planes: str = ""
    forms: dict[str, Array] | None = None

    def add(self, op: str, *others: Any, count: int = 1, **attributes: Any) -> Any:
        """Add a node that reads this value; return its result, or `count` results.

        Args:
            others: values; None; or constants: arrays, lists of integers, and numbers of this
                one's dtype. Images have their channels last.
        """
        names = [self.graph.new(op) for _ in range(count)]
        self.graph.node(op, map(self.read, (self, *others)), names, **attributes)
        results = [GraphValue(self.graph, self.like, name) for name in names]
        return results if count > 1 else results[0]

    def each(self, op: str, *others: Any, **attributes: Any) -> Any:
        """Add a node that works on each element, in the layout in which its inputs are."""
        inputs = self, *others
        values = [x for x in inputs if isinstance(x, GraphValue) and x.like.ndim]
        alike = len({x.like.ndim for x in values}) == 1  # else axes pair up from the last one on
        if not alike or all(x.name for x in values) or not all(x.planes for x in values):
            return self.add(op, *others, **attributes)
        names = (x.planes if x in values else self.read(x) for x in inputs)
        return self.as_planes(op, names, **attributes)

    __add__ = partialmethod(each, "Add")
    __sub__ = partialmethod(each, "Sub")
    __mul__ = partialmethod(each, "Mul")
    __truediv__ = partialmethod(each, "Div")
    __matmul__ = partialmethod(add, "MatMul")

    def images(self, op: str, *others: Any, **attributes: Any) -> Any:
        """Add a node that reads and returns images with their channels first."""
        return self.as_planes(op, [self.first(), *map(self.read, others)], **attributes)

    def as_planes(self, op: str, names: Iterable[str], **attributes: Any) -> Any:
        """Add a node that reads names as they are and returns images as `images` does."""
        return GraphValue(self.graph, self.like, planes=self.graph.node(op, names, **attributes))

    def first(self) -> str:
        """Return its name with channels first."""
        if not self.planes:
            n = self.like.ndim
            self.planes = self.transpose(0, n - 1, *range(1, n - 1)).name
        return self.planes

    def read(self, x: Any) -> str:
        """Return the name of an input of `add`."""
        if isinstance(x, GraphValue):
            if not x.name:
                perm = [0, *range(2, x.like.ndim), 1]
                x.name = self.graph.node("Transpose", [x.planes], perm=perm)
            return x.form(lambda same: same).name
        if x is None:
            return ""
        dtype = np.int64 if isinstance(x, list) else getattr(x, "dtype", self.like.dtype)
        name = self.graph.new("constant")
        self.graph.constants[name] = np.asarray(x, dtype)
        return name

    # as of an array, for `form`

    def transpose(self, *axes: int) -> Any:
        """Return it with its axes in this order."""
        return self.add("Transpose", perm=[*axes])

    def take(self, picks: Any, axis: int) -> Any:
        """Return what is picked along an axis."""
        return self.add("Gather", picks, axis=axis)

    def reshape(self, *shape: int) -> Any:
        """Return it with another shape, of which one length may be the batch's."""
        return self.add("Reshape", [*shape])

    def form(self, change: Callable[[Any], Any]) -> Any:
        """Return change(it), a function of `transpose`, `take` and `reshape`.

        A parameter is stored so, the first time under its own name; anything else gets nodes.
        """
        if self.forms is None:
            return change(self)
        array, forms = change(self.like), self.forms
        name = next((name for name, stored in forms.items() if np.array_equal(array, stored)), "")
        if not name:
            name = f"{self.name}.{len(forms)}" if forms else self.name
            forms[name] = self.graph.constants[name] = array
        return GraphValue(self.graph, self.like, name)
