"""`to_onnx`: a model as an ONNX file for batches of any size."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, is_array
from nnmpi.base.errors import ShapeError, UsageError, raised_as
from nnmpi.base.files import write_atomically
from nnmpi.lab.onnx.graph import GraphValue, OnnxGraph
from nnmpi.lab.onnx.operators import converted
from nnmpi.lab.onnx.trace import trace
from nnmpi.nn.module import Module
from nnmpi.tensor.operand import values_of

OPSET, IR = 17, 8  # the first with LayerNormalization; what runtimes of 2022 read
LARGEST = (1 << 31) - (1 << 20)  # bytes: protobuf's limit, less the nodes
FIRST, LAST = "first", "last"


def to_onnx(
    model: Module,
    sample: Any,
    path: str | Path,
    *,
    channels: str = LAST,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a model as an ONNX file, and return the number of its nodes.

    One forward pass in evaluation is recorded, so a module's own `forward` is exported as a
    Sequential is. The first axis of inputs and results is the batch's, of any size; other axes,
    such as time, are as long as the sample's. Parameters keep their names; convolutions' and
    recurrent layers' have ONNX's layout.

    Args:
        model: on the host.
        sample: a batch of input, of one row or more; several inputs are a tuple. The file takes
            integers, such as tokens, as int64.
        path: of the file.
        channels: "last" for images (batch, height, width, channels), as here, or "first" for
            (batch, channels, height, width), as in PyTorch.
        metadata: texts by name, stored in the file.

    Raises:
        UsageError: without the package onnx; for an operation without a counterpart, named with
            its line; for a forward that reads values or does other things for another batch; for a
            file that cannot be written, or would be larger than 2 GiB.

    Example:
        >>> model = nnmpi.models.mlp((4,), 3).initialize(seed=0)
        >>> nnmpi.to_onnx(model, np.zeros((1, 4), "float32"), "model.onnx") > 2
        True
    """
    if find_spec("onnx") is None:
        raise UsageError("ONNX files are written by onnx; pip install onnx")
    if channels not in (FIRST, LAST):
        raise UsageError(f"channels is {FIRST!r} or {LAST!r}, not {channels!r}")
    given = sample if isinstance(sample, tuple) else (sample,)
    inputs = [values_of(x) for x in given]
    if not inputs or not all(is_array(x) and x.ndim and len(x) for x in inputs):
        raise ShapeError("a sample is an array with a row, (1, ...), or a tuple of such arrays")
    # ONNX's Gather takes no other index than int32 and int64
    inputs = [x.astype(np.int64) if x.dtype.kind in "iu" else x for x in inputs]
    # what depends on the batch's size differs
    (graph, ends), (other, others) = (
        _graph(model, [np.repeat(x[:1], n, axis=0) for x in inputs], channels == FIRST)
        for n in (2, 3)
    )
    _merge(graph, other, next(iter(ends)))
    file = _serialized(graph, ends, others, metadata or {})
    with raised_as(UsageError, f"{path} cannot be written"):
        write_atomically(Path(path), file)
    return len(graph.nodes)


def _graph(
    model: Module, inputs: Sequence[Array], moved: bool
) -> tuple[OnnxGraph, dict[str, Array]]:
    """Return the nodes of a forward pass; and its inputs and results by name, of the file's shapes.

    Args:
        moved: whether images have their channels first there.
    """
    applied, results = trace(model, inputs)
    entries = [*model.entries().items(), *model.named_base()]
    known = {id(entry._data): name for name, entry in entries}
    graph, values, ends = OnnxGraph(), dict[int, GraphValue](), dict[str, Array]()

    def value(x: Any, like: Array) -> Any:
        if x is not None and id(x) not in values:
            array = x if isinstance(x, np.ndarray) else np.asarray(x, like.dtype)
            name = known.get(id(x)) or graph.new("array")
            values[id(x)] = GraphValue(graph, array, name, forms={})
        return values.get(id(x))

    def named(what: str, arrays: Sequence[Array]) -> Iterator[tuple[Array, str, bool]]:
        for i, x in enumerate(arrays):
            name, moves = what if len(arrays) == 1 else f"{what}_{i}", moved and x.ndim == 4
            ends[name] = x.transpose(0, 3, 1, 2) if moves else x
            yield x, name, moves

    for x, name, moves in named("input", inputs):
        values[id(x)] = GraphValue(graph, x, *(("", name) if moves else (name,)))
    for function, arrays, result, graph.line in applied:
        made = converted(graph, function, result, [value(x, result) for x in arrays])
        values[id(result)] = made
        made.like = result
    for x, name, moves in named("output", results):
        source = value(x, x)
        graph.node("Identity", [source.first() if moves else source.read(source)], name)
    return graph, ends


def _merge(two: OnnxGraph, three: OnnxGraph, given: str) -> None:
    """Make a graph of 2 rows one for any batch, given that of 3 rows, and the name of an input."""
    for a, b in zip_longest(two.nodes, three.nodes):
        if a is None or b is None or a[:4] != b[:4]:
            raise UsageError(
                "the forward that is exported does other operations for 3 rows than for"
                f" 2{(a or b).line}"
            )
    shapes = {node.inputs[1] for node in two.nodes if node.op == "Reshape"}
    for name, x in list(two.constants.items()):
        y = three.constants[name]
        if x.shape == y.shape and np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
            continue
        axes = [i for i, n in enumerate(x.shape) if n != y.shape[i]]
        if name in shapes and (x != y).sum() == 1:
            two.constants[name] = np.where(x == y, x, -1)
        elif len(axes) == 1 and (y == (row := x.take([0], axes[0]))).all():
            _repeat(two, name, row, axes[0], given)  # such as an initial state of zeros
        else:
            line = next(node.line for node in two.nodes if name in node.inputs)
            raise UsageError(
                f"the forward that is exported has numbers that depend on the batch{line}: they"
                " differ between 2 rows and 3"
            )


def _repeat(graph: OnnxGraph, name: str, row: Array, axis: int, given: str) -> None:
    """Let a constant that is the same along an axis be as long there as the batch."""
    body, graph.nodes = graph.nodes, []
    size = GraphValue(graph, row, graph.node("Shape", [given])).add("Slice", [0], [1])
    lengths = [*row.shape[:axis]], size, [*row.shape[axis + 1 :]]
    shape = graph.node("Concat", map(size.read, lengths), axis=0)
    del graph.constants[name]
    graph.node("Expand", [size.read(row), shape], name)
    graph.nodes += body


def _serialized(
    graph: OnnxGraph,
    ends: Mapping[str, Array],
    others: Mapping[str, Array],
    metadata: Mapping[str, str],
) -> bytes:
    """Return the file's bytes. `others` are the ends of a larger batch."""
    from onnx import helper, numpy_helper

    if (size := sum(array.nbytes for array in graph.constants.values())) > LARGEST:
        raise UsageError(
            f"a model of {size >> 20} MiB does not fit an ONNX file, whose limit is 2 GiB; export"
            " it in parts"
        )

    def code(x: Any) -> Any:
        return helper.np_dtype_to_tensor_dtype(x) if isinstance(x, np.dtype) else x

    described = [
        helper.make_tensor_value_info(
            name,
            code(x.dtype),
            [n if n == m else "batch" for n, m in zip(x.shape, others[name].shape, strict=True)],
        )
        for name, x in ends.items()
    ]
    split = sum(name.startswith("input") for name in ends)
    nodes = [
        helper.make_node(op, inputs, outputs, **{k: code(x) for k, x in attributes.items()})
        for op, inputs, outputs, attributes, _ in graph.nodes
    ]
    constants = [
        numpy_helper.from_array(np.asarray(x, order="C"), name)
        for name, x in graph.constants.items()
    ]
    body = helper.make_graph(nodes, "nnmpi", described[:split], described[split:], constants)
    model = helper.make_model(
        body, producer_name="nnmpi", ir_version=IR, opset_imports=[helper.make_opsetid("", OPSET)]
    )
    helper.set_model_props(model, dict(metadata))
    return bytes(model.SerializeToString())
