"""The ready models: sizes, shapes, and samples that they cannot take."""

import numpy as np
import pytest

from nnmpi import models, nn, ops, optim
from nnmpi.base.errors import UsageError


def shapes(model):
    """Return the shapes of a model's parameters by name."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def test_mlp():
    """Linear layers of the sizes asked for; images are flattened."""
    model = models.mlp((28, 28, 1), 10)
    assert shapes(model) == {
        "1.weight": (784, 128),
        "1.bias": (128,),
        "3.weight": (128, 64),
        "3.bias": (64,),
        "5.weight": (64, 10),
        "5.bias": (10,),
    }
    assert model.initialize().storage.size == 784 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
    assert model(np.zeros((3, 28, 28, 1), np.float32)).shape == (3, 10)


@pytest.mark.parametrize(
    "sample, classes, parameters",
    [
        ((28, 28, 1), 10, 429_258),
        ((32, 32, 3), 10, None),
        ((8, 8, 1), 10, None),
        ((9, 4, 2), 3, None),
    ],
)
def test_cnn(sample, classes, parameters):
    """429,258 parameters for MNIST; any image of 4 x 4 pixels or more works."""
    model = models.cnn(sample, classes).initialize()
    if parameters is not None:
        assert model.storage.size == parameters
        assert shapes(model)["7.weight"] == (3136, 128)
    assert model(np.zeros((2, *sample), np.float32)).shape == (2, classes)
    assert model(np.zeros((0, *sample), np.float32)).shape == (0, classes)


@pytest.mark.parametrize("sample", [(28, 28, 1), (7, 5, 1), (4, 4, 1)])
def test_resnet(sample):
    """Three stages, each half the size and twice the width of the one before."""
    model = models.resnet(sample, 10, width=4).initialize()
    sizes = []
    with nn.observed(
        lambda module, result: (
            sizes.append(result.shape[1:]) if isinstance(module, nn.Residual) else None
        )
    ):
        assert model(np.zeros((2, *sample), np.float32)).shape == (2, 10)
    h, w = sample[:2]
    assert sizes == [(h, w, 4), (-(-h // 2), -(-w // 2), 8), (-(-h // 4), -(-w // 4), 16)]


def test_resnet_20():
    """Three blocks of width 16 are ResNet-20: 19 convolutions and a linear layer, with two 1x1
    shortcuts.
    """
    model = models.resnet((32, 32, 3), 10, blocks=3).initialize()
    convolutions = [module for _, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    assert len([c for c in convolutions if c.weight.shape[:2] == (3, 3)]) == 19
    assert len([c for c in convolutions if c.weight.shape[:2] == (1, 1)]) == 2
    assert 270_000 < model.storage.size < 275_000


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: models.cnn((4,), 3),
            r"model cnn needs images .* not samples of shape \(4,\); try model mlp",
        ),
        (lambda: models.cnn((3, 28, 1), 10), r"at least 4 x 4 pixels.*; try model mlp"),
        (
            lambda: models.cnn((3, 28, 28), 10),
            r"shape \(3, 28, 28\); turn them: x.transpose\(0, 2, 3, 1\)",
        ),
        (lambda: models.cnn((1, 28, 28), 10), "turn them"),
        (lambda: models.cnn((28, 28, 0), 10), r"sample_shape\[2\] is 0"),
        (
            lambda: models.cnn((28, 28, 1), 10, dropout=1.0),
            "p is 1.0; give a number of at least 0 that is below 1",
        ),
        (lambda: models.resnet((4,), 3), r"model resnet needs images .* \(4,\)"),
        (
            lambda: models.resnet((8, 8, 1), 3, blocks=0),
            "resnet's blocks is 0; give a whole number",
        ),
        (lambda: models.resnet((8, 8, 1), 3, width="16"), "resnet's width is '16'"),
        (lambda: models.mlp((4,), 3, (5, 0)), r"hidden\[1\] is 0; give a whole number"),
        (lambda: models.mlp((4,), 3, (3.5,)), r"hidden\[0\] is 3.5; give a whole number"),
        (lambda: models.mlp((4,), 3, 64), "hidden is 64; give whole numbers, such as"),
        (lambda: models.mlp(4, 3), "sample_shape is 4; give whole numbers, such as"),
        (lambda: models.mlp((4,), None), "mlp's classes is None; give a whole number"),
        (lambda: models.mlp((4,), 3, activation_name="step"), "'step' is unknown"),
    ],
)
def test_models_that_cannot_be(make, words):
    """One sentence with the sizes."""
    with pytest.raises(UsageError, match=words):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.mlp((6, 6, 1), 3, (16,), dropout=0.1),
        lambda: models.cnn((6, 6, 1), 3, (16,)),
        lambda: models.resnet((6, 6, 1), 3, 4),
    ],
    ids=["mlp", "cnn", "resnet"],
)
def test_models_learn(make):
    """Twelve images by heart in forty updates."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12, 6, 6, 1)).astype("float32"), rng.integers(0, 3, 12)
    model = make().initialize(seed=0)
    optimizer = optim.Adam(model.storage, lr=0.01)
    for step in range(40):
        with nn.training(seed=0, step=step):
            loss = ops.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            first = loss.item()
    assert loss.item() < 0.1 * first
    assert (model(x).argmax(1) == y).mean() > 0.9


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.lstm(23, features=10, layers=2, dropout=0.1),
        lambda: models.gpt(23, 9, features=12, layers=3, heads=3, dropout=0.1),
    ],
    ids=["lstm", "gpt"],
)
def test_a_token_sees_nothing_after_it(make):
    """So the logits of a beginning are those of the whole, whatever pads it."""
    model = make().initialize(0, "float64")
    tokens = np.random.default_rng(0).integers(0, 23, (2, 9))
    assert np.allclose(model(tokens).data[:, :4], model(tokens[:, :4]).data, rtol=0, atol=1e-15)
