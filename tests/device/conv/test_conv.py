"""Convolution on a device, by im2col and by cuDNN: NumPy's numbers to the last bit, in every precision."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nnmpi
from nnmpi import nn
from nnmpi.backend.cudnn import use_convolution
from nnmpi.backend.kernels.lookup import jit
from nnmpi.ops.conv import device_im2col
from nnmpi.ops.conv.conv2d import conv2d, conv_relu, conv_relu_pool
from nnmpi.tensor.tensor import Tensor
from tests.device.conv.cases import CASES, FUNCTIONS, MODES, Case, cudnn_double, on_device, on_host, precision
from tests.device.library import device_backend


def windows_fit(name: str, case: Case) -> bool:
    """Return whether the convolution leaves enough for the pooling."""
    try:
        on_host(FUNCTIONS[name], case)
    except Exception as error:
        assert "window" in str(error)
        return False
    return True


def compare(name: str, case: Case, mode: str) -> None:
    """Compare all results, which must be the same to the last bit."""
    if not windows_fit(name, case):
        pytest.skip("too few pixels are left for the pooling")
    for ours, host in zip(on_device(FUNCTIONS[name], case, mode), on_host(FUNCTIONS[name], case), strict=True):
        np.testing.assert_array_equal(ours, host)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_im2col(case: Case, name: str, mode: str) -> None:
    """Any sizes, strides, borders, dilations and groups."""
    with use_convolution("im2col"):
        compare(name, case, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cudnn(case: Case, name: str, mode: str) -> None:
    """The same by cuDNN's graphs; of float64, and where there is no image, by im2col after all."""
    with cudnn_double() as settings, use_convolution("cudnn"):
        compare(name, case, mode)
        done = {words.partition("+")[0] for words in settings.executed}
        assert done == (
            set() if mode == "float64" or case.images[0] == 0 else {"conv_fprop", "conv_dgrad", "conv_wgrad"}
        )


@pytest.mark.parametrize("mode", ["float32", "float64", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", ["3x3", "all at once", "no image", "1x1, stride"])
def test_without_kernels(case: str, name: str, mode: str) -> None:
    """By the functions of the array library alone."""
    with jit(False):
        compare(name, CASES[case], mode)


@pytest.mark.parametrize("mode", ["float32", "bf16"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "no image"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 2.5, 4])
def test_blocks(name: str, share: float, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for the columns of a part of an image, or of a few; the last block may be smaller."""
    case = CASES[name]._replace(images=(5, *CASES[name].images[1:]))
    real, seen = device_im2col._blocks, []

    def blocks(shape: tuple[int, ...], each: int) -> Any:
        monkeypatch.setattr(device_im2col, "COLUMNS_BYTES", int(shape[1] * shape[2] * each * share))
        found = list(real(shape, each))
        covered = np.zeros(shape[:2], int)
        for images, lines in found:
            covered[images, lines] += 1
        assert (covered == 1).all()
        seen.append(len(found))
        return found

    monkeypatch.setattr(device_im2col, "_blocks", blocks)
    with use_convolution("im2col"):
        compare("conv2d", case, mode)
    few = {2.5: 3, 4: 2}
    assert set(seen) == {few[share]} if share in few else min(seen) >= 5


@pytest.mark.parametrize("algorithm", ["im2col", "cudnn"])
def test_awkward_arrays(algorithm: str) -> None:
    """Images, kernels and gradients with gaps, and such that begin at an odd address."""
    xp = device_backend().xp
    rng = np.random.default_rng(0)
    wide, kernels = rng.standard_normal((2, 6, 14, 3)), rng.standard_normal((3, 3, 3, 10))
    host = [wide[:, :, ::2], kernels[..., ::2]]
    flat = xp.empty((wide.size // 2 + 1,), np.float32)
    odd = flat[1:].reshape(2, 6, 7, 3)
    odd[...] = xp.asarray(host[0].astype(np.float32))
    device = [xp.asarray(wide.astype(np.float32))[:, :, ::2], xp.asarray(kernels.astype(np.float32))[..., ::2]]
    with cudnn_double(), use_convolution(algorithm):
        results = [
            gradients(
                conv2d, arrays, xp.asarray(rng.standard_normal((2, 12, 7, 5)).astype(np.float32) * 0 + 1.5)[:, ::2]
            )
            for arrays in (device, [odd, device[1]])
        ]
    expected = gradients(conv2d, host, np.full((2, 6, 7, 5), 1.5))
    for ours in results:
        for a, b in zip(ours, expected, strict=True):
            np.testing.assert_allclose(xp.asnumpy(a), b, rtol=1e-4, atol=1e-5)


def gradients(function: Any, arrays: list[Any], grad: Any) -> list[Any]:
    """Return the result and the gradients of a convolution with a border of 1."""
    leaves = [Tensor(x, requires_grad=True) for x in arrays]
    y = function(*leaves, None, 1, 1)
    y.backward(grad)
    return [y.data, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("algorithm", ["im2col", "cudnn"])
@pytest.mark.parametrize("options", [(1, 1), (2, 1), (2, 0, 1, 2)])
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_images_in_float32(mode: str, options: tuple[int, ...], algorithm: str) -> None:
    """What comes as float32 into half precision gets a gradient of float32."""
    xp, rng = device_backend().xp, np.random.default_rng(0)
    x, weight = rng.integers(-1, 2, (2, 7, 6, 4)), rng.integers(-1, 2, (3, 3, 4 if len(options) < 4 else 2, 4))
    host = [Tensor(each.astype(np.float64), requires_grad=True) for each in (x, weight)]
    device = [Tensor(xp.asarray(each.astype(np.float32)), requires_grad=True) for each in (x, weight)]
    with cudnn_double(), use_convolution(algorithm), precision(mode):
        conv2d(*device, None, *options).sum().backward()
    conv2d(*host, None, *options).sum().backward()
    for ours, theirs in zip(device, host, strict=True):
        assert ours.grad.dtype == np.float32
        np.testing.assert_array_equal(xp.asnumpy(ours.grad), theirs.grad)


@pytest.mark.parametrize("algorithm", ["im2col", "cudnn"])
@pytest.mark.parametrize("mode", ["float32", "bf16"])
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_add_up_in_their_place(groups: int, mode: str, algorithm: str) -> None:
    """A second microbatch's gradient is added where the first one's is, and one without images adds nothing."""
    backend = device_backend()
    layer = nn.Conv2d(4, 6, 3, padding=1, groups=groups).initialize(seed=0, dtype="float32", backend=backend)
    x = np.random.default_rng(0).integers(-1, 2, (3, 5, 4, 4)).astype(np.float32)
    places = [each.buffer for each in layer.parameters()]
    sums = []
    with cudnn_double(), use_convolution(algorithm), precision(mode):
        for part in (x[:2], x[2:], x[:0]):
            layer(Tensor(backend.asarray(part))).sum().backward()
            assert all(each.grad is place for each, place in zip(layer.parameters(), places, strict=True))
            sums.append([backend.to_host(each.grad).copy() for each in layer.parameters()])
        layer.zero_grad()
        layer(Tensor(backend.asarray(x))).sum().backward()
    for name in range(2):
        assert (sums[0][name] != sums[1][name]).any()
        np.testing.assert_array_equal(sums[1][name], sums[2][name])
        np.testing.assert_array_equal(backend.to_host(list(layer.parameters())[name].grad), sums[2][name])


@pytest.mark.parametrize("algorithm", ["im2col", "cudnn"])
@pytest.mark.parametrize("mode", ["float32", "bf16"])
def test_the_host_never_waits(algorithm: str, mode: str) -> None:
    """Neither forward nor backward looks at a number."""
    xp = device_backend().xp
    from cupy._sync import no_synchronize

    images = xp.asarray(np.ones((2, 6, 6, 4), np.float32))
    weight = Tensor(xp.asarray(np.ones((3, 3, 4, 5), np.float32)), requires_grad=True)
    bias = Tensor(xp.asarray(np.ones(5, np.float32)), requires_grad=True)
    with cudnn_double(), use_convolution(algorithm), precision(mode), no_synchronize():
        for function in (conv2d, conv_relu, conv_relu_pool):
            y = function(Tensor(images, requires_grad=True), weight, bias, 1, 1)
            y.backward(xp.ones(y.shape, y.dtype))


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_half_precision_on_the_host(case: Case, name: str, mode: str) -> None:
    """NumPy computes the same numbers in half precision, in the same dtypes."""
    from tests.device.conv.cases import arrays, grad_of

    if not windows_fit(name, case):
        pytest.skip("too few pixels are left for the pooling")
    leaves = [Tensor(x.astype(np.float32), requires_grad=True) for x in arrays(case)]
    with precision(mode):
        y = FUNCTIONS[name](*leaves, *([] if case.bias else [None]), *case.options)
        y.backward(grad_of(y.shape).astype(y.dtype))
    assert y.dtype.itemsize == 2
    assert all(leaf.grad.dtype == np.float32 for leaf in leaves)
    for ours, host in zip((y.data, *(leaf.grad for leaf in leaves)), on_host(FUNCTIONS[name], case), strict=True):
        np.testing.assert_array_equal(ours.astype(np.float64), host)


# Recorded steps with convolutions on a device: replays give what eager steps give, by both algorithms.


def network() -> nn.Sequential:
    """Return a network with every operation of this folder: fused, grouped, with strides, pooled."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=3),
        nn.ReLU(),
        nn.Conv2d(6, 4, 1),
        nn.MaxPool2d(3, 1, 1),
        nn.AvgPool2d(2, 1),
        nn.GlobalAvgPool2d(),
    )


def steps(wrap: Callable[[Any], Any]) -> list[Any]:
    """Return results and gradients of some steps on the device."""
    backend, rng = device_backend(), np.random.default_rng(0)
    model = network().initialize(seed=1, dtype="float32", backend=backend)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        y = (model(x) ** 2).sum()
        y.backward()
        return y

    run, found = wrap(step), []
    for _ in range(4):
        y = run(backend.asarray(rng.standard_normal((3, 12, 10, 2)).astype(np.float32)))
        found += [y.item(), *(backend.to_host(each.grad) for each in model.parameters())]
    return found


@pytest.mark.parametrize("mode", ["float32", "bf16"])
@pytest.mark.parametrize("algorithm", ["im2col", "cudnn"])
def test_replayed(algorithm: str, mode: str) -> None:
    """Bit for bit, with new images each time."""
    with cudnn_double() as settings, use_convolution(algorithm), precision(mode):
        eager = steps(lambda step: lambda x: step(Tensor(x)))
        done = settings.executed.total()
        compiled = steps(nnmpi.compile)
        assert settings.executed.total() == 2 * done
        assert (done > 0) == (algorithm == "cudnn")
    for one, other in zip(eager, compiled, strict=True):
        np.testing.assert_array_equal(one, other)
