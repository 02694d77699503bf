"""Layers and losses beside PyTorch's of the same name: values, and gradients of input and weights,
in both dtypes. `tests/ops/rows.py` checks the operations without it.
"""

import numpy as np
import pytest

from nnmpi import Tensor, nn
from nnmpi.backend.activations import FORMS
from nnmpi.models.torch_weights import to_torch
from nnmpi.tensor.elementwise import activated

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(0)
TIMES, IMAGES = RNG.standard_normal((3, 7, 4)), RNG.standard_normal((2, 6, 5, 4))
VOLUMES = RNG.standard_normal((2, 5, 6, 4, 4))
LAYERS = {
    "elu": (lambda t: t.ELU(), 9 * TIMES),
    "elu alpha": (lambda t: t.ELU(0.3), TIMES),
    "softplus": (lambda t: t.Softplus(), 30 * TIMES),
    "softplus beta": (lambda t: t.Softplus(2.0, 1.5), TIMES),
    "prelu": (lambda t: t.PReLU(), TIMES),
    "prelu channels": (lambda t: t.PReLU(4, 0.3), IMAGES),
    "selu": (lambda t: t.SELU(), 9 * TIMES),
    "conv2d same": (lambda t: t.Conv2d(4, 6, 3, padding="same", dilation=2), IMAGES),
    "conv2d same even": (
        lambda t: t.Conv2d(4, 6, (2, 4), padding="same", dilation=(3, 1)), IMAGES
    ),
    "conv3d": (lambda t: t.Conv3d(4, 6, 3), VOLUMES),
    "conv3d options": (
        lambda t: t.Conv3d(4, 6, (3, 2, 1), (2, 1, 2), (2, 0, 1), (1, 2, 1), 2, bias=False),
        VOLUMES,
    ),
    "conv3d deep": (lambda t: t.Conv3d(4, 2, 2, 2, 1, (3, 1, 1)), VOLUMES),
    "max pool": (lambda t: t.MaxPool1d(3), TIMES),
    "max pool options": (lambda t: t.MaxPool1d(3, 2, 1), TIMES),
    "avg pool": (lambda t: t.AvgPool1d(3, 2, 1), TIMES),
    "max pool of volumes": (lambda t: t.MaxPool3d(2), VOLUMES),
    "max pool of volumes, ties": (
        lambda t: t.MaxPool3d((2, 3, 2), (1, 2, 1), (1, 1, 0)), VOLUMES.round()
    ),
    "avg pool of volumes": (lambda t: t.AvgPool3d(3, 2, 1), VOLUMES),
    "max pool to a size": (lambda t: t.AdaptiveMaxPool2d((4, 3)), IMAGES.round()),
    "max pool to a divisor": (lambda t: t.AdaptiveMaxPool2d(1), IMAGES),
    "instance": (lambda t: t.InstanceNorm2d(4), IMAGES),
    "instance of sequences": (lambda t: t.InstanceNorm1d(4, 1e-3, affine=True), TIMES),
    "instance of volumes": (lambda t: t.InstanceNorm3d(4, affine=True), VOLUMES),
}  # fmt: skip
CELLS = {
    "rnn": lambda t: t.RNNCell(4, 5),
    "rnn relu": lambda t: t.RNNCell(4, 5, nonlinearity="relu"),
    "gru": lambda t: t.GRUCell(4, 5),
    "lstm": lambda t: t.LSTMCell(4, 5),
}
DTYPES = ["float32", "float64"]


def tolerance(dtype):
    return {"rtol": 1e-4, "atol": 2e-5} if dtype == "float32" else {"rtol": 1e-8, "atol": 1e-11}


def pair(make, dtype, x):
    """Return a layer and PyTorch's with the same weights."""
    ours, theirs = (
        make(nn).initialize(seed=1, dtype=dtype),
        make(torch.nn).to(getattr(torch, dtype)),
    )
    if ours.parameters():
        weights = to_torch(ours, x[:1].astype(dtype))
        theirs.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    return ours, theirs


def agree(ours, theirs, dtype):
    np.testing.assert_allclose(ours, theirs.detach().numpy(), **tolerance(dtype))


EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@EACH_DTYPE
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, dtype):
    make, values = LAYERS[name]
    values = values.astype(dtype)
    ours, theirs = pair(make, dtype, values)
    x = Tensor(values, requires_grad=True)
    first = values.ndim > 2  # channels
    z = torch.tensor(np.moveaxis(values, -1, 1) if first else values, requires_grad=True)
    y, other = ours(x), theirs(z)
    agree(np.moveaxis(y.data, -1, 1), other, dtype)
    grad = np.cos(np.arange(y.size).reshape(y.shape)).astype(dtype)
    y.backward(grad)
    other.backward(torch.tensor(np.moveaxis(grad, -1, 1).copy()))
    assert x.grad is not None
    agree(np.moveaxis(x.grad, -1, 1), z.grad, dtype)
    if ours.parameters():
        parts = dict(theirs.named_parameters())
        bias = next((p for p in ours.parameters() if p.name.endswith("bias")), None)
        if bias is not None:
            agree(bias.grad, parts["bias"].grad, dtype)
        weight = next(p for p in ours.parameters() if p.name.endswith("weight"))
        turned = (-1, -2, *range(weight.ndim - 2)) if weight.ndim > 1 else (0,)
        agree(weight.grad.transpose(turned), parts["weight"].grad, dtype)


@EACH_DTYPE
@pytest.mark.parametrize("form", [form for form in FORMS if form.torch], ids=lambda form: form.name)
def test_activations(form, dtype):
    """Also at 0, where some bend, and far out."""
    values = np.array([0, 1e-3, -1e-3, 0.3, -0.3, 1, -1, 2.5, -2.5, 9, -9, 40, -40]).astype(dtype)
    x, z = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    y = activated(form, x, *form.settings)
    other = getattr(torch.nn.functional, form.torch)(z, *form.settings, **form.torch_words)
    agree(y.data, other, dtype)
    y.sum().backward()
    other.sum().backward()
    agree(x.grad, z.grad, dtype)


@EACH_DTYPE
@pytest.mark.parametrize("name", CELLS)
def test_cells(name, dtype):
    """Over seven steps, without a state and from one."""
    values = TIMES.astype(dtype)
    ours, theirs = pair(CELLS[name], dtype, values[:, 0])
    for begin in (False, True):
        state = None
        other = None
        if begin:
            arrays = [np.full((3, 5), value, dtype) for value in (0.3, -0.2)]
            parts = [Tensor(a) for a in arrays], [torch.tensor(a) for a in arrays]
            state, other = (tuple(p) if name == "lstm" else p[0] for p in parts)
        x, z = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
        for t in range(7):
            state, other = ours(x[:, t], state), theirs(z[:, t], other)
        h, last = (item[0] if name == "lstm" else item for item in (state, other))
        agree(h.data, last, dtype)
        h.sum().backward()
        last.sum().backward()
        agree(x.grad, z.grad, dtype)


@EACH_DTYPE
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_rnn(nonlinearity, dtype):
    values = TIMES.astype(dtype)
    ours = nn.RNN(4, 5, 2, nonlinearity).initialize(seed=1, dtype=dtype)
    theirs = torch.nn.RNN(4, 5, 2, nonlinearity, batch_first=True).to(getattr(torch, dtype))
    weights = to_torch(ours, values[:1])
    theirs.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    begin = np.full((2, 3, 5), 0.1, dtype)
    x, z = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    (y, last), (other, end) = ours.with_state(x, Tensor(begin)), theirs(z, torch.tensor(begin))
    agree(y.data, other, dtype)
    agree(last.data, end, dtype)
    ((y * y).sum() + last.sum()).backward()
    ((other * other).sum() + end.sum()).backward()
    agree(x.grad, z.grad, dtype)
    for number, layer in enumerate(ours.layers):
        for name, part in (
            ("weight", "weight_ih"),
            ("recurrent", "weight_hh"),
            ("bias", "bias_ih"),
        ):
            agree(getattr(layer, name).grad.T, getattr(theirs, f"{part}_l{number}").grad, dtype)


LABELS = np.array([[0, 2, 4, 1], [3, 3, -100, 0]])
WEIGHTS = np.array([0.1, 2, 0.5, 0, 1.5])
SIDES = RNG.random((2, 4, 5))
LOSSES = {
    "weights": (lambda t, w: t.CrossEntropyLoss(w, ignore_index=-100), LABELS),
    "weights sum": (lambda t, w: t.CrossEntropyLoss(w, ignore_index=-100, reduction="sum"), LABELS),
    "weights none": (
        lambda t, w: t.CrossEntropyLoss(w, ignore_index=0, reduction="none"), LABELS % 5
    ),
    "weights smooth": (
        lambda t, w: t.CrossEntropyLoss(w, ignore_index=-100, label_smoothing=0.2),
        LABELS,
    ),
    "nll": (lambda t, w: t.NLLLoss(), LABELS),
    "nll weights": (lambda t, w: t.NLLLoss(weight=w, ignore_index=3), LABELS % 5),
    "nll none": (lambda t, w: t.NLLLoss(reduction="none"), LABELS),
    "bce": (lambda t, w: t.BCELoss(), SIDES),
    "bce hard": (lambda t, w: t.BCELoss(reduction="none"), SIDES.round()),
    **{
        f"kl {reduction}": (lambda t, w, how=reduction: t.KLDivLoss(reduction=how), SIDES)
        for reduction in ("mean", "sum", "none", "batchmean")
    },
    "kl zero": (lambda t, w: t.KLDivLoss(reduction="sum"), SIDES.round()),
    "kl log": (lambda t, w: t.KLDivLoss(reduction="sum", log_target=True), np.log(SIDES)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@EACH_DTYPE
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, dtype):
    make, target = LOSSES[name]
    values, weight = RNG.standard_normal((2, 4, 5)).astype(dtype), WEIGHTS.astype(dtype)
    if name.startswith("bce"):
        values = 1 / (1 + np.exp(-values))
        values[0, 0] = [0, 1, 0, 1, 0.5]
    labels = np.issubdtype(target.dtype, np.integer)
    target = target if labels else target.astype(dtype)
    x, z = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    loss = make(nn, weight)(x, target)
    turned = z.movedim(-1, 1) if labels else z
    other = make(torch.nn, torch.tensor(weight))(turned, torch.tensor(target))
    agree(loss.data, other, dtype)
    loss.sum().backward()
    other.sum().backward()
    agree(x.grad, z.grad, dtype)
