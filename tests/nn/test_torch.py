"""A small model trained beside PyTorch's: five updates in float64, the same losses and weights."""

import numpy as np
import pytest

from nnmpi import nn, ops, optim
from nnmpi.tensor.tensor import Tensor

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # the arrays are small, and other tests want the cores
STEPS, BATCH = 5, 6


def ours():
    """Return convolution, batch normalization, pooling, a strided residual block, and a linear layer."""
    block = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm(6), nn.ReLU(), nn.Conv2d(6, 6, 3, 1, 1))
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm(4),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Residual(block, nn.Conv2d(4, 6, 1, 2)),
        nn.Flatten(),
        nn.LayerNorm(24),
        nn.Linear(24, 5),
    )


class Theirs(torch.nn.Module):
    """The same of PyTorch's layers; images turn channels-last before they are flattened."""

    def __init__(self):
        super().__init__()
        t = torch.nn
        self.first = t.Sequential(t.Conv2d(2, 4, 3, padding=1), t.BatchNorm2d(4), t.GELU(), t.MaxPool2d(2))
        self.block = t.Sequential(
            t.Conv2d(4, 6, 3, 2, 1, bias=False), t.BatchNorm2d(6), t.ReLU(), t.Conv2d(6, 6, 3, 1, 1)
        )
        self.shortcut = t.Conv2d(4, 6, 1, 2)
        self.last = t.Sequential(t.LayerNorm(24), t.Linear(24, 5))

    def forward(self, x):
        x = self.first(x)
        x = torch.relu(self.block(x) + self.shortcut(x))
        return self.last(x.permute(0, 2, 3, 1).flatten(1))


PAIRS = {
    "0": "first.0",
    "1": "first.1",
    "4.body.0": "block.0",
    "4.body.1": "block.1",
    "4.body.3": "block.3",
    "4.shortcut": "shortcut",
    "6": "last.0",
    "7": "last.1",
}
LEAVES = {"weight": "weight", "bias": "bias", "running_mean": "running_mean", "running_variance": "running_var"}


def layout(array):
    """Return kernels and matrices as PyTorch keeps them."""
    return array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T


def their_name(name):
    """Return the name of the same array in PyTorch's model."""
    module, _, kind = name.rpartition(".")
    return f"{PAIRS[module]}.{LEAVES[kind]}"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_five_updates(momentum):
    """Losses, weights, running statistics, and the evaluation at the end."""
    model, theirs = ours().initialize(seed=0, dtype="float64"), Theirs().double()
    arrays = theirs.state_dict()
    for name, values in model.state().items():
        arrays[their_name(name)].copy_(torch.tensor(np.ascontiguousarray(layout(values))))
    optimizer = optim.SGD(model.storage, lr=0.1, momentum=momentum)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum)
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((STEPS, BATCH, 8, 8, 2)), rng.integers(0, 5, (STEPS, BATCH))
    losses, expected = [], []
    for x, y in zip(images, labels, strict=True):
        with nn.training():
            loss = ops.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        their_loss = torch.nn.functional.cross_entropy(theirs(torch.tensor(x.transpose(0, 3, 1, 2))), torch.tensor(y))
        reference.zero_grad()
        their_loss.backward()
        reference.step()
        expected.append(their_loss.item())
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    assert len(set(losses)) == STEPS
    for name, values in model.state().items():
        np.testing.assert_allclose(layout(values), arrays[their_name(name)].numpy(), rtol=1e-7, atol=1e-10)
    theirs.eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(images[0].transpose(0, 3, 1, 2)))
    np.testing.assert_allclose(model(Tensor(images[0])).data, logits.numpy(), rtol=1e-7, atol=1e-9)
