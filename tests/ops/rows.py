"""Further rows of the table for nnmpi.ops: options and shapes, where an operation has many of them.

Each operation's own samples are in its traits, see `tests.tensor.samples`.
"""

from functools import partial

import numpy as np
from hypothesis import strategies as st

import nnmpi.ops.norm as norm
from nnmpi import Tensor, ops
from nnmpi.backend.array import namespace
from nnmpi.ops.loss import REDUCTIONS
from tests.tensor.draws import Case, anywhere, array, arrays, distinct, probabilities, table
from tests.tensor.draws import shape as draw_shape


def along_axis(function):
    """Return a builder for softmax and its kind: any axis with elements, others may be empty."""

    def build(draw):
        before, after = draw_shape(draw, most=1), draw_shape(draw, most=1)
        axis = draw(st.sampled_from((len(before), -len(after) - 1)))
        x = array(draw, anywhere, (*before, draw(st.integers(1, 4)), *after))
        return Case(lambda t: function(t, axis), [x])

    return build


def linear_case(draw):
    """Rows of any leading shape, with and without bias, also no features at all."""
    leading, i, o = draw_shape(draw, most=2), draw(st.integers(0, 3)), draw(st.integers(0, 3))
    shapes = [(*leading, i), (i, o), (o,)]
    return Case(ops.linear, arrays(draw, anywhere, shapes[: draw(st.integers(2, 3))]))


def linear_transposed(draw):
    """The weight's rows are the outputs."""
    leading, i, o = draw_shape(draw, most=2), draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return Case(ops.linear_transposed, arrays(draw, anywhere, [(*leading, i), (o, i)]))


def lstm(draw):
    """Whole sequences and shorter ones, either way round, with and without a first state and the
    last one.
    """
    n, time, i, o = (draw(st.integers(1, most)) for most in (3, 3, 2, 2))
    sizes = [(n, time, i), (i, 4 * o), (o, 4 * o), (4 * o,), (n, o), (n, o)]
    lengths = (
        np.array([draw(st.integers(1, time)) for _ in range(n)]) if draw(st.booleans()) else None
    )
    reverse, ends, begun = (draw(st.booleans()) for _ in range(3))

    def run(x, weight, recurrent, bias, *state):
        return ops.lstm(x, weight, recurrent, bias, state or None, lengths, reverse, ends)

    return Case(run, arrays(draw, anywhere, sizes if begun else sizes[:4]))


def gru(draw):
    """With and without a first state."""
    n, time, i, o = (draw(st.integers(1, most)) for most in (3, 3, 2, 2))
    sizes = [(n, time, i), (i, 3 * o), (o, 3 * o), (3 * o,), (o,), (n, o)]
    return Case(ops.gru, arrays(draw, anywhere, sizes[: draw(st.integers(5, 6))]))


def rnn(draw):
    """With and without a first state; a ReLU away from its kink."""
    n, time, i, o = (draw(st.integers(1, most)) for most in (3, 3, 2, 2))
    sizes = [(n, time, i), (i, o), (o, o), (o,), (n, o)]
    inputs, kind = arrays(draw, anywhere, sizes[: draw(st.integers(4, 5))]), "tanh"
    if draw(st.booleans()):
        kind, inputs = "relu", [abs(item) + 0.1 for item in inputs]
    return Case(lambda *t: ops.rnn(*t[:4], *t[4:] or (None,), kind), inputs)


def conv3d(draw):
    """Every option, different for each axis; also no volume at all."""
    groups, n = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    c, o = (groups * draw(st.integers(1, 2)) for _ in range(2))
    kernel, stride, dilation = ([draw(st.integers(1, 2)) for _ in range(3)] for _ in range(3))
    padding = [draw(st.integers(0, 1)) for _ in range(3)]
    sides = [
        max(1, d * (k - 1) + 1 - 2 * p) + draw(st.integers(0, 2))
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    shapes = [(n, *sides, c), (*kernel, c // groups, o), (o,)]
    inputs = arrays(draw, anywhere, shapes[: draw(st.integers(2, 3))])
    options = (tuple(stride), tuple(padding), tuple(dilation), groups)
    return Case(lambda x, weight, bias=None: ops.conv3d(x, weight, bias, *options), inputs)


def conv2d(draw, alone=False):
    """Every option, different for rows and columns; also no image at all, and borders wider than
    the kernel.
    """
    groups = 3 if alone else draw(st.integers(1, 2))
    c, o = (groups * (1 if alone else draw(st.integers(1, 2))) for _ in range(2))
    n = draw(st.integers(0, 2))
    kernel, stride, dilation = (
        [draw(st.integers(1, most)) for _ in range(2)] for most in (3, 3, 2)
    )
    padding = [draw(st.integers(0, 2)) for _ in range(2)]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    h, w = (
        max(1, r - 2 * p) + draw(st.integers(0, 3)) for r, p in zip(reach, padding, strict=True)
    )
    shapes = [(n, h, w, c), (*kernel, c // groups, o), (o,)]
    inputs = arrays(draw, anywhere, shapes[: draw(st.integers(2, 3))])
    options = (tuple(stride), tuple(padding), tuple(dilation), groups)
    return Case(lambda x, weight, bias=None: ops.conv2d(x, weight, bias, *options), inputs)


def conv_transpose2d(draw):
    """Every option, different for rows and columns; also no image at all."""
    groups = draw(st.integers(1, 2))
    c, o, n = (
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        draw(st.integers(0, 2)),
    )
    kernel, stride, dilation = (
        [draw(st.integers(1, most)) for _ in range(2)] for most in (3, 3, 2)
    )
    extra = [draw(st.integers(0, step - 1)) for step in stride]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding = [draw(st.integers(0, (r - 1) // 2)) for r in reach]
    shapes = [
        (n, draw(st.integers(1, 3)), draw(st.integers(1, 3)), c),
        (*kernel, o // groups, c),
        (o,),
    ]
    inputs = arrays(draw, anywhere, shapes[: draw(st.integers(2, 3))])
    options = (tuple(stride), tuple(padding), tuple(extra), tuple(dilation), groups)
    return Case(
        lambda x, weight, bias=None: ops.conv_transpose2d(x, weight, bias, *options), inputs
    )


def conv_relu_pool(draw):
    """All options, for kernels that are nearly the identity: so no window's largest and no sign
    changes.
    """
    side, channels, images = (
        draw(st.sampled_from((1, 3))),
        draw(st.integers(1, 2)),
        draw(st.integers(0, 2)),
    )
    stride, dilation = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    pool = tuple(draw(st.integers(1, 3)) for _ in range(2))
    h, w = (stride * (item - 1) + 1 + draw(st.integers(0, 3)) for item in pool)
    weight = 1e-3 * array(draw, anywhere, (side, side, channels, channels))
    weight[side // 2, side // 2] += np.eye(channels)
    inputs = [array(draw, distinct, (images, h, w, channels)), weight, np.zeros(channels)]
    options = (stride, dilation * (side // 2), dilation, 1)
    return Case(
        lambda x, weight, bias=None: ops.conv_relu_pool(x, weight, bias, *options, pool), inputs
    )


def pooling(function):
    """Return a builder for pooling with overlapping, separate and gapped windows, and with
    borders.
    """

    def build(draw):
        kernel, stride = ([draw(st.integers(1, 3)) for _ in range(2)] for _ in range(2))
        padding = [draw(st.integers(0, k // 2)) for k in kernel]
        h, w = (
            max(1, k - 2 * p) + draw(st.integers(0, 3))
            for k, p in zip(kernel, padding, strict=True)
        )
        x = array(draw, distinct, (draw(st.integers(0, 2)), h, w, draw(st.integers(1, 2))))
        return Case(lambda t: function(t, tuple(kernel), tuple(stride), tuple(padding)), [x])

    return build


def batch_norm(draw):
    """The batch's own statistics; eps is large, or single rows would be too steep for
    differences.
    """
    leading, channels = draw_shape(draw, least=1, most=2), draw(st.integers(1, 3))
    inputs = arrays(draw, anywhere, [(*leading, channels), (channels,), (channels,)])
    return Case(lambda x, scale, shift: ops.batch_norm(x, scale, shift, 0.1)[0], inputs)


def fixed_norm(draw):
    """By running statistics."""
    leading, channels = draw_shape(draw, least=1, most=2), draw(st.integers(1, 3))
    inputs = arrays(draw, anywhere, [(*leading, channels), (channels,), (channels,)])

    def function(*operands):
        like = next(item.data for item in reversed(operands) if isinstance(item, Tensor))
        ramp = namespace(like).linspace(0.5, 2, channels).astype(like.dtype)
        return norm.fixed_norm(*operands, ramp - 1, ramp, 0.1)

    return Case(function, inputs)


def rms_norm(draw):
    leading, features = draw_shape(draw, most=2), draw_shape(draw, least=1, most=1, side=1)
    inputs = arrays(draw, anywhere, [(*leading, *features), features])
    return Case(lambda x, scale: ops.rms_norm(x, scale, 0.1), inputs)


def layer_norm(draw):
    """One or two feature axes."""
    leading, features = draw_shape(draw, most=2), draw_shape(draw, least=1, most=2, side=1)
    inputs = arrays(draw, anywhere, [(*leading, *features), features, features])
    return Case(lambda x, scale, shift: ops.layer_norm(x, scale, shift, 0.1), inputs)


def group_norm(draw):
    """No, one or two axes of pixels."""
    pixels, groups, count = (draw_shape(draw, most=2), *(draw(st.integers(1, 2)) for _ in range(2)))
    channels = groups * count
    shapes = [(draw(st.integers(0, 3)), *pixels, channels), (channels,), (channels,)]
    return Case(
        lambda x, scale, shift: ops.group_norm(x, scale, shift, groups, 0.1),
        arrays(draw, anywhere, shapes),
    )


def attention(draw):
    """Any number of sequences, positions and heads, also none of the first two; causal or not."""
    heads, features, causal = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.booleans())
    size = (draw(st.integers(0, 2)), draw(st.integers(0, 4)), 3 * heads * features)
    return Case(lambda qkv: ops.attention(qkv, heads, causal), [array(draw, anywhere, size)])


def dropped_attention(draw):
    """The same, with some of the probabilities."""
    size = (draw(st.integers(0, 2)), draw(st.integers(1, 4)), 12)
    causal, rate, key = (
        draw(st.booleans()),
        draw(st.sampled_from([0.1, 0.6])),
        draw(st.integers(0, 9)),
    )
    return Case(
        lambda qkv: ops.attention(qkv, 2, causal, None, rate, lambda: ((key, 7), 3)),
        [array(draw, anywhere, size)],
    )


def scaled_dot_product_attention(draw):
    """Queries and keys of different numbers, values of another width."""
    leading, features, values = (
        (draw(st.integers(0, 2)), draw(st.integers(1, 2))),
        *(draw(st.integers(1, 3)) for _ in range(2)),
    )
    keys, causal = draw(st.integers(1, 4)), draw(st.booleans())
    queries = keys if causal else draw(st.integers(0, 3))
    sizes = [(*leading, queries, features), (*leading, keys, features), (*leading, keys, values)]
    return Case(
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, causal=causal),
        arrays(draw, anywhere, sizes),
    )


def cross_entropy(draw):
    """Every reduction, with smoothing and with labels that are ignored, perhaps all of them."""
    rows_shape, classes = draw_shape(draw, most=2), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    labels, ignore = rng.integers(0, classes, rows_shape), draw(st.sampled_from((None, -1, 0)))
    if ignore == -1:
        labels = np.where(rng.random(rows_shape) < draw(st.sampled_from((0.5, 1.0))), -1, labels)
    options = (draw(st.sampled_from(REDUCTIONS)), ignore, draw(st.sampled_from((0.0, 0.1))))
    weight = draw(st.sampled_from((None, rng.random(classes))))
    return Case(
        lambda x: ops.cross_entropy(x, labels, *options, weight),
        [array(draw, anywhere, (*rows_shape, classes))],
    )


def nll(draw):
    """Every reduction, with weights and labels that are ignored."""
    rows_shape, classes = draw_shape(draw, most=2), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    labels = rng.choice([-100, *range(classes)], rows_shape)
    weight = draw(st.sampled_from((None, rng.random(classes))))
    reduction = draw(st.sampled_from(REDUCTIONS))
    return Case(
        lambda x: ops.nll(x, labels, reduction, weight=weight),
        [array(draw, anywhere, (*rows_shape, classes))],
    )


def error(function, apart=0.0, values=anywhere):
    """Return a builder for a loss of two tensors of one shape; the target is a tensor or an array.

    Args:
        apart: what lies between them at least, for losses whose slope jumps where they are equal.
        values: of the elements.
    """

    def build(draw):
        size, reduction = draw_shape(draw), draw(st.sampled_from(REDUCTIONS))
        x, target = arrays(draw, values, (size, size))
        if apart:
            target = x + np.where(np.signbit(target), -apart, apart) + np.clip(target, -1, 1)
        if draw(st.booleans()):
            return Case(lambda a, b: function(a, b, reduction), [x, target])
        return Case(
            lambda a: function(a, target.astype(getattr(a, "dtype", float)), reduction), [x]
        )

    return build


def dropout_case(draw):
    """A mask that is fixed by its key."""
    x, rate = array(draw, anywhere, draw_shape(draw)), draw(st.sampled_from((0.0, 0.3, 0.9)))
    return Case(lambda t: ops.dropout(t, rate, (1, 2), 3), [x])


def embedding_case(draw):
    """Rows picked any number of times."""
    entries = draw(st.integers(1, 4))
    indices = np.array(draw(st.lists(st.integers(0, entries - 1), max_size=6)), dtype=np.int32)
    if draw(st.booleans()):
        indices = indices.reshape(-1, 1)
    return Case(
        lambda table: ops.embedding(table, indices),
        [array(draw, anywhere, (entries, draw(st.integers(0, 3))))],
    )


OPS = table(
    "ops",
    softmax=along_axis(ops.softmax),
    log_softmax=along_axis(ops.log_softmax),
    linear=linear_case,
    linear_transposed=linear_transposed,
    lstm=lstm,
    gru=gru,
    rnn=rnn,
    conv3d=conv3d,
    conv2d={"any": conv2d, "depthwise": partial(conv2d, alone=True)},
    conv_transpose2d=conv_transpose2d,
    conv_relu_pool=conv_relu_pool,
    max_pool2d=pooling(ops.max_pool2d),
    avg_pool2d=pooling(ops.avg_pool2d),
    batch_norm={"one_rank": batch_norm, "fixed": fixed_norm},
    layer_norm=layer_norm,
    rms_norm=rms_norm,
    group_norm=group_norm,
    attention={"any": attention, "dropped": dropped_attention},
    scaled_dot_product_attention=scaled_dot_product_attention,
    cross_entropy=cross_entropy,
    mse=error(ops.mse),
    mae=error(ops.mae, 3.0),
    huber=error(ops.huber, 3.0),
    binary_cross_entropy=error(ops.binary_cross_entropy),
    nll=nll,
    binary_nll=error(ops.binary_nll, values=probabilities),
    kl_div=error(ops.kl_div, values=probabilities),
    dropout=dropout_case,
    embedding=embedding_case,
)
