"""The layers: what they compute in training and in evaluation, and what they refuse when they are
made.
"""

import contextlib
import inspect
import sys
import warnings

import numpy as np
import pytest

import nnmpi.nn
from nnmpi import models, nn, ops
from nnmpi.backend.activations import FORMS
from nnmpi.backend.random import key_pair
from nnmpi.base.errors import NnmpiError, ShapeError, UsageError
from nnmpi.nn import Reach
from nnmpi.nn import mode as mode_module
from nnmpi.nn.activation import ACTIVATIONS
from nnmpi.nn.container import runs
from nnmpi.nn.mode import Mode, current
from nnmpi.nn.module import own_reach
from nnmpi.tensor.tensor import Tensor, concatenate, maximum, stack
from tests.nn.test_experts import by_hand

IMAGES = np.random.default_rng(0).standard_normal((2, 6, 6, 4)).astype("float32")
VOLUMES = np.random.default_rng(0).standard_normal((2, 3, 4, 4, 2)).astype("float32")
ROWS = np.random.default_rng(1).standard_normal((5, 4)).astype("float32")
SEQUENCES = np.random.default_rng(2).standard_normal((2, 5, 4)).astype("float32")


def of_name(name):
    """Return the operation of an activation's name."""
    return getattr(ops, name.replace("-", "_"))


def both_ways(lstm, x):
    """Compute a bidirectional LSTM step by step, by its formulas."""
    x = x.data
    for pair in (lstm.layers[:2], lstm.layers[2:]):
        result = []
        for item in pair:
            h, c, times = 0.0, 0.0, range(x.shape[1])
            result.append(np.empty((*x.shape[:2], item.recurrent.shape[0])))
            for t in reversed(times) if item.reverse else times:
                gates = (
                    x[:, t] @ item.weight.data
                    + h * np.ones((1, 3)) @ item.recurrent.data
                    + item.bias.data
                )
                *opened, new = np.split(gates, 4, axis=1)
                inwards, saved, outwards = (1 / (1 + np.exp(-gate)) for gate in opened)
                c = saved * c + inwards * np.tanh(new)
                h = result[-1][:, t] = outwards * np.tanh(c)
        x = np.concatenate(result, 2)
    return Tensor(x)


def in_two_calls(m, x):
    """Compute a GRU's first steps, and the others from the state that they end in."""
    first, state = m.with_state(x[:, :2])
    return concatenate([first, m.with_state(x[:, 2:], state)[0]], 1)


def gru(layers, x):
    """Compute a GRU step by step, by its formulas."""
    x = x.data
    for layer in layers.layers:
        h, result = np.zeros((len(x), 3)), []
        for t in range(x.shape[1]):
            local, product = x[:, t] @ layer.weight.data + layer.bias.data, h @ layer.recurrent.data
            r, z = (
                1 / (1 + np.exp(-a - b))
                for a, b in zip(*(np.split(g[:, :6], 2, 1) for g in (local, product)), strict=True)
            )
            h = (1 - z) * np.tanh(local[:, 6:] + r * (product[:, 6:] + layer.bias_n.data)) + z * h
            result.append(h)
        x = np.stack(result, 1)
    return Tensor(x)


class First(nn.Module):
    """The first of the results of a layer."""

    def __init__(self, layer):
        self.layer = layer

    def forward(self, x):
        """Return it."""
        return self.layer(x)[0]


def grouped(x):
    """Normalize over the second and the last axis."""
    return (x - x.mean((1, 3), keepdims=True)) / (x.var((1, 3), keepdims=True) + 1e-5).sqrt()


LAYERS = {
    "MixtureOfExperts": (
        lambda: nn.MixtureOfExperts(4, 5, 2, 3),
        np.arange(48, dtype="float32").reshape(2, 6, 4) % 7 - 3,
        lambda m, x: Tensor(by_hand(m, x.data, 2, None)),
    ),
    "Linear": (lambda: nn.Linear(4, 3), ROWS, lambda m, x: ops.linear(x, m.weight, m.bias)),
    "Conv2d": (
        lambda: nn.Conv2d(4, 6, (3, 2), 2, (1, 0), 1, 2),
        IMAGES,
        lambda m, x: ops.conv2d(x, m.weight, m.bias, 2, (1, 0), 1, 2),
    ),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 2, 1), IMAGES, lambda m, x: ops.max_pool2d(x, 3, 2, 1)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGES, lambda m, x: ops.avg_pool2d(x, 2)),
    "GlobalAvgPool2d": (nn.GlobalAvgPool2d, IMAGES, lambda m, x: x.mean((1, 2))),
    "LayerNorm": (lambda: nn.LayerNorm(4), ROWS, lambda m, x: ops.layer_norm(x, m.weight, m.bias)),
    "CausalSelfAttention": (
        lambda: nn.CausalSelfAttention(4, 2),
        SEQUENCES,
        lambda m, x: m.proj(ops.attention(m.qkv(x), 2, causal=True)),
    ),
    "RotaryAttention": (
        lambda: nn.RotaryAttention(4, 2, 1),
        SEQUENCES,
        lambda m, x: m.proj(ops.grouped_attention(m.q(x), m.k(x), m.v(x), 2, rotary=m.rotary)),
    ),
    "SwiGLU": (
        lambda: nn.SwiGLU(4, 5),
        SEQUENCES,
        lambda m, x: m.down(ops.silu(m.gate(x)) * m.up(x)),
    ),
    "LlamaBlock": (
        lambda: nn.LlamaBlock(nn.RotaryAttention(4, 2, 1), nn.SwiGLU(4, 5)),
        SEQUENCES,
        lambda m, x: (y := x + m.attention(m.norm1(x))) + m.mlp(m.norm2(y)),
    ),
    "LoRA": (  # whose second factor begins at 0
        lambda: nn.LoRA(nn.Linear(4, 3), 2),
        ROWS,
        lambda m, x: ops.linear(x, m.weight, m.bias),
    ),
    "TransformerBlock": (
        lambda: nn.TransformerBlock(4, 2, 6, bias=False),
        SEQUENCES,
        lambda m, x: (
            (y := x + m.attention(m.norm1(x))) + m.mlp[2](ops.gelu(m.mlp[0](m.norm2(y)), "tanh"))
        ),
    ),
    "LayerNorm of two": (
        lambda: nn.LayerNorm((6, 4), 0.1),
        IMAGES,
        lambda m, x: ops.layer_norm(x, m.weight, m.bias, 0.1),
    ),
    # each activation that has a name, with the defaults of the operation of that name
    **{
        kind.__name__: (kind, ROWS, lambda m, x, name=name: of_name(name)(x))
        for name, kind in ACTIVATIONS.items()
    },
    "LeakyReLU slope": (lambda: nn.LeakyReLU(0.2), ROWS, lambda m, x: ops.leaky_relu(x, 0.2)),
    "GELU tanh": (lambda: nn.GELU("tanh"), ROWS, lambda m, x: ops.gelu(x, "tanh")),
    "PReLU": (nn.PReLU, IMAGES, lambda m, x: ops.leaky_relu(x, 0.25)),
    "PReLU channels": (lambda: nn.PReLU(4, -0.5), IMAGES, lambda m, x: ops.leaky_relu(x, -0.5)),
    "Softmax": (lambda: nn.Softmax(0), ROWS, lambda m, x: ops.softmax(x, 0)),
    "LogSoftmax": (lambda: nn.LogSoftmax(0), ROWS, lambda m, x: ops.log_softmax(x, 0)),
    "Flatten": (nn.Flatten, IMAGES, lambda m, x: x.reshape(2, 144)),
    "Embedding": (
        lambda: nn.Embedding(7, 3),
        np.array([[0, 6], [3, 3]]),
        lambda m, x: ops.embedding(m.weight, x),
    ),
    "LSTM": (
        lambda: nn.LSTM(4, 3),
        SEQUENCES,
        lambda m, x: ops.lstm(x, m.layers[0].weight, m.layers[0].recurrent, m.layers[0].bias),
    ),
    "LSTM both ways": (lambda: nn.LSTM(4, 3, 2, bidirectional=True), SEQUENCES, both_ways),
    "GRU": (lambda: nn.GRU(4, 3, 2), SEQUENCES, gru),
    "GRU that goes on": (lambda: nn.GRU(4, 3, 2), SEQUENCES, in_two_calls),
    "RNN": (
        lambda: nn.RNN(4, 3, nonlinearity="relu"),
        SEQUENCES,
        lambda m, x: ops.rnn(x, *m.parameters(), nonlinearity="relu"),
    ),
    "RNNCell": (lambda: nn.RNNCell(4, 3), ROWS, lambda m, x: (x @ m.weight + m.bias).tanh()),
    "GRUCell": (
        lambda: nn.GRUCell(4, 3),
        ROWS,
        lambda m, x: ops.gru(x[:, None], *m.parameters())[:, 0],
    ),
    "LSTMCell": (
        lambda: First(nn.LSTMCell(4, 3)),
        ROWS,
        lambda m, x: ops.lstm(x[:, None], *m.parameters())[:, 0],
    ),
    "ELU alpha": (lambda: nn.ELU(0.5), ROWS, lambda m, x: ops.elu(x, 0.5)),
    "Softplus beta": (lambda: nn.Softplus(2, 1), ROWS, lambda m, x: ops.softplus(x, 2, 1)),
    "Conv3d": (
        lambda: nn.Conv3d(4, 6, (1, 3, 2), 2, (0, 1, 0), 1, 2),
        IMAGES[:, None],
        lambda m, x: ops.conv2d(x[:, 0], m.weight[0], m.bias, 2, (1, 0), 1, 2)[:, None],
    ),
    "MaxPool1d": (
        lambda: nn.MaxPool1d(3, 1),
        SEQUENCES,
        lambda m, x: maximum(maximum(x[:, :-2], x[:, 1:-1]), x[:, 2:]),
    ),
    "AvgPool1d": (
        lambda: nn.AvgPool1d(2, padding=1),
        SEQUENCES,
        lambda m, x: x.pad(((0, 0), (1, 0), (0, 0))).reshape(2, 3, 2, 4).mean(2),
    ),
    "InstanceNorm": (
        lambda: nn.InstanceNorm(4),
        IMAGES,
        lambda m, x: grouped(x.reshape(2, 36, 4, 1)).reshape(2, 6, 6, 4),
    ),
    "Conv2d of the same size": (
        lambda: nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(2, 1)),
        IMAGES,
        lambda m, x: ops.conv2d(x, m.weight, m.bias, 1, (2, 2), (2, 1)),
    ),
    "Conv1d of the same size": (
        lambda: nn.Conv1d(4, 6, 4, padding="same"),
        SEQUENCES,
        lambda m, x: ops.conv2d(x.pad(((0, 0), (1, 2), (0, 0)))[:, None], m.weight, m.bias)[:, 0],
    ),
    "Conv2d of the same size, even": (
        lambda: nn.Conv2d(4, 6, (2, 4), padding="same", dilation=(3, 1)),
        IMAGES,
        lambda m, x: ops.conv2d(
            x.pad(((0, 0), (1, 2), (1, 2), (0, 0))), m.weight, m.bias, 1, 0, (3, 1)
        ),
    ),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), 2, (1, 0), (1, 0), 2),
        IMAGES,
        lambda m, x: ops.conv_transpose2d(x, m.weight, m.bias, 2, (1, 0), (1, 0), 1, 2),
    ),
    "Conv1d": (
        lambda: nn.Conv1d(4, 6, 3, 2, 1, groups=2),
        SEQUENCES,
        lambda m, x: ops.conv2d(
            x.reshape(2, 5, 1, 4), m.weight.transpose((1, 0, 2, 3)), m.bias, (2, 1), (1, 0), 1, 2
        ).reshape(2, 3, 6),
    ),
    "AdaptiveAvgPool2d": (
        lambda: nn.AdaptiveAvgPool2d((4, 3)),
        IMAGES,
        lambda m, x: stack(
            [
                stack([x[:, i : i + 2, 2 * j : 2 * j + 2].mean((1, 2)) for j in range(3)], 1)
                for i in (0, 1, 3, 4)
            ],
            1,
        ),
    ),
    "AdaptiveMaxPool2d": (
        lambda: nn.AdaptiveMaxPool2d((4, 3)),
        IMAGES,
        lambda m, x: stack(
            [
                stack([x[:, i : i + 2, 2 * j : 2 * j + 2].max((1, 2)) for j in range(3)], 1)
                for i in (0, 1, 3, 4)
            ],
            1,
        ),
    ),
    "MaxPool3d": (
        lambda: nn.MaxPool3d(2, (1, 2, 2)),
        VOLUMES,
        lambda m, x: stack(
            [ops.max_pool2d(maximum(x[:, i], x[:, i + 1]), 2) for i in range(x.shape[1] - 1)], 1
        ),
    ),
    "AvgPool3d": (
        lambda: nn.AvgPool3d(2, (1, 2, 2)),
        VOLUMES,
        lambda m, x: stack(
            [ops.avg_pool2d((x[:, i] + x[:, i + 1]) / 2, 2) for i in range(x.shape[1] - 1)], 1
        ),
    ),
    "Upsample": (
        lambda: nn.Upsample((2, 3)),
        IMAGES,
        lambda m, x: Tensor(x.data.repeat(2, axis=1).repeat(3, axis=2)),
    ),
    "Dropout2d": (lambda: nn.Dropout2d(0.5), IMAGES, lambda m, x: x),
    "RMSNorm": (
        lambda: nn.RMSNorm(4),
        ROWS,
        lambda m, x: Tensor(x.data / np.sqrt((x.data**2).mean(1, keepdims=True) + 1e-6)),
    ),
    "GroupNorm": (
        lambda: nn.GroupNorm(2, 4),
        IMAGES,
        lambda m, x: grouped(x.reshape(2, 36, 2, 2)).reshape(2, 6, 6, 4),
    ),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(4, 2),
        SEQUENCES,
        lambda m, x: m.proj(ops.attention(m.qkv(x), 2)),
    ),
    "TiedLinear": (
        lambda: nn.TiedLinear(nn.Embedding(7, 4)),
        SEQUENCES,
        lambda m, x: x @ m.weight.transpose((1, 0)),
    ),
    "Dropout": (lambda: nn.Dropout(0.5), ROWS, lambda m, x: x),
    "BatchNorm": (
        lambda: nn.BatchNorm(4),
        ROWS,
        lambda m, x: x * Tensor(np.float32(1 / np.sqrt(1 + 1e-5))),
    ),
    "Sequential": (
        lambda: nn.Sequential(nn.ReLU(), nn.Tanh()),
        ROWS,
        lambda m, x: ops.relu(x).tanh(),
    ),
    "Residual": (lambda: nn.Residual(nn.Tanh()), ROWS, lambda m, x: ops.relu(x.tanh() + x)),
    "Branches": (
        lambda: nn.Branches(nn.Tanh(), nn.ReLU(), join="add"),
        ROWS,
        lambda m, x: x.tanh() + ops.relu(x),
    ),
}

NO_LAYERS = {
    "Reach",
    "Module",
    "Buffer",
    "Constant",
    "Normal",
    "Uniform",
    "Stash",
    "Pop",
    "Sharding",
    "Units",
    "RotaryScaling",
}
NO_LAYERS |= {"Parameter", "list"}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_operation(name):
    """With its own parameters and options, outside of training; float32 stays float32."""
    make, x, expected = LAYERS[name]
    layer = make().initialize(seed=1)
    y = layer(x)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y.data, expected(layer, Tensor(x)).data, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LAYERS)
def test_the_shape_after_a_layer_is_its_results(name):
    """Or unknown; a layer that says what it needs of its input knows it."""
    make, x, _ = LAYERS[name]
    layer = make().initialize(seed=1)
    shape = layer.shape_after(x.shape[1:])
    assert shape == layer(x).shape[1:] or (shape is None and own_reach(layer) is None)


# with parameters, of which a rank has a part or all: see tests/parallel/sharded
FOLLOWING = [
    name
    for name, (make, *_) in LAYERS.items()
    if own_reach(make()) in (Reach.ELEMENT, Reach.CHANNEL)
    and not make().entries()
    and name != "Flatten"
]


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_part_of_the_channels_is_computed_alone(name):
    """As a layer's class says: of each element also a part of the rows of an image."""
    make, x, _ = LAYERS[name]
    layer = make().initialize(seed=1)
    np.testing.assert_array_equal(layer(x[..., :2]).data, layer(x).data[..., :2])
    if own_reach(layer) is Reach.ELEMENT:
        np.testing.assert_array_equal(layer(x[::2]).data, layer(x).data[::2])


class Ported(nn.Module):
    """As docs/pytorch.md writes it: what a row becomes is left to be found out."""

    def __init__(self):
        self.conv, self.out = nn.Conv2d(4, 2, 3), nn.Linear(32, 3)

    def forward(self, x):
        """Return logits."""
        return self.out(self.conv(x).view(len(x), -1))


MODELS = {
    "mlp": (lambda: models.mlp((6, 6, 4), 3), IMAGES),
    "cnn": (lambda: models.cnn((8, 8, 1), 3), np.zeros((2, 8, 8, 1), "float32")),
    "resnet": (lambda: models.resnet((8, 8, 3), 3), np.zeros((2, 8, 8, 3), "float32")),
    "lstm": (lambda: models.lstm(11, 8, 1), np.zeros((2, 5), int)),
    "gpt": (lambda: models.gpt(11, 5, 8, 2, 1), np.zeros((2, 5), int)),
    "ported": (Ported, IMAGES),
}


# which goes along the rows above
@pytest.mark.parametrize("name", sorted({*LAYERS, *MODELS} - {"Softmax", "LogSoftmax"}))
def test_a_rank_without_rows(name):
    """Forward and backward give what some rows would, but for their number; no gradient comes of
    it.
    """
    make, x, *_ = {**LAYERS, **MODELS}[name]
    layer = make().initialize(seed=1)
    shapes = []
    for rows in (2, 0):
        layer.zero_grad()
        with nn.training():
            y = layer(x[:rows])
            if y.requires_grad:
                y.sum().backward()
        shapes.append(y.shape)
    assert shapes[1] == (0, *shapes[0][1:])
    assert not any(grad.any() for grad in layer.storage.grads)


def test_one_value_per_channel_is_refused_by_batch_normalization():
    """In training; the running statistics stay as they were."""
    layer = nn.BatchNorm(4).initialize()
    with nn.training(), pytest.raises(ShapeError, match="one value per channel"):
        layer(ROWS[:1])
    assert not layer.running_mean.data.any()
    with nn.training():
        layer(IMAGES[:1])
    assert layer(ROWS[:1]).shape == (1, 4)


def test_every_layer_is_here():
    """A new one without a test fails; losses, which take two inputs, are in
    test_pytorch_script.py.
    """
    classes = {
        result.__name__
        for name in nnmpi.nn.__all__
        if inspect.isclass(result := getattr(nnmpi.nn, name))
    }
    assert {name for name in classes if not name.endswith("Loss")} - NO_LAYERS == {
        name.split()[0] for name in LAYERS
    }


def test_every_activation_is_a_layer_and_an_operation():
    """One that a row of the backend has alone would be no --activation, without a word."""
    forms = [form for form in FORMS if " " not in form.name]  # "gelu tanh" is a form of GELU
    assert forms == [
        form for form in FORMS if form in {kind._form for kind in ACTIVATIONS.values()}
    ]
    assert {form.name for form in forms} <= {*ops.__all__}
    # else tensor parallelism gathers its inputs
    assert {own_reach(kind()) for kind in ACTIVATIONS.values()} == {Reach.ELEMENT}
    # else tensor parallelism would gather its input, since a subclass may compute something else
    assert {own_reach(kind()) for kind in ACTIVATIONS.values()} == {Reach.ELEMENT}


# ---------------------------------------------------------------- modes
@pytest.mark.parametrize("line", range(12))
def test_ctrl_c_at_the_end_of_a_block_does_not_leave_training_on(line):
    """At each line that Python executes when the block ends."""
    lines = []

    def interrupt(frame, event, argument):
        code = frame.f_code
        if code.co_filename != mode_module.__file__ or code.co_name not in ("__exit__", "_leave"):
            return None
        if event == "line" and frame.f_lineno > code.co_firstlineno + 1:  # it has begun to end
            lines.append(frame.f_lineno)
            if len(lines) == line + 1:
                sys.settrace(None)
                raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    try:
        with nn.training():
            sys.settrace(interrupt)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    assert current() == Mode()


def test_the_mode():
    """Evaluation outside; blocks nest and end."""
    assert current() == Mode()
    with nn.training(seed=1, step=2, first_row=3):
        assert current() == Mode(True, 1, 2, 3, dropped=set())
        with nn.evaluation():
            assert current() == Mode(False, 1, 2, 3, dropped=set())
            with nn.training(5):
                assert current() == Mode(True, 5, dropped=set())
        assert current().training
    assert not current().training


def test_dropout_of_channels_drops_all_pixels_of_a_sample_s_channel():
    layer = nn.Dropout2d(0.5).initialize()
    with nn.training():
        saved = layer(np.ones((64, 3, 2, 4), "float32")).data.sum((1, 2)) / 6
    assert {*np.unique(saved)} == {0.0, 2.0} and 0.3 < (saved > 0).mean() < 0.7


def test_dropout_drops_in_training_only():
    """By the key of run, step, layer and row."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.0)).initialize()
    x = np.ones((40, 30), np.float32)
    np.testing.assert_array_equal(model(x).data, x)
    with nn.training(seed=4, step=9, first_row=7):
        y = model[0](x)
        expected = ops.dropout(Tensor(x), 0.5, key_pair("dropout", 4, 9, "0"), 7)
        np.testing.assert_array_equal(y.data, expected.data)
        assert not np.array_equal(model[1](x).data, y.data)
        np.testing.assert_array_equal(model[2](x).data, x)
        with nn.evaluation():
            np.testing.assert_array_equal(model(x).data, x)
    for other in ({"seed": 5, "step": 9}, {"seed": 4, "step": 10}):
        with nn.training(**other, first_row=7):
            assert not np.array_equal(model[0](x).data, y.data)
    with nn.training(seed=4, step=9, first_row=17):
        np.testing.assert_array_equal(model[0](x[10:]).data, y.data[10:])


# ---------------------------------------------------------------- batch normalization
def test_running_statistics():
    """They move by the momentum, with the unbiased variance, in training only, and are used in
    evaluation only.
    """
    layer = nn.BatchNorm(4, momentum=0.25).initialize(dtype="float64")
    x = np.random.default_rng(0).standard_normal((2, 3, 4)) * 2 + 1
    layer.weight.data[...], layer.bias.data[...] = weight, bias = np.arange(1.0, 9).reshape(2, 4)
    layer(x)
    np.testing.assert_array_equal(layer.running_mean.data, np.zeros(4))
    with nn.training():
        trained = layer(x)
    flat = x.reshape(-1, 4)
    np.testing.assert_allclose(layer.running_mean.data, 0.25 * flat.mean(0))
    np.testing.assert_allclose(layer.running_variance.data, 0.75 + 0.25 * flat.var(0, ddof=1))
    mean, variance = layer.running_mean.data.copy(), layer.running_variance.data.copy()
    scaled = (x - mean) / np.sqrt(variance + 1e-5)
    np.testing.assert_allclose(layer(x).data, scaled * weight + bias)
    scaled = (x - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5)
    np.testing.assert_allclose(trained.data, scaled * weight + bias)
    np.testing.assert_array_equal(layer.running_mean.data, mean)


@pytest.mark.parametrize("shape", [(2, 1), (4, 4, 3)])
def test_other_channels_are_refused(shape):
    """Also in evaluation, where broadcasting would hide them."""
    layer = nn.BatchNorm(4).initialize()
    with pytest.raises(ShapeError, match="4 channels does not fit"):
        layer(np.ones(shape, np.float32))
    with nn.training(), pytest.raises(ShapeError, match="4 channels"):
        layer(np.ones(shape, np.float32))


# What is computed as one, and what is not.


class Doubled(nn.Conv2d):
    """A layer that computes something else than its class."""

    def forward(self, x):
        return 2 * super().forward(x)


class Entered(nn.Conv2d):
    """One that changes its input alone."""

    def product_input(self, x):
        return 3 * x


@pytest.mark.parametrize(
    "layers, calls",
    [
        ([nn.Linear(2, 2), nn.ReLU()], 2),
        ([nn.Conv2d(1, 1, 3), nn.ReLU(), nn.MaxPool2d(2, 2)], 1),
        ([nn.Conv2d(1, 1, 3), nn.ReLU(), nn.MaxPool2d(2, 1)], 3),
        ([nn.Conv2d(1, 1, 3), nn.ReLU(), nn.MaxPool2d(2, 2, 1)], 3),
        ([nn.Conv2d(1, 1, 3), nn.MaxPool2d(2)], 2),
    ],
)
def test_runs_of_layers(layers, calls):
    assert len([*runs(layers)]) == calls


@pytest.mark.parametrize("kind", [nn.Conv2d, Doubled, Entered])
def test_a_subclass_computes_what_it_says(kind):
    """In a run, or one by one, as for an observer."""
    model = nn.Sequential(kind(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)).initialize(seed=2)
    x = Tensor(np.random.default_rng(0).standard_normal((5, 6, 6, 3)).astype("float32"))
    together = model(x).data
    with nn.observed(lambda *_: None):
        np.testing.assert_allclose(model(x).data, together, rtol=1e-5, atol=1e-6)


REFUSED = {
    "GroupNorm of other channels": lambda: nn.GroupNorm(1, 1).initialize()(IMAGES),
    "RMSNorm of other features": lambda: nn.RMSNorm(1).initialize()(ROWS),
    "AdaptiveAvgPool2d of a row": lambda: nn.AdaptiveAvgPool2d(2)(ROWS),
    "AdaptiveAvgPool2d of no pixels": lambda: nn.AdaptiveAvgPool2d(2)(IMAGES[:, :0]),
    "AdaptiveAvgPool2d of bytes": lambda: nn.AdaptiveAvgPool2d(2)(IMAGES.astype("uint8")),
    "Upsample of a row": lambda: nn.Upsample(2)(ROWS),
    "Dropout2d of numbers": lambda: nn.Dropout2d(0.5)(ROWS[0]),
    "GRU in another state": lambda: (
        nn.GRU(4, 3).initialize().with_state(SEQUENCES, np.zeros((2, 2, 3), "float32"))
    ),
    "GRU with a dropout of 2": lambda: nn.GRU(4, 3, dropout=2),
    "GroupNorm with an eps of 0": lambda: nn.GroupNorm(2, 4, eps=0),
    "groups that do not divide": lambda: nn.ConvTranspose2d(3, 4, 2, groups=2),
    "output_padding as large as the stride": lambda: nn.ConvTranspose2d(
        4, 4, 2, output_padding=(1, 0)
    ).initialize()(IMAGES),
    "output_padding across as large": lambda: nn.ConvTranspose2d(
        4, 4, 2, output_padding=(0, 1)
    ).initialize()(IMAGES),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layer_cannot_do_is_refused_in_a_sentence(name):
    with pytest.raises(NnmpiError, match="give|needs|fit|not|take"):
        REFUSED[name]()


class Extreme(nn.Module):
    def __init__(self, which):
        self.which = which

    def forward(self, x):
        return getattr(x, self.which)(axis=1)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("gradients", [True, False])
def test_results_that_are_a_tuple_in_pytorch_are_not_unpacked_by_rows(rows, gradients):
    """`out, _ = lstm(x)` would take two sequences apart."""
    x = np.ones((rows, 5, 4), "float32")
    for layer, remedy in (
        (nn.LSTM(4, 3, bidirectional=True), r"call h, \(last, c\) = lstm.with_state\(x\)"),
        (nn.GRU(4, 3), r"call h, last = gru.with_state\(x\)"),
        (type("Mine", (nn.RNN,), {})(4, 3), r"RNN returns .*call h, last = rnn.with_state\(x\)"),
        (nn.MultiheadAttention(4, 2), r"write h = attention\(x\)"),
        (Extreme("max"), r"the positions are x.argmax\(axis\)"),
        (Extreme("min"), r"the positions are \(-x\).argmax\(axis\)"),
    ):
        layer.initialize(seed=0)
        with contextlib.nullcontext() if gradients else nnmpi.no_grad():
            with pytest.raises(UsageError, match=remedy):
                _, _ = layer(x)
            assert len([*(layer(x) * 1)]) == rows  # any other tensor


def test_a_mask_that_is_drawn_twice_in_a_pass_is_said():
    """A tower that is used twice, two passes in one block; not a recomputation or a replay."""
    x = np.ones((4, 3), "float32")
    drop, tower = nn.Dropout(0.5), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    attention = nn.CausalSelfAttention(3, 1, dropout=0.5)
    for layer, rows in ((drop, x), (tower, x), (attention, x[None])):
        layer.initialize(seed=0)
        with nn.training(), pytest.warns(UserWarning, match="drops the same elements both times"):
            first, second = layer(rows), layer(rows)
        np.testing.assert_array_equal(first.numpy(), second.numpy())
    block = nn.training(step=1)
    compiled = nnmpi.compile(lambda x: tower(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with block:
                nn.Sequential(tower, nn.ReLU())(x)
        for step in range(3):
            with nn.training(step=step):
                compiled(x)
        with nn.evaluation():
            tower(x), tower(x)
