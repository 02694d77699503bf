"""The transformer's block: PyTorch's numbers, in float64 and within float32's rounding, fused and
one by one.
"""

import numpy as np
import pytest

import nnmpi
from nnmpi import nn

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # the arrays are small, and other tests want the cores
functional = torch.nn.functional


class Theirs(torch.nn.Module):
    """The same block of PyTorch's layers, with our parameters and names."""

    def __init__(self, model, features, heads, hidden):
        super().__init__()
        self.heads = heads
        sizes = {"qkv": (features, 3 * features), "proj": (features, features)}
        sizes |= {"0": (features, hidden), "2": (hidden, features)}
        layers = {name: torch.nn.Linear(*size) for name, size in sizes.items()}
        layers |= {name: torch.nn.LayerNorm(features) for name in ("norm1", "norm2")}
        self.layers = torch.nn.ModuleDict(layers).double()
        for name, values in model.state().items():
            self.of(name).data.copy_(torch.tensor(np.ascontiguousarray(values.T, dtype="float64")))

    def of(self, name):
        """Return the parameter of a name of ours."""
        *_, layer, kind = name.split(".")
        return getattr(self.layers[layer], kind)

    def forward(self, x):
        """Return the block's result."""
        layers = self.layers
        batch, time, features = x.shape
        parts = layers["qkv"](layers["norm1"](x)).split(features, 2)
        heads = (part.reshape(batch, time, self.heads, -1).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + layers["proj"](y.transpose(1, 2).reshape(x.shape))
        return x + layers["2"](functional.gelu(layers["0"](layers["norm2"](x)), approximate="tanh"))


@pytest.mark.parametrize(
    "dtype, tolerance, size",
    [
        ("float64", 1e-13, (3, 7, 12, 3, 20)),
        ("float64", 1e-13, (1, 1, 4, 1, 16)),
        ("float32", 2e-6, (2, 130, 64, 4, 256)),
    ],
)
def test_values_and_gradients_are_pytorchs(dtype, tolerance, size):
    """All parameters' and the input's, measured by the largest of each."""
    batch, time, features, heads, hidden = size
    model = nn.TransformerBlock(features, heads, hidden).initialize(seed=0, dtype=dtype)
    rng = np.random.default_rng(0)
    for parameter in model.parameters():  # scales of 1 and shifts of 0 would hide much
        parameter.data += 0.2 * rng.standard_normal(parameter.shape).astype(dtype)
    theirs = Theirs(model, features, heads, hidden)
    x, grad = (rng.standard_normal((batch, time, features)).astype(dtype) for _ in range(2))
    leaf = nnmpi.Tensor(x, requires_grad=True)
    with nn.training():
        y = model(leaf)
    y.backward(grad)
    other = torch.tensor(x.astype("float64"), requires_grad=True)
    expected = theirs(other)
    expected.backward(torch.tensor(grad.astype("float64")))
    pairs = [(y.data, expected.detach().numpy()), (leaf.grad, other.grad.numpy())]
    pairs += [(p.grad, theirs.of(name).grad.numpy().T) for name, p in model.named_parameters()]
    for ours, exact in pairs:
        np.testing.assert_allclose(ours, exact, rtol=0, atol=tolerance * max(abs(exact).max(), 1))
