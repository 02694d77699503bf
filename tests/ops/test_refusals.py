"""What does not fit an operation is refused in one sentence that names the values."""

import numpy as np
import pytest

from nnmpi import Tensor, nn, ops
from nnmpi.base.errors import DtypeError, GraphError, ShapeError, UsageError

SINGLE = Tensor(np.zeros(3, "float32"))
MASK_KEY = {"mask_key": lambda: ((0, 0), 0)}
IMAGES, KERNEL = (1, 5, 5, 1), (3, 3, 1, 1)
LABELS = [2, 0, 1]
GRU = [(5, 7, 3), (3, 12), (4, 12), (12,), (4,)]
LSTM = [(5, 7, 3), (3, 16), (4, 16), (16,)]

# operation: (inputs, of which a tuple is the shape of a tensor of zeros, error, words, perhaps
# options)
REFUSED = {
    ops.softmax: [
        ([(2, 0)], ShapeError, r"axis -1 of shape \(2, 0\)"),
        ([(2,), 1], ShapeError, "axis 1"),
    ],
    ops.log_softmax: [([()], ShapeError, "axis -1 does not fit an array of 0")],
    ops.gelu: [([(1,), "erf"], UsageError, "'none' or 'tanh', not 'erf'")],
    ops.relu: [([Tensor([True])], DtypeError, "relu needs floating point, not bool")],
    ops.leaky_relu: [([(2,), "a"], DtypeError, "str cannot be combined with a tensor")],
    ops.sigmoid: [([np.ones(2)], GraphError, "sigmoid needs a Tensor, not ndarray")],
    ops.linear: [
        ([(2, 4), (3, 5)], ShapeError, r"\(\.\.\., 3\) .* not \(2, 4\); flatten"),
        ([(), (3, 5)], ShapeError, r"not \(\)"),
        ([(2, 3), (3,)], ShapeError, r"weight of shape \(3,\)"),
        ([(2, 3), (3, 5), (3,)], ShapeError, r"bias has shape \(3,\).* needs \(5,\)"),
        ([(2, 3), (3, 3), SINGLE], DtypeError, "float64, float64, float32"),
    ],
    ops.embedding: [
        ([(3, 2), [0.0]], DtypeError, "integer indices, not float32"),
        ([(3, 2), [[0], [1, 2]]], DtypeError, "in rows of one length"),
        ([(3, 2), [True]], DtypeError, "integer indices, not bool"),
        ([(3,), [0]], ShapeError, r"table .* shape \(3,\)"),
        ([(3, 2), [1, 3, 5]], ShapeError, r"index 3 is outside 0\.\.2"),
        ([(3, 2), [1, -1]], ShapeError, "index -1"),
    ],
    ops.batch_norm: [
        ([(2, 3), (2,), (3,)], ShapeError, r"batch_norm of shape \(2, 3\) .* scale \(2,\)"),
        ([(2, 3), (3,), (1,)], ShapeError, r"shift \(1,\)"),
        ([(), (), ()], ShapeError, r"shape \(\)"),
        ([(2, 0), (0,), (0,)], ShapeError, r"shape \(2, 0\)"),
        ([(2, 3), SINGLE, (3,)], DtypeError, "float64, float32, float64"),
    ],
    ops.layer_norm: [
        ([(2, 3), (2,), (2,)], ShapeError, r"layer_norm of shape \(2, 3\) .* scale \(2,\)"),
        ([(3,), (1, 3), (1, 3)], ShapeError, r"scale \(1, 3\)"),
        ([(3,), (), ()], ShapeError, r"scale \(\)"),
        ([(3,), (3,), (3,)], UsageError, "eps is 'a'", {"eps": "a"}),
        ([(2, 3), (3,), SINGLE], DtypeError, "float64, float64, float32"),
    ],
    ops.conv2d: [
        ([(5, 5, 1), (3, 3, 1, 2)], ShapeError, r"images .* not an array of shape \(5, 5, 1\)"),
        ([IMAGES, (3, 3, 1)], ShapeError, r"weight .* not \(3, 3, 1\)"),
        ([(1, 5, 5, 3), (3, 3, 1, 2)], ShapeError, r"\(\.\., \.\., 3, \.\.\), not \(3, 3, 1, 2\)"),
        ([IMAGES, (3, 3, 1, 2), (3,)], ShapeError, r"bias has shape \(3,\)"),
        ([(1, 2, 5, 1), KERNEL], ShapeError, "3 pixels does not fit a height of 2"),
        ([(1, 9, 4, 1), KERNEL], ShapeError, "5 pixels .* width of 4", {"dilation": 2}),
        (
            [(1, 5, 5, 3), (3, 3, 1, 2)],
            UsageError,
            "groups 2 does not divide 3 input",
            {"groups": 2},
        ),
        ([(1, 5, 5, 2), (3, 3, 1, 3)], UsageError, "2 input and 3 output", {"groups": 2}),
        ([(1, 5, 5, 2), (3, 3, 1, 2)], UsageError, "groups is 'a'; give", {"groups": "a"}),
        ([IMAGES, KERNEL], UsageError, "stride .* at least 1.* not 0", {"stride": 0}),
        ([IMAGES, KERNEL], UsageError, "stride .* not 1.5", {"stride": 1.5}),
        ([IMAGES, KERNEL], UsageError, "padding .* at least 0", {"padding": -1}),
        ([IMAGES, KERNEL], UsageError, "padding .* 'same'", {"padding": "same"}),
        ([IMAGES, KERNEL], UsageError, r"dilation .* \(1, 2, 3\)", {"dilation": (1, 2, 3)}),
        ([IMAGES, (3, 3, 1, 3), SINGLE], DtypeError, "conv2d of float64, float64, float32"),
    ],
    ops.conv_transpose2d: [([IMAGES, KERNEL], UsageError, "groups is 'a'; give", {"groups": "a"})],
    ops.max_pool2d: [
        ([(4, 4, 1), 2], ShapeError, r"images .* not an array of shape \(4, 4, 1\)"),
        (
            [(1, 1, 4, 1), 2],
            ShapeError,
            r"window of \(2, 2\) does not fit the height of images \(1, 1, 4, 1\)",
        ),
        ([(1, 4, 1, 1), 2], ShapeError, "the width"),
        ([IMAGES, 0], UsageError, "kernel_size .* at least 1"),
        ([IMAGES, 2, 0], UsageError, "stride .* at least 1"),
        ([IMAGES, 2, 2, -1], UsageError, "padding .* at least 0"),
        ([IMAGES, [2, 2, 2]], UsageError, r"kernel_size .* \[2, 2, 2\]"),
    ],
    ops.avg_pool2d: [
        (
            [IMAGES, 2, 2, 2],
            UsageError,
            r"padding \(2, 2\) is more than half of its kernel_size \(2, 2\)",
        )
    ],
    ops.attention: [
        ([(2, 3, 12), 0], UsageError, "attention's heads is 0; give"),
        ([(2, 3, 12), 3], ShapeError, r"multiple of 3, not \(2, 3, 12\)"),
        ([(3, 12), 2], ShapeError, r"not \(3, 12\)"),
        ([(2, 3, 0), 2], ShapeError, r"not \(2, 3, 0\)"),
        ([Tensor(np.zeros((2, 3, 12), int)), 2], DtypeError, "int64"),
        (
            [(1, 2, 6), 1],
            UsageError,
            r"in \[0, 1\), with a mask_key and without",
            {"dropout": 1.0, **MASK_KEY},
        ),
        ([(1, 2, 6), 1], UsageError, r"in \[0, 1\), with a mask_key and without", {"dropout": 0.5}),
    ],
    nn.CausalSelfAttention: [
        ([4, 2], UsageError, "dropout's p is 1.5; give a number", {"dropout": 1.5})
    ],
    ops.scaled_dot_product_attention: [
        ([(2, 1, 3, 4), (2, 1, 3, 5), (2, 1, 3, 4)], ShapeError, r"keys \(2, 1, 3, 5\)"),
        ([(2, 1, 3, 4), (2, 1, 0, 4), (2, 1, 0, 4)], ShapeError, "needs keys"),
        ([(2, 1, 3, 4), (2, 1, 5, 4), (2, 1, 4, 4)], ShapeError, "as many values"),
        ([(2, 1, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)], ShapeError, "same batch and heads"),
        (
            [(2, 1, 3, 4), (2, 1, 5, 4), (2, 1, 5, 4)],
            ShapeError,
            "as many queries as keys",
            {"causal": True},
        ),
        (
            [*[(1, 1, 1, 3)] * 2, Tensor(SINGLE.data.reshape(1, 1, 1, 3))],
            DtypeError,
            "float64, float64, float32",
        ),
    ],
    ops.lstm: [
        (LSTM, ShapeError, "needs 5 lengths, not", {"lengths": [1, 2]}),
        (
            LSTM,
            ShapeError,
            r"length 8 of sequence 1 is outside 1\.\.7",
            {"lengths": [1, 8, 0, 1, 1]},
        ),
        (LSTM, DtypeError, "integer lengths", {"lengths": [1.0] * 5}),
        (
            LSTM,
            ShapeError,
            r"\(2, 4\), \(5, 4\); .* 4 features .*\(16,\), \(5, 4\), \(5, 4\)",
            {"state": (np.zeros((2, 4)), np.zeros((5, 4)))},
        ),
        ([LSTM[0], LSTM[2], *LSTM[2:]], ShapeError, r"4 features \(3, 16\)"),
    ],
    ops.gru: [
        ([GRU[0], GRU[2], *GRU[2:]], ShapeError, r"4 features \(3, 12\)"),
        (GRU, ShapeError, r"\(2, 4\); .*\(5, 4\)", {"state": np.zeros((2, 4))}),
        (GRU, DtypeError, "float32", {"state": np.zeros((5, 4), "float32")}),
    ],
    nn.LSTM: [([3, 0], UsageError, "hidden_size is 0")],
    ops.dropout: [
        ([(1,), p], UsageError, f"dropout's p is {p}; give")
        for p in (1.0, 1, 1.5, -0.1, float("nan"))
    ],
    ops.cross_entropy: [
        ([(3, 3), [0, 1]], ShapeError, r"logits \(3, 3\) needs labels of shape \(3,\), not \(2,\)"),
        ([(3, 3), np.eye(3, dtype=int)], ShapeError, r"not \(3, 3\)$"),
        (
            [(2, 3, 4, 4), np.zeros((2, 4, 4), int)],
            ShapeError,
            r"give logits.transpose\(0, 2, 3, 1\)",
        ),
        ([(), []], DtypeError, "integer labels, not float32; .* the loss bce"),
        ([(3, 3), np.eye(3)], DtypeError, "float64; of probabilities y .* ops.log_softmax"),
        ([(), 0], ShapeError, r"logits \(\)"),
        ([(1, 0), [0]], ShapeError, r"logits \(1, 0\)"),
        ([(3, 3), [0, 3, 7]], ShapeError, r"label 3 at row 1 is outside 0\.\.2$"),
        (
            [(3, 3), [0, -100, 2]],
            ShapeError,
            "label -100 .* ignore_index=-100 leaves such rows out$",
        ),
        ([(3, 3), [0, -1, -2]], ShapeError, "label -2 at row 2", {"ignore_index": -1}),
        (
            [(3, 3), LABELS, "average"],
            UsageError,
            "'average' is unknown; choose one of mean, sum, none",
        ),
        ([(3, 3), LABELS], UsageError, "label_smoothing is 1.0; give", {"label_smoothing": 1.0}),
        ([(3, 3), LABELS], UsageError, "'a'; give a whole number$", {"ignore_index": "a"}),
        ([(3, 3), [[0], [1, 2]]], DtypeError, r"in rows of one length, not \[\[0\]"),
    ],
    ops.huber: [([(3,), (3,)], UsageError, "delta is 'a'; give a number", {"delta": "a"})],
    ops.mse: [
        ([(3, 3), (3,)], ShapeError, r"mse of shapes \(3, 3\) and \(3,\)"),
        ([(3,), SINGLE], DtypeError, "mse of float64, float32"),
        ([(3,), (3,), "total"], UsageError, "'total'"),
    ],
    ops.binary_cross_entropy: [([(3,), np.zeros(3, int)], DtypeError, "float64, int64")],
}


LABEL = pytest.mark.host_only(
    "a kernel cannot raise: on a device a label that is no class makes the loss NaN"
)


@pytest.mark.parametrize(
    "function, inputs, error, words, options",
    [
        pytest.param(*[function, *row, {}][:5], marks=LABEL if row[2].startswith("label ") else ())
        for function, rows in REFUSED.items()
        for row in rows
    ],
)
def test_what_does_not_fit(function, inputs, error, words, options):
    with pytest.raises(error, match=words):
        function(
            *(Tensor(np.zeros(item)) if isinstance(item, tuple) else item for item in inputs),
            **options,
        )
