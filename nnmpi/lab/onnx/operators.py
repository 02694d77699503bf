"""A row for each operation: the nodes that compute what its `forward` does.

A row is (graph, operation, its result, its inputs) -> the result's value. Operations that only
losses and training have (dropout, statistics of a batch) have none, and neither has a Function of a
user's own.
"""

from collections.abc import Callable, Mapping
from math import ceil, prod, sqrt
from types import MappingProxyType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.plain import Activation
from nnmpi.base.errors import UsageError
from nnmpi.lab.onnx.graph import END, GraphValue, OnnxGraph
from nnmpi.ops.activation import LogSoftmaxFunction, SoftmaxFunction
from nnmpi.ops.attention import Attention, PackedAttention
from nnmpi.ops.conv.conv2d import Conv2dFunction
from nnmpi.ops.conv.transposed import ConvTranspose2dFunction
from nnmpi.ops.embedding import EmbeddingFunction
from nnmpi.ops.experts import Experts
from nnmpi.ops.gru import GRUFunction
from nnmpi.ops.linear import LinearFunction, TransposedLinearFunction
from nnmpi.ops.lstm import LSTMFunction
from nnmpi.ops.norm import FixedNormFunction, GroupNormFunction, LayerNormFunction
from nnmpi.ops.pool import AvgPool2dFunction, MaxPool2dFunction, Upsample2dFunction
from nnmpi.ops.rnn import RNNFunction
from nnmpi.ops.soft import Soft
from nnmpi.tensor.elementwise import ActivationFunction, Clip, Extremum, Pointwise, Power, Where
from nnmpi.tensor.function import AsType, Function
from nnmpi.tensor.reduce import Largest, MatMul, Sum, Variance
from nnmpi.tensor.shape import Concatenate, GetItem, Pad, Reshape, Transpose, View

# Others have NumPy's name, with a capital.
POINTWISE = {"subtract": "Sub", "multiply": "Mul", "negative": "Neg", "absolute": "Abs"}
POINTWISE["divide"] = "Div"
# The rows of ONNX's gates among nnmpi's: i, o, f, c of i, f, o, g; and z, r, h of r, z, n.
GATES = {LSTMFunction: ("LSTM", (0, 2, 1, 3)), GRUFunction: ("GRU", (1, 0, 2))}
GATES[RNNFunction] = ("RNN", (0,))
RESIZE = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def refused(g: OnnxGraph, what: str, remedy: str) -> UsageError:
    """Return an error for an operation without a counterpart."""
    return UsageError(f"{what}{g.line} has no counterpart in ONNX; {remedy}")


def _activated(g: OnnxGraph, form: Any, x: GraphValue, slope: float = 0.0) -> GraphValue:
    each = g.each
    match form:
        case None:
            return x
        case Activation.LEAKY_RELU:
            return each("LeakyRelu", x, alpha=slope)
        case Activation.SILU:
            return each("Mul", x, each("Sigmoid", x))
        case Activation.GELU:
            inner = each("Erf", each("Mul", x, 1 / sqrt(2)))
        case Activation.GELU_TANH:
            cubic = each("Mul", each("Mul", each("Mul", x, x), x), 0.044715)
            inner = each("Tanh", each("Mul", each("Add", x, cubic), sqrt(2 / np.pi)))
        case _:
            return each(form.name.capitalize(), x)
    return each("Mul", each("Mul", x, 0.5), each("Add", inner, 1))


def _soft(g: OnnxGraph, f: Soft, y: Array, x: GraphValue) -> GraphValue:
    beta, *more = f.numbers
    if not more:
        return g.each("Elu", x, alpha=beta)
    # the threshold only saves time: beyond it the logarithm is 0
    return g.each("Div", g.each("Softplus", g.each("Mul", x, beta)), beta)


def _centred(g: OnnxGraph, x: GraphValue, axes: Any) -> GraphValue:
    return g.each("Sub", x, g.add("ReduceMean", x, axes=[*axes]))


def _square(g: OnnxGraph, x: GraphValue, axes: Any, keepdims: int = 1) -> Any:
    return g.add("ReduceMean", g.add("Mul", x, x), axes=[*axes], keepdims=keepdims)


def _scaled(g: OnnxGraph, x: GraphValue, axes: Any, eps: float) -> GraphValue:
    """Return x divided by the root of its mean square."""
    return g.each("Div", x, g.add("Sqrt", g.add("Add", _square(g, x, axes), eps)))


def _variance(g: OnnxGraph, f: Variance, y: Array, x: GraphValue) -> GraphValue:
    count, mean = f.count(x.like), _square(g, _centred(g, x, f.axes), f.axes, int(f.keepdims))
    return g.each("Mul", mean, count / (count - f.correction))


def _is_all(part: Any, size: int) -> bool:
    return isinstance(part, slice) and part.indices(size) == (0, size, 1)


def _view(g: OnnxGraph, f: View, y: Array, x: GraphValue) -> GraphValue:
    key, cuts = f._expanded(x.like.ndim), []
    parts = [part for part in key if part is not None]
    for axis, part in enumerate(parts):
        if isinstance(part, int):
            cuts.append((part, part + 1 or END, axis, 1))
        elif not _is_all(part, size := x.like.shape[axis]):
            step, stop = part.step or 1, part.stop
            first, last = (0, END) if step > 0 else (END, -END)
            if stop is None or stop >= size:  # also of x[1 : len(x)], whatever the batch
                stop = last
            cuts.append((first if part.start is None else part.start, stop, axis, step))
    if cuts:
        x = g.add("Slice", x, *map(list, zip(*cuts, strict=True)))
    if gone := [axis for axis, part in enumerate(parts) if isinstance(part, int)]:
        x = g.add("Squeeze", x, gone)
    kept = [part for part in key if not isinstance(part, int)]
    new = [axis for axis, part in enumerate(kept) if part is None]
    return g.add("Unsqueeze", x, new) if new else x


def _get_item(g: OnnxGraph, f: GetItem, y: Array, x: GraphValue) -> Any:
    parts = enumerate(zip(f.key, x.like.shape, strict=False))
    picks = [(axis, np.asarray(part)) for axis, (part, n) in parts if not _is_all(part, n)]
    if len(picks) != 1 or picks[0][1].dtype.kind not in "iu":
        raise refused(g, "an index of booleans or of several arrays", "pick along one axis")
    return g.add("Gather", x, picks[0][1], axis=picks[0][0])


def _linear(
    g: OnnxGraph, f: LinearFunction, y: Array, x: GraphValue, weight: GraphValue, bias: Any
) -> GraphValue:
    across = isinstance(f, TransposedLinearFunction)
    if x.like.ndim == 2:
        x = g.add("Gemm", x, weight, bias, transB=int(across))
    else:
        x = g.add("MatMul", x, g.add("Transpose", weight, perm=[1, 0]) if across else weight)
        x = x if bias is None else g.add("Add", x, bias)
    return _activated(g, f.form, x)


def _windows(over: Any) -> dict[str, Any]:
    kernel, stride, padding, *more = over
    words = {"kernel_shape": [*kernel], "strides": [*stride], "pads": [*padding, *padding]}
    return {**words, "dilations": [*more[0]], "group": more[1]} if more else words


def _conv(
    g: OnnxGraph, f: Conv2dFunction, y: Array, x: GraphValue, weight: GraphValue, bias: Any
) -> GraphValue:
    spec, kernels = f.algorithm.spec, g.form(weight, (3, 2, 0, 1))
    x = g.planes("Conv", x, kernels, bias, **_windows(spec))
    x = g.each("Relu", x) if spec.relu else x
    pool = _windows((spec.pool, spec.pool, (0, 0)))
    return g.planes("MaxPool", x, **pool) if prod(spec.pool) > 1 else x


def _conv_transpose(
    g: OnnxGraph, f: ConvTranspose2dFunction, y: Array, x: GraphValue, weight: GraphValue
) -> GraphValue:
    extra = [
        size - (n - 1) * step + 2 * edge - apart * (kernel - 1) - 1
        for size, n, kernel, step, edge, apart in zip(
            f.size, x.like.shape[1:3], *f.spec[:4], strict=True
        )
    ]
    kernels = g.form(weight, (3, 2, 0, 1))
    return g.planes("ConvTranspose", x, kernels, output_padding=extra, **_windows(f.spec))


def _avg_pool(g: OnnxGraph, f: AvgPool2dFunction, y: Array, x: GraphValue) -> GraphValue:
    if f.over.kernel == x.like.shape[1:3]:
        return g.planes("GlobalAveragePool", x)
    return g.planes("AveragePool", x, count_include_pad=1, **_windows(f.over))


def _reshape(g: OnnxGraph, f: Reshape, y: Array, x: GraphValue) -> Any:
    shape = x.like.shape
    if len(shape) == 4 and shape[1:3] == (1, 1) and y.shape == shape[::3]:
        return GraphValue(
            g.node("Flatten", [g.first(x)]), y
        )  # of one pixel, any layout has this order
    return g.reshape(x, y.shape)


def _concatenate(g: OnnxGraph, f: Concatenate, y: Array, *x: GraphValue) -> Any:
    if y.ndim == 4 and f.axis == 3:
        return g.last(g.node("Concat", map(g.first, x), axis=1), y)
    return g.add("Concat", *x, axis=f.axis)


def _fixed_norm(
    g: OnnxGraph, f: FixedNormFunction, y: Array, x: GraphValue, *others: GraphValue
) -> Any:
    add = g.add if x.like.ndim == 2 else g.planes
    return add("BatchNormalization", x, *others, epsilon=f.settings[0])


def _layer_norm(
    g: OnnxGraph, f: LayerNormFunction, y: Array, x: GraphValue, *parameters: GraphValue
) -> Any:
    eps, axis = f.settings[0], -parameters[0].like.ndim
    if len(parameters) == 2:
        return g.add("LayerNormalization", x, *parameters, axis=axis, epsilon=eps)
    return g.add("Mul", _scaled(g, x, range(axis, 0), eps), *parameters)


def _group_norm(
    g: OnnxGraph,
    f: GroupNormFunction,
    y: Array,
    x: GraphValue,
    scale: GraphValue,
    shift: GraphValue,
) -> Any:
    (eps, width), (n, *_, channels) = f.settings, y.shape
    rows = g.reshape(x, (n, y[0].size // channels, channels // width, width))
    rows = _scaled(g, _centred(g, rows, (1, 3)), (1, 3), eps)
    return g.add("Add", g.add("Mul", g.reshape(rows, y.shape), scale), shift)


def _attend(g: OnnxGraph, f: Any, q: GraphValue, k: GraphValue, v: GraphValue) -> Any:
    """Return softmax(q k^T / sqrt(features)) v.

    Args:
        q, v: (batch, heads, time, features), like such arrays.
        k: (batch, heads, features, time).
    """
    *_, time, features = q.like.shape
    scores = g.add("Mul", g.add("MatMul", q, k), 1 / sqrt(features))
    if f.causal:
        mask = np.where(np.tri(time, dtype=bool), 0, -np.inf).astype(q.like.dtype)
        scores = g.add("Add", scores, mask)
    return g.add("MatMul", g.add("Softmax", scores, axis=-1), v)


def _attention(
    g: OnnxGraph, f: Attention, y: Array, q: GraphValue, k: GraphValue, v: GraphValue
) -> Any:
    return _attend(g, f, q, g.add("Transpose", k, perm=[0, 1, 3, 2]), v)


def _packed_attention(g: OnnxGraph, f: PackedAttention, y: Array, x: GraphValue) -> Any:
    shape = *y.shape[:2], f.heads, y.shape[2] // f.heads
    q, k, v = (g.reshape(part, shape) for part in g.add("Split", x, count=3, axis=2))
    orders = [0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]
    moved = (
        g.add("Transpose", part, perm=perm) for part, perm in zip((q, k, v), orders, strict=True)
    )
    q, *rest = moved
    heads = _attend(g, f, GraphValue(q.name, y.reshape(shape).swapaxes(1, 2)), *rest)
    return g.reshape(g.add("Transpose", heads, perm=orders[0]), y.shape)


def _recurrent(
    g: OnnxGraph,
    f: Any,
    y: Array,
    x: GraphValue,
    weight: GraphValue,
    recurrent: GraphValue,
    bias: GraphValue,
    *more: Any,
) -> Any:
    (*states, table), (op, gates), words = more, GATES[type(f)], dict[str, Any]()
    n, lengths, inner = len(recurrent.like), None, []
    if op == "LSTM":
        lengths, words = states.pop(), {"direction": "reverse" if f.reverse else "forward"}
    elif op == "GRU":
        inner, words = [states.pop(0)], {"linear_before_reset": 1}
    elif f.rectifies:
        words = {"activations": ["Relu"]}
    order = [gate * n + i for gate in gates for i in range(n)]
    x = x if table is None else g.add("Gather", table, x)
    # the bias of the product with h, which only GRU's last gate has
    zeros = np.zeros((len(gates) - len(inner)) * n, bias.like.dtype)
    biases = g.add("Concat", g.form(bias, (), order), zeros, *inner, axis=0)
    rows, *last = g.add(
        op,
        g.add("Transpose", x, perm=[1, 0, 2]),
        *(g.form(w, (1, 0), order, (1, n * len(gates), len(w.like))) for w in (weight, recurrent)),
        g.add("Unsqueeze", biases, [0]),
        None if lengths is None else g.add("Cast", lengths, to=np.dtype(np.int32)),
        *(None if state is None else g.add("Unsqueeze", state, [0]) for state in states),
        count=1 + len(states),
        hidden_size=n,
        **words,
    )
    rows = g.add("Squeeze", rows, [1])
    rows = g.add("Concat", rows, *last, axis=0) if getattr(f, "ends", False) else rows
    return g.add("Transpose", rows, perm=[1, 0, 2])


def _experts(
    g: OnnxGraph, f: Experts, y: Array, x: GraphValue, p: GraphValue, *weights: GraphValue
) -> Any:
    """Compute every expert's result of every row; the gate's choice is a factor of 1 or 0."""
    gate, (w1, b1, w2, b2), experts, add = f.gate, weights, p.like.shape[2], g.add
    b1, b2 = (g.form(b, (), (), (experts, 1, b.like.shape[1])) for b in (b1, b2))
    rows = add("Unsqueeze", x, [1])  # (samples, 1, positions, features)
    inner = _activated(g, Activation.GELU_TANH, add("Add", add("MatMul", rows, w1), b1))
    results = add("Add", add("MatMul", inner, w2), b2)
    chosen = add("TopK", p, [gate.top_k], count=2, axis=2)[1]
    hot = add("OneHot", chosen, [experts], np.array([0, 1], y.dtype), axis=-1)
    taken = add("ReduceSum", hot, [2], keepdims=0)
    if gate.capacity is not None:
        most = ceil(gate.capacity * gate.top_k * y.shape[1] / experts)
        within = add("LessOrEqual", add("CumSum", taken, np.array(1)), most)
        taken = add("Mul", taken, add("Cast", within, to=y.dtype))
    factors = add("Transpose", add("Mul", p, taken), perm=[0, 2, 1])
    return add("ReduceSum", add("Mul", results, add("Unsqueeze", factors, [3])), [1], keepdims=0)


def _reduced(g: OnnxGraph, f: Any, op: str, x: GraphValue) -> Any:
    return g.add(op, x, axes=[*f.axes], keepdims=int(f.keepdims))


ROWS: Mapping[type[Function], Callable[..., Any]] = MappingProxyType(
    {
        ActivationFunction: lambda g, f, y, x: _activated(g, f.form, x, f.slope),
        AsType: lambda g, f, y, x: g.each("Cast", x, to=y.dtype),
        Attention: _attention,
        AvgPool2dFunction: _avg_pool,
        Clip: lambda g, f, y, x: g.add("Clip", x, f.low, f.high),
        Concatenate: _concatenate,
        Conv2dFunction: _conv,
        ConvTranspose2dFunction: _conv_transpose,
        EmbeddingFunction: lambda g, f, y, table, i: g.add("Gather", table, i),
        Experts: _experts,
        Extremum: lambda g, f, y, *x: g.each("Max" if f.largest else "Min", *x),
        FixedNormFunction: _fixed_norm,
        GRUFunction: _recurrent,
        GetItem: _get_item,
        GroupNormFunction: _group_norm,
        LSTMFunction: _recurrent,
        Largest: lambda g, f, y, x: _reduced(g, f, "ReduceMax" if f.largest else "ReduceMin", x),
        LayerNormFunction: _layer_norm,
        LinearFunction: _linear,
        LogSoftmaxFunction: lambda g, f, y, x: g.add("LogSoftmax", x, axis=f.axis),
        MatMul: lambda g, f, y, *x: g.add("MatMul", *x),
        MaxPool2dFunction: lambda g, f, y, x: g.planes("MaxPool", x, **_windows(f.over)),
        PackedAttention: _packed_attention,
        Pad: lambda g, f, y, x: g.add("Pad", x, [*sum(zip(*f.widths, strict=True), ())], f.value),
        Pointwise: lambda g, f, y, *x: g.each(POINTWISE.get(f.name, f.name.capitalize()), *x),
        Power: lambda g, f, y, *x: g.each("Pow", *x),
        RNNFunction: _recurrent,
        Reshape: _reshape,
        Soft: _soft,
        SoftmaxFunction: lambda g, f, y, x: g.add("Softmax", x, axis=f.axis),
        Sum: lambda g, f, y, x: (
            _reduced(g, f, "ReduceMean", x)
            if f.averages
            else g.add("ReduceSum", x, [*f.axes], keepdims=int(f.keepdims))
        ),
        Transpose: lambda g, f, y, x: g.add("Transpose", x, perm=[*f.axes]),
        TransposedLinearFunction: _linear,
        Upsample2dFunction: lambda g, f, y, x: g.planes(
            "Resize", x, None, np.array([1, 1, *f.over.kernel], "f4"), mode="nearest", **RESIZE
        ),
        Variance: _variance,
        View: _view,
        Where: lambda g, f, y, *x: g.each("Where", *x),
    }
)
