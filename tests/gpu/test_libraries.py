"""NVIDIA's libraries on the device: products by cuBLAS however matrices lie in memory, and its
compiler.
"""

from concurrent.futures import Future
from importlib import import_module
from itertools import product

import numpy as np
import pytest

from nnmpi import Numerics, Worker, models, ops, optim, use_precision
from nnmpi.backend.cuda.kernels import device_kernels
from nnmpi.backend.gemm import gemm
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.precision import bfloat16
from nnmpi.data import Loader
from tests.equivalence.reference import digits
from tests.gpu.play import BF16, FLOAT32, FLOAT64, FP16, TF32, TOLERANCES, call, differences, dtypes
from tests.gpu.table import Sample

SHAPES = (
    ((), 64, 64, 64),
    ((), 37, 130, 67),
    ((), 1, 129, 1),
    ((), 300, 7, 500),
    ((6,), 33, 20, 65),
    ((2, 3), 5, 9, 4),
)
KINDS = {FLOAT64: "float64", FLOAT32: "float32", TF32: "float32", BF16: "bfloat16", FP16: "float16"}


def dtype_of(mode):
    """Return the operands' dtype."""
    return bfloat16() if mode == BF16 else np.dtype(KINDS[mode])


def lying(values, way, backend):
    """Return the values on the device in rows, transposed, or as a part of a larger array."""
    if way == "transposed":
        return backend.asarray(np.ascontiguousarray(values.swapaxes(-1, -2))).swapaxes(-1, -2)
    if way == "part":
        wide = np.zeros((*values.shape[:-1], values.shape[-1] + 3), values.dtype)
        wide[..., : values.shape[-1]] = values
        return backend.asarray(wide)[..., : values.shape[-1]]
    return backend.asarray(values)


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize(
    "ways", list(product(("rows", "transposed", "part"), repeat=2)), ids="-".join
)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_product(device, sizes, ways, mode):
    """New, written to a place, and added to one; half precision also with a result in float32."""
    leading, n, k, m = sizes
    draw, dtype = np.random.default_rng(0), dtype_of(mode)
    a, b = (draw.uniform(-1, 1, (*leading, *shape)).astype(dtype) for shape in ((n, k), (k, m)))
    right = np.matmul(a.astype(np.float64), b.astype(np.float64))
    # what rounding is a share of
    terms = np.matmul(abs(a.astype(np.float64)), abs(b.astype(np.float64)))
    here, there = lying(a, ways[0], device), lying(b, ways[1], device)
    with use_precision(mode if mode in (TF32, BF16, FP16) else FLOAT32):
        results = [gemm(here, there)]
        for wide in {np.dtype(np.float32), dtype} if dtype.itemsize == 2 else {dtype}:
            place = device.zeros(right.shape, wide)
            gemm(here, there, out=place)
            results.append(place)
            twice = gemm(here, there, out=place.copy(), add=True)
            results.append(twice / twice.dtype.type(2))
    for result in results:
        error = np.abs(device.to_host(result).astype(np.float64) - right).max()
        assert error <= TOLERANCES[mode] * terms.max()


def test_float32_is_not_rounded_to_tf32(device):
    """Unless it is asked for: 1 + 2^-20 has more bits than TF32."""
    a = device.asarray(np.full((256, 256), 1 + 2.0**-20, np.float32))
    result = device.to_host(gemm(a, device.asarray(np.eye(256, dtype=np.float32))))
    assert (result == np.float32(1 + 2.0**-20)).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mode", KINDS)
def test_rows_of_large_odd_products_are_aligned(device, mode, smoothing, monkeypatch):
    """Those of the loss's gradient too, where a kernel writes it: so all three products with an
    output's table read and write aligned rows, with the numbers of contiguous ones.
    """
    multiply, seen = gemm, []

    def watch(a, b, out=None, *args, **options):
        seen.extend(x for x in (a, a.T, out) if x is not None and x.shape[-1] == 67)
        return multiply(a, b, out, *args, **options)

    def loss(x, table, labels):
        logits = ops.linear_transposed(x, table)
        return ops.cross_entropy(logits, labels, ignore_index=3, label_smoothing=smoothing)

    draw = np.random.default_rng(0)
    inputs = [draw.uniform(-1, 1, shape) for shape in ((2, 11, 16), (67, 16))]
    labels = draw.integers(0, 67, (2, 11))
    sample = Sample("ops.linear_transposed", "loss", loss, inputs, [labels], 1)
    results = []
    monkeypatch.setattr(import_module("nnmpi.ops.linear"), "gemm", watch)
    for least in (2**30, 0):
        monkeypatch.setattr(import_module("nnmpi.backend.gemm"), "ALIGNED", least)
        seen.clear()
        with use_precision(mode if mode in (TF32, BF16, FP16) else FLOAT32):
            results.append(call(sample, device, dtypes(sample, mode)))
        kernels = kernels_of(device.zeros(1, "float32"))
        aligned = [x.strides[0] % 16 == 0 for x in seen]  # logits, and their gradient twice
        assert aligned == ([False] * 3 if least else [True, *[kernels.of_device] * 2])
    assert not differences(results[1], results[0], TOLERANCES[mode])


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("build", [models.cnn, models.resnet], ids=["cnn", "resnet"])
def test_kernels_are_compiled_ahead_by_threads(device, group, monkeypatch, build, precision):
    """All that a step launches: none is compiled while it runs, one after another."""
    kernels = device_kernels(device.xp)
    if kernels is None:
        pytest.skip("the stand-in has no kernels")
    monkeypatch.setattr(kernels, "_modules", {})
    monkeypatch.setattr(kernels, "_launches", {})
    dataset = digits()
    model = build(dataset.sample_shape, dataset.classes).initialize(seed=0, backend=device)
    numerics = Numerics(precision=precision)
    sgd = optim.SGD(model.storage, 0.1)
    worker = Worker(model, sgd, group, backend=device, numerics=numerics)
    ahead = set(kernels._modules)
    assert all(isinstance(module, Future) for module in kernels._modules.values())
    worker.step(next(Loader(dataset, 4).epoch(0, backend=device)))
    assert set(kernels._modules) <= ahead
    assert any(not isinstance(module, Future) for module in kernels._modules.values())
