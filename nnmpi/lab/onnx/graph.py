"""The nodes and constants of an ONNX file, while they are collected.

nnmpi's images are (batch, height, width, channels), ONNX's convolutions read (batch, channels,
height, width). A value has a name in nnmpi's layout, and maybe another with the channels first.
What works on each channel or element by itself takes the one that is there, so that a chain of
convolutions has no transposition inside.
"""

from collections.abc import Iterable, Sequence
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


class GraphValue(NamedTuple):
    """A value of the graph.

    Attributes:
        name: of a node's result, or of a constant.
        like: an array of its dtype; of an operation's inputs and result the recorded one.
        formed: whether a constant's name is that of the form in which it is read.
    """

    name: str
    like: Array
    formed: bool = False


class OnnxGraph:
    """See the head of this file.

    Attributes:
        arrays: of parameters and other constants that operations read, by name.
        nodes: so far, in the order of their execution.
        constants: the arrays in the forms in which nodes read them.
        line: of what is converted.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}
        self.line, self._count = "", 0
        self._forms: dict[str, dict[str, str]] = {}
        self._planes: dict[str, str] = {}  # name -> that with channels first
        self._late: dict[str, int] = {}  # names without a node -> axes

    def new(self, prefix: str) -> str:
        """Return a new name, which no parameter can have."""
        self._count += 1
        return f"/{prefix}_{self._count}"

    def node(self, op: str, inputs: Iterable[str], outputs: Any = "", **attributes: Any) -> str:
        """Add a node that reads names as they are; return that of its result."""
        names = [outputs or self.new(op)] if isinstance(outputs, str) else outputs
        self.nodes.append(Node(op, [*inputs], names, attributes, self.line))
        return str(names[0])

    def add(self, op: str, *inputs: Any, count: int = 1, **attributes: Any) -> Any:
        """Add a node; return its result, or `count` results.

        Args:
            inputs: values, the first of them images with their channels last; None; or constants:
                arrays, lists of integers, and numbers of the first one's dtype.
        """
        like = inputs[0].like
        outputs = [self.new(op) for _ in range(count)]
        self.node(op, [self.name(x, like) for x in inputs], outputs, **attributes)
        return (
            GraphValue(outputs[0], like) if count == 1 else [GraphValue(x, like) for x in outputs]
        )

    def name(self, x: Any, like: Array) -> str:
        """Return the name of an input of `add`."""
        if isinstance(x, GraphValue):
            if x.name in self._late:
                n = self._late.pop(x.name)
                planes = [self._planes[x.name]]
                self.node("Transpose", planes, x.name, perm=[0, *range(2, n), 1])
            return self.form(x).name
        if x is None:
            return ""
        dtype = np.int64 if isinstance(x, list) else getattr(x, "dtype", like.dtype)
        name = self.new("constant")
        self.constants[name] = np.asarray(x, dtype)
        return name

    def first(self, x: GraphValue) -> str:
        """Return the name of a value with its channels first."""
        if x.name not in self._planes:
            n = x.like.ndim
            moved = self.add("Transpose", x, perm=[0, n - 1, *range(1, n - 1)])
            self._planes[x.name] = moved.name
        return self._planes[x.name]

    def last(self, planes: str, like: Array) -> GraphValue:
        """Return a value whose name with channels first is known."""
        result = GraphValue(self.new("last"), like)
        self._planes[result.name], self._late[result.name] = planes, like.ndim
        return result

    def planes(self, op: str, x: GraphValue, *others: Any, **attributes: Any) -> GraphValue:
        """Add a node that reads and returns images with their channels first."""
        names = [self.first(x), *(self.name(item, x.like) for item in others)]
        return self.last(self.node(op, names, **attributes), x.like)

    def each(self, op: str, *inputs: Any, **attributes: Any) -> GraphValue:
        """Add a node that works on each element, in the layout in which its inputs are."""
        values = [x for x in inputs if isinstance(x, GraphValue) and x.like.ndim]
        if {x.name for x in values} & self._late.keys() and all(
            x.name in self._planes for x in values
        ):
            like = values[0].like
            names = [self._planes[x.name] if x in values else self.name(x, like) for x in inputs]
            return self.last(self.node(op, names, **attributes), like)
        result: GraphValue = self.add(op, *inputs, **attributes)
        return result

    def reshape(self, x: GraphValue, shape: Sequence[int]) -> Any:
        """Add a node that gives a value another shape, of which one length may be the batch's."""
        return self.add("Reshape", x, [*shape])

    def form(
        self,
        x: GraphValue,
        perm: Sequence[int] = (),
        order: Sequence[int] = (),
        shape: Sequence[int] = (),
    ) -> GraphValue:
        """Return an array with its axes permuted, its rows in an order, of a shape.

        A parameter is stored so, the first time under its own name; anything else gets nodes.
        """
        if x.name in self.arrays and not x.formed:
            forms, key = self._forms.setdefault(x.name, {}), f"{perm} {order} {shape}"
            if key not in forms:
                array = self.arrays[x.name]
                array = array.transpose(perm) if perm else array
                array = array[[*order]] if order else array
                forms[key] = f"{x.name}.{len(forms)}" if forms else x.name
                self.constants[forms[key]] = array.reshape(shape) if shape else array
            return GraphValue(forms[key], x.like, True)
        x = self.add("Transpose", x, perm=[*perm]) if perm else x
        x = self.add("Gather", x, [*order], axis=0) if order else x
        return self.reshape(x, shape) if shape else x
