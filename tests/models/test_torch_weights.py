"""A model's values in PyTorch's names and layouts: the same logits there, and the same values
back.
"""

import numpy as np
import pytest

from nnmpi import models, nn, no_grad, ops
from nnmpi.base.errors import CheckpointError
from nnmpi.models.torch_weights import (
    from_torch,
    read_torch,
    save_arrays,
    to_torch,
    torch_weights,
    write_torch,
)
from nnmpi.tensor import concatenate
from tests.harness.refusals import refuses

IMAGES = np.random.default_rng(0).standard_normal((3, 8, 6, 2)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 7, (3, 5))


def _decoder(t):
    """Return a model of layers that have the same names in both."""
    up = t.ConvTranspose2d(4, 6, (3, 2), 2, 1, groups=2)
    return t.Sequential(
        t.Conv2d(2, 4, 3),
        t.GroupNorm(2, 4),
        up,
        t.Upsample(scale_factor=2),
        t.AdaptiveAvgPool2d(6),
        t.LayerNorm((6, 6, 6)),
        t.Flatten(),
        t.Linear(216, 3),
    )


def _signal(t):
    """Return a model of convolutions over time."""
    return t.Sequential(
        t.Conv1d(2, 4, 3),
        t.BatchNorm1d(4),
        t.ReLU(),
        t.MaxPool1d(2),
        t.GroupNorm(2, 4),
        t.Flatten(),
        t.Linear(8, 3),
    )


def _normed(t):
    """Return a model of norms over time, without a convolution."""
    return t.Sequential(
        t.InstanceNorm1d(2, affine=True), t.BatchNorm1d(2), t.ReLU(), t.Flatten(), t.Linear(12, 3)
    )


def _sloped(t):
    """Return a model of slopes of channels, which PyTorch has behind the batch."""
    return t.Sequential(t.PReLU(2), t.PReLU(), t.Flatten(), t.Linear(12, 3))


def _square(t):
    """Return a model whose sequences have as many channels as times."""
    return t.Sequential(t.Conv1d(2, 4, 3), t.LayerNorm((4, 4)), t.Flatten(), t.Linear(16, 3))


def _heads(t, transposed):
    """Return an attention that is written by operations; its heads are not an image's rows."""

    class Heads(t.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.last = t.Embedding(7, 4), t.Linear(20, 3)
            self.attention = t.MultiheadAttention(
                4, 2, **({"batch_first": True} if t is not nn else {})
            )

        def forward(self, x):
            x = self.tokens(x)
            x = self.attention(x) if t is nn else self.attention(x, x, x)[0]
            heads = transposed(x.reshape(len(x), 5, 2, 2))
            return self.last(transposed(heads + heads).reshape(len(x), 5, 4).reshape(len(x), 20))

    return Heads()


def _volume(t):
    """Return a model that flattens a convolution's volumes."""
    return t.Sequential(
        t.Conv3d(2, 4, (2, 3, 3)), t.InstanceNorm3d(4, affine=True), t.Flatten(), t.Linear(192, 3)
    )


def _written(t, operations):
    """Return a model whose forward pools and flattens by operations."""

    class Written(t.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.first, self.last = t.Conv2d(2, 4, 3), t.Linear(24, 24), t.Linear(24, 3)

        def forward(self, x):
            x = operations.max_pool2d(operations.relu(self.conv(x)), 2)
            return self.last(operations.relu(self.first(x.reshape(len(x), -1))))

    return Written()


def cases():
    """Return models of every kind of layer, with something that they take."""
    bidirectional = nn.Sequential(
        nn.Embedding(7, 4), nn.LSTM(4, 5, num_layers=2, bidirectional=True), nn.Linear(10, 7)
    )
    return {
        "cnn": (models.cnn((8, 6, 2), 10), IMAGES),
        "mlp": (models.mlp((8, 6, 2), 10, (9,)), IMAGES),
        "resnet": (models.resnet((8, 6, 2), 10), IMAGES),
        "lstm": (bidirectional, TOKENS),
        **{
            kind.__name__.lower(): (
                nn.Sequential(nn.Embedding(7, 4), kind(4, 5, num_layers=2), nn.Linear(5, 7)),
                TOKENS,
            )
            for kind in (nn.GRU, nn.RNN)
        },
        "decoder": (_decoder(nn), IMAGES),
        "volume": (_volume(nn), IMAGES[:, None].repeat(3, 1)),
        "signal": (_signal(nn), IMAGES[:, 0]),
        "normed": (_normed(nn), IMAGES[:, 0]),
        "sloped": (_sloped(nn), IMAGES[:, 0]),
        "square": (_square(nn), IMAGES[:, 0]),
        "heads": (_heads(nn, lambda x: x.swapaxes(1, 2)), TOKENS),
        "written": (_written(nn, ops), IMAGES),
        "gpt": (models.gpt(7, 5, 8, 1, 2), TOKENS),
    }


@pytest.mark.parametrize("name", cases())
def test_there_and_back(tmp_path, name):
    """The same values, to the bit; another model's file is refused."""
    model, x = cases()[name]
    model.initialize(seed=1)
    before = model.state()
    write_torch(tmp_path / "torch.safetensors", model, x[:1])
    model.initialize(seed=2)
    result = from_torch(torch_weights(model, x[:1]), read_torch(tmp_path / "torch.safetensors"))
    model.load_state(result)
    assert {name: array.tolist() for name, array in model.state().items()} == {
        name: array.tolist() for name, array in before.items()
    }
    other = models.mlp((8, 6, 2), 10, ()).initialize()
    refuses(
        CheckpointError,
        "does not fit the model: missing",
        lambda: from_torch(
            torch_weights(other, IMAGES[:1]), read_torch(tmp_path / "torch.safetensors")
        ),
    )


class Own(nn.Module):
    """A linear layer behind an operation on the layer's input, and on a weight."""

    def __init__(self, between):
        self.between, self.scale = between, nn.Parameter((96,), nn.Normal(1))
        self.last = nn.Linear(96, 96)

    def forward(self, x):
        return self.last(self.between(x.reshape(len(x), 96), self.scale))


@pytest.mark.parametrize(
    "between, what",
    [
        *(
            (lambda x, w, of=of: of(96).initialize()(x), "reads a flattened image")
            for of in (nn.BatchNorm1d, nn.RMSNorm)
        ),
        (lambda x, w: concatenate([x[:, 48:], x[:, :48]], 1), "View reads a flattened image"),
        (lambda x, w: x * w, "Pointwise reads a flattened image"),
        (lambda x, w: (x @ w.reshape(1, 96).transpose(1, 0)) * w, "MatMul reads a flattened image"),
        (lambda x, w: ops.tanh(x * 2).reshape(len(x), 8, 6, 2).reshape(len(x), 96), ""),
        (lambda x, w: (x[:, :1] * 0 + w).reshape(len(x), 8, 6, 2).reshape(len(x), 96), "features"),
    ],
)
def test_an_order_that_pytorch_does_not_have_is_refused(between, what):
    """Such a weight was written, and PyTorch's model computed something else."""
    model = Own(between).initialize()
    if not what:
        assert to_torch(model, IMAGES[:1]).keys() == {"scale", "last.weight", "last.bias"}
        return
    refuses(CheckpointError, what, lambda: to_torch(model, IMAGES[:1]))


@pytest.mark.parametrize(
    "between, what",
    [
        (lambda x, w: x @ w, ""),
        (lambda x, w: ops.linear(x, w.T), ""),
        (
            lambda x, w: ops.linear(x, w),
            "w has axes of equal lengths, .* than in Linear; convert the",
        ),
        (lambda x, w: ops.linear(x, w * 2 + 0), "w has axes of equal lengths"),
        (lambda x, w: nn.BatchNorm1d(6).initialize()(x) + w, "lengths, .* in Pointwise"),
    ],
)
def test_a_square_parameter_of_ones_own_is_refused(between, what):
    """Where PyTorch may have it transposed, which its shape does not show."""

    class Bare(nn.Module):
        def __init__(self):
            self.w = nn.Parameter((6, 6), nn.Normal(1))

        def forward(self, x):
            return between(x, self.w)

    model, sample = Bare().initialize(), np.ones((1, 6, 6), "float32")
    model.w.requires_grad = False  # a frozen one is one, too
    if not what:
        assert (to_torch(model, sample)["w"] == model.w.data).all()
        return
    refuses(CheckpointError, what, to_torch, model, sample)


@pytest.mark.parametrize(
    "layers, what",
    [
        ([nn.GRU(2, 4), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 3)], "channels first and "),
        ([nn.Conv1d(2, 4, 3), nn.LayerNorm(4), nn.Flatten(), nn.Linear(16, 3)], "channels first"),
        (
            [nn.Conv1d(2, 4, 3), lambda x: x.permute(0, 2, 1), nn.Flatten(), nn.Linear(16, 3)],
            "channels first",
        ),
        (
            [nn.Conv1d(2, 4, 3), lambda x: x.reshape(len(x), 2, 8), nn.Linear(8, 3)],
            "reads a flattened image",
        ),
        *(
            (
                [nn.Flatten(), nn.Linear(12, 8), lambda x: x.reshape(len(x), 4, 2), last],
                "makes features an image",
            )
            for last in (nn.Conv1d(2, 3, 2), nn.BatchNorm1d(2))
        ),
    ],
)
def test_a_sequence_whose_order_only_the_program_tells_is_refused(layers, what):
    class Called(nn.Module):
        def __init__(self):
            self.layers = [layer for layer in layers if isinstance(layer, nn.Module)]

        def forward(self, x):
            for layer in layers:
                x = layer(x)
            return x

    refuses(CheckpointError, what, lambda: to_torch(Called().initialize(), IMAGES[:1, 0]))


def test_a_square_norm_of_the_input_is_refused():
    """Of (time, channels) or (channels, time), which only the program in PyTorch tells."""
    model = nn.Sequential(nn.LayerNorm((4, 4)), nn.Conv1d(4, 2, 3)).initialize()
    refuses(
        CheckpointError,
        r"0.weight has axes of equal .* in LayerNorm",
        to_torch,
        model,
        np.ones((1, 4, 4), "float32"),
    )
    rows = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((4, 4))).initialize()
    assert to_torch(rows, np.ones((1, 4, 4), "float32"))


def test_a_model_without_parameters_has_an_empty_state(tmp_path):
    model, sample = nn.Sequential(nn.Flatten(), nn.ReLU()), np.ones((1, 2, 2), "float32")
    assert to_torch(model, sample) == {} == from_torch(torch_weights(model, sample), {})
    assert write_torch(tmp_path / "empty.safetensors", model, sample) == 0


def test_what_cannot_be_written_is_told_as_the_system_does(tmp_path):
    """The library raises an error of its own, which names a temporary file; the end of a run looks
    for the system's.
    """
    with pytest.raises(FileNotFoundError) as caught:
        save_arrays(tmp_path / "missing" / "torch.safetensors", {"x": np.zeros(2)})
    assert caught.value.strerror == "No such file or directory"


def _torch_model(torch, name):
    t = torch.nn
    if name == "cnn":
        conv = [
            t.Conv2d(2, 32, 3, padding=1),
            t.ReLU(),
            t.MaxPool2d(2),
            t.Conv2d(32, 64, 3, padding=1),
            t.ReLU(),
        ]
        dense = [t.Linear(128, 128), t.ReLU(), t.Linear(128, 64), t.ReLU(), t.Linear(64, 10)]
        return t.Sequential(*conv, t.MaxPool2d(2), t.Flatten(), *dense)
    if name == "mlp":
        return t.Sequential(t.Flatten(), t.Linear(96, 9), t.ReLU(), t.Linear(9, 10))
    if name == "resnet":

        class Residual(t.Module):
            def __init__(self, body, shortcut):
                super().__init__()
                self.body, self.shortcut = body, shortcut

            def forward(self, x):
                return torch.relu(self.body(x) + (x if self.shortcut is None else self.shortcut(x)))

        return _resnet(t, Residual)

    same = {"decoder": _decoder, "signal": _signal, "volume": _volume, "normed": _normed}
    same |= {"sloped": _sloped}
    same |= {"square": _square, "written": lambda t: _written(t, t.functional)}
    same["heads"] = lambda t: _heads(t, lambda x: x.transpose(1, 2))
    if name in same:
        return same[name](t)

    def first(kind, *args, **more):
        """Return a recurrent layer that returns its outputs alone."""
        layer = kind(*args, batch_first=True, **more)
        layer.register_forward_hook(lambda _, given, result: result[0])
        return layer

    ends = t.Linear(5, 7)
    if name == "lstm":
        layer, ends = first(t.LSTM, 4, 5, 2, bidirectional=True), t.Linear(10, 7)
    else:
        layer = first({"rnn": t.RNN, "gru": t.GRU}[name], 4, 5, 2)
    return t.Sequential(t.Embedding(7, 4), layer, ends)


def _resnet(t, residual):
    """Return PyTorch's twin of `models.resnet`, layer by layer."""

    def twin(module):
        if isinstance(module, nn.Sequential):
            return t.Sequential(*(twin(item) for _, item in module.children()))
        if isinstance(module, nn.Residual):
            return residual(
                twin(module.body), None if module.shortcut is None else twin(module.shortcut)
            )
        if isinstance(module, nn.Conv2d):
            (kh, kw, inputs, outputs), bias = module.weight.shape, module.bias is not None
            return t.Conv2d(inputs, outputs, (kh, kw), module.stride, module.padding, bias=bias)
        if isinstance(module, nn.BatchNorm):
            return t.BatchNorm2d(module.weight.shape[0])
        if isinstance(module, nn.Linear):
            return t.Linear(*module.weight.shape)
        return {"ReLU": t.ReLU(), "Flatten": t.Flatten(), "GlobalAvgPool2d": _mean(t)}[
            type(module).__name__
        ]

    return twin(models.resnet((8, 6, 2), 10))


def _mean(t):
    return t.Sequential(t.AdaptiveAvgPool2d(1), t.Flatten())


@pytest.mark.parametrize("name", sorted({*cases()} - {"gpt"}))
def test_pytorch_computes_the_same(name):
    """Logits within 1e-6 of the largest, there and with what is trained there."""
    torch = pytest.importorskip("torch")
    model, x = cases()[name]
    model.initialize(seed=1)
    theirs = _torch_model(torch, name).eval()
    theirs.load_state_dict(
        {key: torch.from_numpy(value) for key, value in to_torch(model, x[:1]).items()}
    )
    given = torch.from_numpy(np.moveaxis(x, -1, 1).copy() if x.ndim > 2 else x)
    for _ in range(2):
        with no_grad():
            ours = model(x).numpy()
        logits = theirs(given)
        assert np.abs(ours - logits.detach().numpy()).max() <= 1e-6 * np.abs(ours).max()
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
        logits.square().mean().backward()
        optimizer.step()
        state = {key: value.numpy() for key, value in theirs.state_dict().items()}
        model.load_state(from_torch(torch_weights(model, x[:1]), state))
