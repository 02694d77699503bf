"""Every layer and every method of a Tensor on the device: results, gradients and running statistics are the host's."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import nnmpi.nn
from nnmpi import nn
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.tensor.tensor import Tensor
from tests.gpu.play import BF16, FLOAT32, FLOAT64, FP16, TOLERANCES, call, differences, precise, rounded
from tests.gpu.table import COLUMNS, ROWS, Sample, anywhere, images, positive, ranked
from tests.nn.test_layers import NO_LAYERS

DRAW = np.random.default_rng(3)
FLAT, SEQUENCES, PIXELS = anywhere(21, 24, draw=DRAW), anywhere(3, 17, 24, draw=DRAW), images(3, 8, 9, 4)

LAYERS: Mapping[str, tuple[Callable[[], nn.Module], Any]] = {
    "Linear": (lambda: nn.Linear(24, 35), FLAT),
    "Linear without bias": (lambda: nn.Linear(24, 35, bias=False), SEQUENCES),
    "Conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), 2, (1, 0), 1, 2), PIXELS),
    "Conv2d without bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), PIXELS),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 2, 1), PIXELS),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), PIXELS),
    "GlobalAvgPool2d": (nn.GlobalAvgPool2d, PIXELS),
    "LayerNorm": (lambda: nn.LayerNorm(24), SEQUENCES),
    "CausalSelfAttention": (lambda: nn.CausalSelfAttention(24, 3), SEQUENCES),
    "TransformerBlock": (lambda: nn.TransformerBlock(24, 3, 50), SEQUENCES),
    "ReLU": (nn.ReLU, FLAT),
    "LeakyReLU": (lambda: nn.LeakyReLU(0.2), FLAT),
    "GELU": (nn.GELU, FLAT),
    "GELU tanh": (lambda: nn.GELU("tanh"), FLAT),
    "SiLU": (nn.SiLU, FLAT),
    "Tanh": (nn.Tanh, FLAT),
    "Sigmoid": (nn.Sigmoid, FLAT),
    "Softmax": (lambda: nn.Softmax(0), FLAT),
    "Flatten": (nn.Flatten, PIXELS),
    "TiedLinear": (lambda: nn.Sequential(nn.Linear(24, 35), nn.TiedLinear(nn.Embedding(9, 35))), SEQUENCES),
    "LSTM": (lambda: nn.LSTM(24, 10, num_layers=2, bidirectional=True), SEQUENCES),
    "Embedding": (lambda: nn.Embedding(24, 3), np.arange(60).reshape(5, 12) % 24),
    "Dropout": (lambda: nn.Dropout(0.5), FLAT),
    "BatchNorm": (lambda: nn.BatchNorm(24), FLAT),
    "BatchNorm of images": (lambda: nn.BatchNorm(4), PIXELS),
    "Sequential": (lambda: nn.Sequential(nn.Linear(24, 8), nn.GELU("tanh"), nn.Linear(8, 3)), FLAT),
    "Residual": (lambda: nn.Residual(nn.Linear(24, 24), nn.Linear(24, 24)), FLAT + 3),
    "Branches": (lambda: nn.Branches(nn.Linear(24, 8), nn.Linear(24, 3)), FLAT),
    "Branches added": (lambda: nn.Branches(nn.Linear(24, 8), nn.Linear(24, 8), join="add"), FLAT),
}


def run(make: Callable[[], nn.Module], values: Any, backend: Backend, mode: str) -> dict[str, Any]:
    """Return what a layer gives in training: result, gradients of input and parameters, and its state afterwards."""
    wide = FLOAT64 if mode == FLOAT64 else FLOAT32
    layer = make().initialize(seed=1, dtype=wide, backend=backend)
    floating = values.dtype.kind == "f"
    x = Tensor(backend.asarray(values.astype(wide) if floating else values), requires_grad=floating)
    with precise(mode), nn.training(seed=2, step=3):
        y = layer(x)
    found = {"result": y.data}
    if y.requires_grad:
        seed = rounded(np.random.default_rng(5).uniform(-1, 1, y.shape), BF16)  # numbers that every mode has
        with precise(mode):
            y.backward(backend.asarray(seed.astype(y.dtype)))
        found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
        found |= {"input": x.grad} if floating else {}
    found |= {name: buffer.data for name, buffer in layer.named_buffers()}
    return {name: np.asarray(backend.to_host(value)).astype(np.float64) for name, value in found.items()}


@pytest.mark.parametrize("mode", [FLOAT64, FLOAT32, BF16, FP16])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_the_hosts(device: Backend, name: str, mode: str) -> None:
    """In training, where dropout drops the same elements; in low precision rounding passes through some operations."""
    make, values = LAYERS[name]
    values = rounded(values, mode) if values.dtype.kind == "f" else values
    right = run(make, values, numpy_backend(), FLOAT64)
    found = run(make, values, device, mode)
    assert not differences(found, right, TOLERANCES[mode] * (1 if mode == FLOAT64 else 3))


def test_every_layer_is_here() -> None:
    """A new one without a check fails."""
    classes = {found.__name__ for name in nnmpi.nn.__all__ if inspect.isclass(found := getattr(nnmpi.nn, name))}
    assert {name for name in classes if not name.endswith("Loss")} - NO_LAYERS == {name.split()[0] for name in LAYERS}


PAIR = (anywhere(ROWS, COLUMNS, draw=DRAW), positive(ROWS, COLUMNS, draw=DRAW))
# Methods and operators by name: what they are called with, and on what.
METHODS: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "__add__": (lambda x, y: x + y, PAIR),
    "__radd__": (lambda x: 2 + x, PAIR[:1]),
    "__sub__": (lambda x, y: x - y, PAIR),
    "__rsub__": (lambda x: 2 - x, PAIR[:1]),
    "__mul__": (lambda x, y: x * y, PAIR),
    "__rmul__": (lambda x: 2 * x, PAIR[:1]),
    "__truediv__": (lambda x, y: x / y, PAIR),
    "__rtruediv__": (lambda x: 2 / x, PAIR[1:]),
    "__pow__": (lambda x: x**3, PAIR[:1]),
    "__rpow__": (lambda x: 2**x, PAIR[:1]),
    "__matmul__": (lambda x, y: x @ y, (PAIR[0], anywhere(COLUMNS, 9, draw=DRAW))),
    "__rmatmul__": (lambda x: np.eye(ROWS) @ x if isinstance(x.data, np.ndarray) else x, PAIR[:1]),
    "__neg__": (lambda x: -x, PAIR[:1]),
    "__abs__": (lambda x: abs(x), PAIR[1:]),
    "__getitem__": (lambda x: x[3:20, ::2], PAIR[:1]),
    "__iter__": (lambda x: [*x][1], PAIR[:1]),
    "T": (lambda x: x.T * 2, PAIR[:1]),
    "sum": (lambda x: x.sum(0), PAIR[:1]),
    "mean": (lambda x: x.mean(1, keepdims=True), PAIR[:1]),
    "var": (lambda x: x.var(0, correction=1), PAIR[:1]),
    "max": (lambda x: x.max(1), (ranked(9, 130, draw=DRAW),)),
    "min": (lambda x: x.min(0), (ranked(9, 130, draw=DRAW),)),
    "exp": (lambda x: x.exp(), PAIR[:1]),
    "log": (lambda x: x.log(), PAIR[1:]),
    "sqrt": (lambda x: x.sqrt(), PAIR[1:]),
    "tanh": (lambda x: x.tanh(), PAIR[:1]),
    "clip": (lambda x: x.clip(-10, 10), PAIR[:1]),
    "astype": (lambda x: x.astype("float64"), PAIR[:1]),
    "reshape": (lambda x: x.reshape(-1, 10), PAIR[:1]),
    "permute": (lambda x: x.permute(1, 0), PAIR[:1]),
    "view": (lambda x: x.view(-1), PAIR[:1]),
    "transpose": (lambda x: x.transpose(1, 0), PAIR[:1]),
    "flatten": (lambda x: x.flatten(0), PAIR[:1]),
}
# What gives plain numbers and arrays, or is about the tensor itself.
PLAIN: Mapping[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "item": lambda x: x.sum().item(),
    "__float__": lambda x: float(x.sum()),
    "__int__": lambda x: int(x[0, 0]),
    "__format__": lambda x: f"{x[0, 0]:.3f}",
    "__bool__": lambda x: bool(x.sum()),
    "__len__": len,
    "__lt__": lambda x: x < 0.5,
    "__le__": lambda x: x <= 0.5,
    "__gt__": lambda x: x > 0.5,
    "__ge__": lambda x: x >= 0.5,
    "argmax": lambda x: x.argmax(1),
    "shape": lambda x: x.shape,
    "dtype": lambda x: str(x.dtype),
    "ndim": lambda x: x.ndim,
    "size": lambda x: x.size,
    "__repr__": lambda x: repr(x[:2, :2]),
    "__eq__": lambda x: x == x,  # noqa: PLR0124
    "detach": lambda x: x.detach().numpy(),
}
ELSEWHERE = {"__init__", "__hash__", "__module__", "__slots__", "__doc__", "__array_ufunc__", "blank", "backward"}
ELSEWHERE |= {"__getattr__", "__array__", "__setitem__", "__qualname__", "__firstlineno__", "__static_attributes__"}


@pytest.mark.parametrize("mode", [FLOAT64, FLOAT32])
@pytest.mark.parametrize("name", METHODS)
def test_method_is_the_hosts(device: Backend, name: str, mode: str) -> None:
    """Result and gradients."""
    function, inputs = METHODS[name]
    sample = Sample(function, [rounded(x, mode) for x in inputs])
    right = call(sample, numpy_backend(), [np.dtype(FLOAT64)] * len(inputs))
    found = call(sample, device, [np.dtype(mode)] * len(inputs))
    if name != "__rmatmul__":  # a host's array on its left is refused, see test_errors
        assert not differences(found, right, TOLERANCES[mode])


@pytest.mark.parametrize("name", PLAIN)
def test_plain_answer_is_the_hosts(device: Backend, name: str) -> None:
    """Numbers, shapes, comparisons."""
    here, there = (PLAIN[name](Tensor(each.asarray(PAIR[0]))) for each in (numpy_backend(), device))
    there = device.to_host(there) if hasattr(there, "get") else there
    assert np.allclose(here, there, rtol=1e-12) if not isinstance(here, str) else here == there


def test_every_method_is_here() -> None:
    """A new one without a check fails."""
    assert set(vars(Tensor)) - ELSEWHERE == METHODS.keys() | PLAIN.keys()
