"""Every layer on the device: results, gradients and running statistics are the host's."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import nnmpi.nn
from nnmpi import nn
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.tensor.tensor import Tensor
from tests.gpu.play import BF16, FLOAT32, FLOAT64, FP16, TOLERANCES, differences, precise, rounded
from tests.gpu.table import anywhere, images
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
