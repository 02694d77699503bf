"""One row for each way to call an operation, at sizes that fill no block of threads exactly: what
parity is checked on. The last ones are the samples of the operations' traits, the others what
kernels distinguish.

Values keep away from kinks and ties, and those that must differ are small whole numbers, which
every precision has: so host and device choose the same branch, and what is left is rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from nnmpi import Tensor, nn, ops, tensor
from nnmpi.backend.rotary import Rotary
from tests.tensor.samples import SAMPLES, public_name

ROWS, COLUMNS = 37, 130
DRAW = np.random.default_rng(7)


@dataclass(frozen=True)
class Sample:
    """One call: function(*tensors, *fixed).

    Attributes:
        public: the function that it covers, by module and name.
        way: in which it is called.
        inputs: float64 arrays that get gradients.
        fixed: arrays that get none and keep their dtype, such as labels; on the device when the
            call is there.
        parameters: how many of the inputs, the last ones, are parameters, which are float32 in
            every precision.
        floats: how many of the fixed arrays, the first ones, are floating point and take the
            inputs' dtype.
    """

    public: str
    way: str
    function: Callable[..., Tensor]
    inputs: Sequence[Any]
    fixed: Sequence[Any] = ()
    parameters: int = 0
    floats: int = 0


def anywhere(*sizes, draw=DRAW):
    """Return numbers between -2 and 2."""
    return draw.uniform(-2, 2, sizes)


def positive(*sizes, draw=DRAW):
    """Return numbers between 0.5 and 2."""
    return draw.uniform(0.5, 2, sizes)


def nonzero(*sizes):
    """Return numbers of both signs, at least 0.5 from 0."""
    return positive(*sizes) * DRAW.choice((-1.0, 1.0), sizes)


def images(n, h, w, c):
    """Return images of whole numbers that differ from all their neighbours, none of them 0."""
    places = np.indices((n, h, w, c))
    return ((3 * places[0] + 7 * places[1] + 13 * places[2] + 29 * places[3]) % 251 - 125.5) / 8


def unary(public, function, domain=anywhere, name="plain"):
    """Return the row of a function of one array of any shape."""
    return Sample(public, name, function, [domain(ROWS, COLUMNS)])


def layer(public, name, function, sizes, scale=1.0):
    """Return the row of a function of samples and parameters."""
    inputs = [scale * anywhere(*size) for size in sizes]
    return Sample(public, name, function, inputs, (), len(sizes) - 1)


def dense(public, function, form=""):
    """Return the rows of a linear layer: matrices and stacks of them, with and without bias, away
    from ReLU's kink.
    """

    def row(name, leading, bias):
        signs = DRAW.choice((-1.0, 1.0), 67)
        weight = signs * positive(COLUMNS, 67) / 8
        inputs = [positive(*leading, COLUMNS), weight, *([signs * positive(67)] if bias else [])]
        return Sample(
            public, f"{name}{' bias' * bias}{form}", function, inputs, (), len(inputs) - 1
        )

    ways = {"matrix": (ROWS,), "stack": (3, 11)}
    return [row(name, leading, bias) for name, leading in ways.items() for bias in (True, False)]


def pooling(public, function):
    """Return the rows of a pooling: windows side by side, overlapping, with gaps and with a
    border.
    """
    ways = {
        "two": (2,),
        "overlap": (3, 2, 1),
        "gaps": (2, 3),
        "uneven": ((3, 2), (1, 2), (1, 0)),
        "odd": (2, 2),
    }
    return [
        Sample(
            public,
            name,
            lambda x, way=way: function(x, *way),
            [images(3, 9 if name == "odd" else 8, 11, 7)],
        )
        for name, way in ways.items()
    ]


def attending(heads, time, causal, features=20):
    """Return the row of packed self-attention; cuDNN has heads with a multiple of 8 features."""
    name = f"{time} {'causal' if causal else 'all'}{'' if features % 8 else ' in eights'}"
    return Sample(
        "ops.attention",
        name,
        lambda x: ops.attention(x, heads, causal),
        [anywhere(2, time, 3 * features * heads)],
    )


def turning(features):
    """Return the row of rotary attention, of 6 heads and 2 of keys."""
    rotary = Rotary(tuple(0.8 ** np.arange(features // 2)))
    return Sample(
        "ops.grouped_attention",
        f"{features} features, turned",
        lambda q, k, v: ops.grouped_attention(q, k, v, 6, True, rotary),
        [anywhere(2, 70, count * features) for count in (6, 2, 2)],
    )


def losses():
    """Return the rows of the losses: every reduction, labels that are ignored, smoothing, narrow
    dtypes.
    """
    ways = {
        "plain": (None, 0.0, np.int64),
        "smooth": (None, 0.1, np.int32),
        "ignored": (3, 0.0, np.uint8),
    }
    result = []
    for reduction in ("mean", "sum", "none"):
        for function in (ops.mse, ops.mae, ops.huber, ops.binary_cross_entropy):
            near = partial(function, reduction=reduction)
            target = [positive(ROWS, COLUMNS)]
            result.append(
                Sample(
                    f"ops.{function.__name__}",
                    reduction,
                    near,
                    [anywhere(ROWS, COLUMNS)],
                    target,
                    0,
                    1,
                )
            )
        for name, (ignored, smoothing, dtype) in ways.items():
            labelled = partial(
                ops.cross_entropy,
                reduction=reduction,
                ignore_index=ignored,
                label_smoothing=smoothing,
            )
            labels = [DRAW.integers(0, COLUMNS, ROWS).astype(dtype)]
            result.append(
                Sample(
                    "ops.cross_entropy",
                    f"{reduction} {name}",
                    labelled,
                    [anywhere(ROWS, COLUMNS)],
                    labels,
                )
            )
    return result


def distinct(*sizes):
    """Return numbers that differ from one another, which every precision has."""
    size = prod(sizes)
    return (DRAW.permutation(size).reshape(sizes) - size // 2 + 0.5) / 8


VALUES = {
    "any": anywhere,
    "positive": positive,
    "nonzero": nonzero,
    "distinct": distinct,
    "probability": lambda *sizes: DRAW.uniform(0.1, 0.9, sizes),
}


def of_traits(sample):
    """Return the row of an operation's own sample."""
    values = VALUES[sample.values]
    shapes = ((ROWS, COLUMNS),) if sample.shapes is None else sample.shapes
    return Sample(
        public_name(sample),
        sample.name,
        sample.call,
        [values(*size) for size in shapes],
        sample.arrays,
        sample.parameters,
        sum(x.dtype.kind == "f" for x in sample.arrays),
    )


TABLE = [
    unary("ops.softmax", ops.softmax),
    unary("ops.softmax", lambda x: ops.softmax(x, 0), name="first axis"),
    # kernels give a row to a warp, a block, or several turns of a block; and columns to one or to
    # several blocks
    *(
        Sample("ops.softmax", f"rows of {n}", ops.softmax, [anywhere(3, n)])
        for n in (1, 1033, 9001)
    ),
    *(
        layer("ops.layer_norm", f"rows of {n}", ops.layer_norm, [(rows, n), (n,), (n,)])
        for rows, n in ((3, 1033), (2, 9001), (5000, 3))
    ),
    *(
        Sample(
            "ops.cross_entropy",
            f"of {n}",
            ops.cross_entropy,
            [anywhere(3, n)],
            [np.array([0, n - 1, 1])],
        )
        for n in (1033, 9001)
    ),
    *(
        layer("ops.linear", f"{rows} rows", ops.linear, [(rows, 2), (2, n), (n,)])
        for rows, n in ((5000, 3), (3, 4099))
    ),
    *(
        Sample(
            "tensor.concatenate",
            f"axis {axis}",
            lambda *given, axis=axis: tensor.concatenate(given, axis),
            [
                anywhere(*(n if i == axis else size for i, size in enumerate((3, 5, 16))))
                for n in (1, 24, 7)
            ],
        )
        for axis in range(3)
    ),
    # beside a parameter's float32 in mixed precision, on either side
    layer("tensor.add", "parameter", lambda x, p: (x + p) * (p + x), [(ROWS, 131), (ROWS, 131)]),
    unary("ops.log_softmax", ops.log_softmax),
    unary("ops.log_softmax", lambda x: ops.log_softmax(x, 0), name="first axis"),
    unary("ops.dropout", lambda x: ops.dropout(x, 0.3, (12345, 67890), 5)),
    *dense("ops.linear", ops.linear),
    layer(
        "ops.linear_transposed", "stack", ops.linear_transposed, [(3, 11, COLUMNS), (67, COLUMNS)]
    ),
    layer("ops.lstm", "whole", ops.lstm, [(5, 9, 12), (12, 28), (7, 28), (28,)]),
    layer(
        "ops.lstm",
        "one, from a state",
        lambda *given: ops.lstm(*given[:4], given[4:], reverse=True, ends=True),
        [(1, 3, 5), (5, 264), (66, 264), (264,), (1, 66), (1, 66)],
        1 / 4,
    ),
    layer(
        "ops.lstm",
        "shorter ones backwards",
        lambda *given: ops.lstm(*given, lengths=np.array([9, 4, 1, 7, 9]), reverse=True, ends=True),
        [(5, 9, 12), (12, 28), (7, 28), (28,)],
    ),
    layer("ops.gru", "whole", ops.gru, [(5, 9, 12), (12, 21), (7, 21), (21,), (7,)]),
    layer(
        "ops.gru",
        "one, from a state",
        ops.gru,
        [(1, 3, 5), (5, 198), (66, 198), (198,), (66,), (1, 66)],
        1 / 4,
    ),
    layer(
        "ops.group_norm", "images", partial(ops.group_norm, groups=3), [(5, 6, 7, 12), (12,), (12,)]
    ),
    layer("ops.layer_norm", "one axis", ops.layer_norm, [(ROWS, COLUMNS), (COLUMNS,), (COLUMNS,)]),
    layer("ops.layer_norm", "two axes", ops.layer_norm, [(ROWS, 6, 21), (6, 21), (6, 21)]),
    *(
        layer(
            "ops.group_norm",
            name,
            partial(ops.group_norm, groups=groups),
            [(*size, channels), (channels,), (channels,)],
        )
        for name, groups, size, channels in (
            ("each channel", 7, (3, 5, 11), 7),
            ("all channels", 1, (3, 1500), 40),
            ("rows", 2, (65,), 130),
        )
    ),
    layer("ops.rms_norm", "one axis", ops.rms_norm, [(ROWS, COLUMNS), (COLUMNS,)]),
    *(layer("ops.rms_norm", f"rows of {n}", ops.rms_norm, [(3, n), (n,)]) for n in (2, 1033, 9001)),
    layer(
        "ops.batch_norm",
        "rows",
        lambda *x: ops.batch_norm(*x)[0],
        [(ROWS, COLUMNS), (COLUMNS,), (COLUMNS,)],
    ),
    layer(
        "ops.batch_norm", "images", lambda *x: ops.batch_norm(*x)[0], [(5, 7, 9, 20), (20,), (20,)]
    ),
    # of one block and of several, in packs and one by one, and of one channel
    *(
        layer(
            "ops.batch_norm",
            f"{rows} rows of {n}",
            lambda *x: ops.batch_norm(*x)[0],
            [(rows, n), (n,), (n,)],
        )
        for rows, n in ((5003, 1), (2003, 16), (1501, 9), (3, 4099))
    ),
    layer(
        "ops.conv_transpose2d",
        "every option",
        lambda *given: ops.conv_transpose2d(*given, (2, 3), (1, 0), (1, 2), (1, 2), 2),
        [(3, 5, 4, 6), (3, 2, 4, 6), (8,)],
    ),
    *pooling("ops.max_pool2d", ops.max_pool2d),
    *pooling("ops.avg_pool2d", ops.avg_pool2d),
    *(
        Sample(f"nn.{type(layer).__name__}", f"{n} channels", layer, [images(3, 9, 11, n)])
        for n in (7, 16)
        for layer in (nn.GlobalAvgPool2d(), nn.AdaptiveAvgPool2d((3, 1)), nn.Upsample((2, 3)))
    ),
    *(attending(3, time, causal) for time in (1, 33, 150) for causal in (False, True)),
    *(attending(3, time, causal, 24) for time in (2, 150) for causal in (False, True)),
    *(turning(features) for features in (16, 20)),  # cuDNN has heads with a multiple of 8
    Sample(
        "ops.scaled_dot_product_attention",
        "crossed in eights",
        ops.scaled_dot_product_attention,
        [anywhere(2, 3, 9, 16), anywhere(2, 3, 70, 16), anywhere(2, 3, 70, 16)],
    ),
    Sample(
        "ops.scaled_dot_product_attention",  # of fewer queries than keys, values of another width
        "crossed",
        ops.scaled_dot_product_attention,
        [anywhere(2, 3, 9, 20), anywhere(2, 3, 70, 20), anywhere(2, 3, 70, 33)],
    ),
    *losses(),
    Sample(
        "ops.embedding",
        "many",
        ops.embedding,
        [anywhere(40, 33)],
        [DRAW.integers(0, 40, (7, 90))],
        1,
    ),
    Sample(
        "ops.embedding",
        "narrow",
        ops.embedding,
        [anywhere(40, 33)],
        [DRAW.integers(0, 40, 90).astype(np.uint8)],
        1,
    ),
    # last, so that one more of them leaves the numbers of the others as they are
    *(of_traits(sample) for _, sample in SAMPLES),
]
