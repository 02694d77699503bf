"""What computes an operation in an ONNX file: its traits say it, or a writer here does.

A writer is (operation, its result, its inputs) -> the result's value. It is for operations whose
nodes depend on their inputs' shapes, and refuses each form that it does not know. Operations that
only losses and training have (dropout, statistics of a batch) say that they have no counterpart;
a Function of a user's own says nothing, and is refused as well.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod, sqrt
from types import MappingProxyType
from typing import Any

import numpy as np

from nnmpi.backend.activations import GELU_TANH
from nnmpi.backend.array import Array
from nnmpi.base.errors import UsageError
from nnmpi.lab.onnx.graph import END, GraphValue, OnnxGraph
from nnmpi.ops.attention import Attention, GroupedAttention, PackedAttention
from nnmpi.ops.conv.convolution import Conv2dFunction, ConvTranspose2dFunction
from nnmpi.ops.experts import Experts
from nnmpi.ops.linear import LinearFunction, TransposedLinearFunction
from nnmpi.ops.norm import GroupNormFunction, LayerNormFunction
from nnmpi.ops.pool import AvgPool2dFunction, MaxPool2dFunction
from nnmpi.ops.recurrent import GRUFunction, LSTMFunction, RNNFunction
from nnmpi.tensor.function import Function
from nnmpi.tensor.reduce import Largest, Sum, Variance
from nnmpi.tensor.shape import Concatenate, GetItem, Reshape, Sort, View
from nnmpi.tensor.traits import WRITTEN, NotExported

# The rows of ONNX's gates among nnmpi's: i, o, f, c of i, f, o, g; and z, r, h of r, z, n.
GATES = {LSTMFunction: ("LSTM", (0, 2, 1, 3)), GRUFunction: ("GRU", (1, 0, 2))}
GATES[RNNFunction] = ("RNN", (0,))


def refused(graph: OnnxGraph, what: str, remedy: str) -> UsageError:
    """Return an error for an operation without a counterpart."""
    return UsageError(f"{what}{graph.line} has no counterpart in ONNX; {remedy}")


def _avg_pool(f: AvgPool2dFunction, y: Array, x: Any) -> Any:
    if f.over.kernel == x.like.shape[1:3] and f.over.padding == (0, 0):
        return x.images("GlobalAveragePool")
    return x.images("AveragePool", count_include_pad=1, **_windows(f.over))


def _reduced(op: str, x: Any, axes: Any, keepdims: int = 1) -> Any:
    if not axes:  # ONNX would take all
        return x
    if op == "ReduceSum":
        return x.add(op, [*axes], keepdims=int(keepdims))
    return x.add(op, axes=[*axes], keepdims=int(keepdims))


def _centred(x: Any, axes: Any) -> Any:
    return x - _reduced("ReduceMean", x, axes)


def _scaled(x: Any, axes: Any, eps: float) -> Any:
    """Return x divided by the root of its mean square."""
    return x / (_reduced("ReduceMean", x.add("Mul", x), axes) + eps).add("Sqrt")


def _variance(f: Variance, y: Array, x: Any) -> Any:
    count, x = f.count(x.like), _centred(x, f.axes)
    return _reduced("ReduceMean", x * x, f.axes, f.keepdims) * (count / (count - f.correction))


def _is_all(part: Any, size: int) -> bool:
    """Whether a part of a key takes all of an axis, however long; x[-3:] does so by chance."""
    return (
        isinstance(part, slice)
        and part.start in (None, 0)
        and part.stop in (None, size)
        and part.step in (None, 1)
    )


def _cut(part: slice, size: int, graph: OnnxGraph) -> tuple[int, int]:
    """Return the start and stop of a slice of an axis, for ONNX's Slice."""
    start, stop, step = part.start, part.stop, part.step or 1
    if step > 0:
        is_whole = stop is None or stop == size  # x[1 : len(x)], whatever the batch
        return start or 0, END if is_whole else stop
    if start is not None and start < -1:  # of a shorter axis ONNX would take the first element
        start += size
        if start < 0:
            raise refused(graph, "a slice without elements", "leave it out")
    return END if start is None else start, -END if stop is None else stop


def _view(f: View, y: Array, x: Any) -> Any:
    key, cuts = f._expanded(x.like.ndim), []
    parts = [part for part in key if part is not None]
    for axis, (part, size) in enumerate(zip(parts, x.like.shape, strict=True)):
        if isinstance(part, int):
            cuts.append((part, part + 1 or END, axis, 1))
        elif not _is_all(part, size):
            cuts.append((*_cut(part, size, x.graph), axis, part.step or 1))
    if cuts:
        x = x.add("Slice", *map(list, zip(*cuts, strict=True)))
    kept = [part for part in key if not isinstance(part, int)]
    for op, among, kind in (("Squeeze", parts, int), ("Unsqueeze", kept, type(None))):
        if axes := [axis for axis, part in enumerate(among) if isinstance(part, kind)]:
            x = x.add(op, axes)
    return x


def _sort(f: Sort, y: Array, x: Any) -> Any:
    if f.axis == 0:  # the number of places is a constant
        raise refused(x.graph, "a sort over the batch", "sort each sample")
    size, largest = x.like.shape[f.axis], int(f.descending)
    return x.add("TopK", [size], count=2, axis=f.axis, largest=largest)[0]


def _get_item(f: GetItem, y: Array, x: Any, *indices: Any) -> Any:
    """Pick along an axis, by the only array in the key."""
    parts = enumerate(zip(f.key, x.like.shape, strict=False))
    axes = [axis for axis, (part, n) in parts if not _is_all(part, n)]
    if len(axes) != 1 or len(indices) != 1 or indices[0].like.dtype.kind not in "iu":
        what = "an index of booleans or of several arrays"
        raise refused(x.graph, what, "pick along one axis")
    return x.take(indices[0].add("Cast", to=np.dtype(np.int64)), axes[0])


def _linear(f: LinearFunction, y: Array, x: Any, weight: Any, bias: Any) -> Any:
    across = isinstance(f, TransposedLinearFunction)
    if x.like.ndim == 2:
        x = x.add("Gemm", weight, bias, transB=int(across))
    else:
        x = x @ (weight.transpose(1, 0) if across else weight)
        x = x if bias is None else x + bias
    return x


def _kernels(weight: Any) -> Any:
    return weight.transpose(3, 2, 0, 1)


def _windows(over: Any) -> dict[str, Any]:
    kernel, stride, padding, *more = over
    words = {"kernel_shape": [*kernel], "strides": [*stride], "pads": [*padding, *padding]}
    return {**words, "dilations": [*more[0]], "group": more[1]} if more else words


def _conv(f: Conv2dFunction, y: Array, x: Any, weight: Any, bias: Any) -> Any:
    spec = f.algorithm.spec
    x = x.images("Conv", weight.form(_kernels), bias, **_windows(spec))
    if prod(spec.pool) == 1:
        return x
    return x.each("Relu").images("MaxPool", **_windows((spec.pool, spec.pool, (0, 0))))


def _conv_transpose(f: ConvTranspose2dFunction, y: Array, x: Any, weight: Any) -> Any:
    extra = [
        size - (n - 1) * step + 2 * edge - apart * (kernel - 1) - 1
        for size, n, kernel, step, edge, apart in zip(
            f.size, x.like.shape[1:3], *f.spec[:4], strict=True
        )
    ]
    words = _windows(f.spec)
    return x.images("ConvTranspose", weight.form(_kernels), output_padding=extra, **words)


def _reshape(f: Reshape, y: Array, x: Any) -> Any:
    shape = x.like.shape
    if not y.size:
        raise refused(x.graph, "a reshape without elements", "leave it out")
    if len(shape) == 4 and shape[1:3] == (1, 1) and y.shape == shape[::3]:
        # of one pixel, any layout has this order
        return GraphValue(x.graph, y, x.graph.node("Flatten", [x.first()]))
    return x.reshape(*y.shape)


def _concatenate(f: Concatenate, y: Array, x: Any, *others: Any) -> Any:
    if y.ndim == 4 and f.axis == 3:
        return x.as_planes("Concat", [item.first() for item in (x, *others)], axis=1)
    return x.add("Concat", *others, axis=f.axis)


def _layer_norm(f: LayerNormFunction, y: Array, x: Any, *parameters: Any) -> Any:
    eps, axis = f.settings[0], -parameters[0].like.ndim
    if len(parameters) == 2:
        return x.add("LayerNormalization", *parameters, axis=axis, epsilon=eps)
    return _scaled(x, range(axis, 0), eps) * parameters[0]


def _group_norm(f: GroupNormFunction, y: Array, x: Any, scale: Any, shift: Any) -> Any:
    (eps, width), (n, *_, channels), axes = f.settings, y.shape, (1, 3)
    rows = x.reshape(n, y[0].size // channels, channels // width, width)
    rows = _scaled(_centred(rows, axes), axes, eps)
    return rows.reshape(*y.shape) * scale + shift


def _attend(f: Any, y: Array, q: Any, k: Any, v: Any, features: int) -> Any:
    """Return softmax(q k / sqrt(features)) v, like y (batch, heads, time, any).

    Args:
        k: (batch, heads, features, time).
    """
    time = y.shape[-2]
    scores = q @ k * (1 / sqrt(features))
    if f.causal:
        mask = np.where(np.tri(time, dtype=bool), 0, -np.inf).astype(y.dtype)
        scores = scores + mask
    return scores.add("Softmax", axis=-1) @ v


def _packed_attention(f: PackedAttention, y: Array, x: Any) -> Any:
    if f.before is not None:
        raise refused(x.graph, "attention to a cache of earlier tokens", "export it without one")
    shape, heads = (*y.shape[:2], f.heads, y.shape[2] // f.heads), (0, 2, 1, 3)
    q, k, v = (part.reshape(*shape) for part in x.add("Split", count=3, axis=2))
    moved = q.transpose(*heads), k.transpose(0, 2, 3, 1), v.transpose(*heads)
    result = _attend(f, y.reshape(shape).swapaxes(1, 2), *moved, shape[3])
    return result.transpose(*heads).reshape(*y.shape)


def _grouped_attention(f: GroupedAttention, y: Array, q: Any, k: Any, v: Any) -> Any:
    if f.before is not None:
        raise refused(q.graph, "attention to a cache of earlier tokens", "export it without one")
    (batch, time, _), width, axes = y.shape, f.features, (0, 2, 1, 3)
    shared = k.like.shape[2] // width
    group = y.shape[2] // width // shared

    def heads(x: Any, count: int) -> Any:
        return x.reshape(batch, time, count, width).transpose(*axes)

    def turned(x: Any) -> Any:
        if f.rotary is None:
            return x
        rotation = f.rotary.at((range(time),), y)
        a, b = x.add("Split", count=2, axis=3)
        return x * rotation.cos + b.add("Concat", a, axis=3) * rotation.sin

    queries = turned(heads(q, shared * group)).reshape(batch, shared, group, time, width)
    keys, values = (
        item.add("Unsqueeze", [2]) for item in (turned(heads(k, shared)), heads(v, shared))
    )
    result = _attend(
        f,
        np.empty((batch, shared, group, time, width), y.dtype),
        queries,
        keys.transpose(0, 1, 2, 4, 3),
        values,
        width,
    )
    result = result.reshape(batch, shared * group, time, width)
    return result.transpose(*axes).reshape(*y.shape)


def _recurrent(f: Any, y: Array, x: Any, weight: Any, recurrent: Any, bias: Any, *more: Any) -> Any:
    (*states, table), (op, gates), words = more, GATES[type(f)], dict[str, Any]()
    n, lengths, inner = len(recurrent.like), None, []
    if op == "LSTM":
        lengths, words = states.pop(), {"direction": "reverse" if f.reverse else "forward"}
    elif op == "GRU":
        inner, words = [states.pop(0)], {"linear_before_reset": 1}
    elif f.rectifies:
        words = {"activations": ["Relu"]}
    order = [gate * n + i for gate in gates for i in range(n)]
    x = x if table is None else table.take(x, 0)

    def oriented(w: Any) -> Any:
        return w.transpose(1, 0).take(order, 0).reshape(1, len(order), -1)

    # the bias of the product with h, which only GRU's last gate has
    zeros = np.zeros((len(gates) - len(inner)) * n, bias.like.dtype)
    biases = bias.form(lambda b: b.take(order, 0)).add("Concat", zeros, *inner, axis=0)
    rows, *last = x.transpose(1, 0, 2).add(
        op,
        *(w.form(oriented) for w in (weight, recurrent)),
        biases.add("Unsqueeze", [0]),
        lengths and lengths.add("Cast", to=np.dtype(np.int32)),
        *(state and state.add("Unsqueeze", [0]) for state in states),
        count=1 + len(states),
        hidden_size=n,
        **words,
    )
    rows = rows.add("Squeeze", [1])
    if getattr(f, "ends", False):
        rows = rows.add("Concat", *last, axis=0)
    return rows.transpose(1, 0, 2)


def _experts(f: Experts, y: Array, x: Any, *others: Any) -> Any:
    """Compute every expert's result of every row; the gate's choice is a factor of 1 or 0."""
    if f.ranks is not None or f.positions is not None:
        raise refused(x.graph, "a mixture of experts over several ranks", "export it on one rank")
    gate, (p, w1, b1, w2, b2) = f.gate, others
    experts = p.like.shape[2]
    b1, b2 = (b.form(lambda b: b.reshape(experts, 1, -1)) for b in (b1, b2))
    rows = x.add("Unsqueeze", [1])  # (samples, 1, positions, features)
    results = GELU_TANH.nodes(rows @ w1 + b1) @ w2 + b2
    chosen = p.add("TopK", [gate.top_k], count=2, axis=2)[1]
    hot = chosen.add("OneHot", [experts], np.array([0, 1], y.dtype), axis=-1)
    taken = hot.add("ReduceSum", [2], keepdims=0)
    if gate.capacity is not None:
        most = ceil(gate.capacity * gate.top_k * y.shape[1] / experts)
        within = taken.add("CumSum", np.array(1)).add("LessOrEqual", np.array(most, y.dtype))
        taken = taken * within.add("Cast", to=y.dtype)
    factors = (p * taken).transpose(0, 2, 1).add("Unsqueeze", [3])
    return (results * factors).add("ReduceSum", [1], keepdims=0)


def _attention(function: Any, y: Any, q: Any, k: Any, v: Any) -> Any:
    return _attend(function, y, q, k.transpose(0, 1, 3, 2), v, q.like.shape[3])


def _largest(function: Any, y: Any, x: Any) -> Any:
    operator = "ReduceMax" if function.largest else "ReduceMin"
    return _reduced(operator, x, function.axes, function.keepdims)


def _sum(function: Any, y: Any, x: Any) -> Any:
    operator = "ReduceMean" if function.averages else "ReduceSum"
    return _reduced(operator, x, function.axes, function.keepdims)


def _max_pool(function: Any, y: Any, x: Any) -> Any:
    return x.images("MaxPool", **_windows(function.over))


# The operations whose traits say `WRITTEN`.
WRITERS: Mapping[type[Function], Callable[..., Any]] = MappingProxyType(
    {
        Attention: _attention,
        AvgPool2dFunction: _avg_pool,
        Concatenate: _concatenate,
        Conv2dFunction: _conv,
        ConvTranspose2dFunction: _conv_transpose,
        Experts: _experts,
        GRUFunction: _recurrent,
        GetItem: _get_item,
        GroupNormFunction: _group_norm,
        GroupedAttention: _grouped_attention,
        LSTMFunction: _recurrent,
        Largest: _largest,
        LayerNormFunction: _layer_norm,
        LinearFunction: _linear,
        MaxPool2dFunction: _max_pool,
        PackedAttention: _packed_attention,
        RNNFunction: _recurrent,
        Reshape: _reshape,
        Sort: _sort,
        Sum: _sum,
        TransposedLinearFunction: _linear,
        Variance: _variance,
        View: _view,
    }
)


def converted(graph: OnnxGraph, function: Function, result: Array, inputs: Sequence[Any]) -> Any:
    """Add the nodes that compute what an operation has, and return their value.

    Args:
        result: the operation's, recorded.
        inputs: its, as values of the graph.

    Raises:
        UsageError: for an operation, or a form of one, without a counterpart. A class has its own
            traits: what it inherits may be another operation's.
    """
    traits = vars(type(function)).get("traits")
    form = NotExported() if traits is None else traits.onnx
    if form is WRITTEN:
        form = WRITERS[type(function)]
    if isinstance(form, str):
        return inputs[0].each(form, *inputs[1:])
    value = form if isinstance(form, NotExported) else form(function, result, *inputs)
    if isinstance(value, NotExported):
        name = type(function).__name__.removesuffix("Function")
        raise refused(graph, value.form or f"the operation {name}", value.remedy)
    return value
