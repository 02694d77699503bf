"""What happens where cuDNN is not there, refuses a graph, or fails; and which arithmetic it is allowed."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from nnmpi.backend.cudnn import describe, load, use_convolution
from nnmpi.errors import DeviceError, UsageError
from nnmpi.ops.conv.conv2d import conv2d, conv_relu
from nnmpi.tensor.tensor import Tensor
from tests.device.conv.cases import CASES, cudnn_double, on_device, on_host, precision
from tests.device.library import device_backend

CASE = CASES["3x3"]


def agree(mode: str = "float32") -> None:
    """Compare a convolution with ReLU with NumPy's."""
    for ours, host in zip(on_device(conv_relu, CASE, mode), on_host(conv_relu, CASE), strict=True):
        np.testing.assert_array_equal(ours, host)


def test_without_cudnn_im2col_is_taken() -> None:
    """The frontend is there and the library is not, which nobody needs to hear of unless they ask."""
    with cudnn_double() as settings:
        settings.installed = False
        agree()
        assert describe(device_backend().xp) == (
            "im2col and cuBLAS: cuDNN itself cannot be loaded (Unable to find symbol cudnnCreate)"
        )
        with use_convolution("cudnn"), pytest.raises(DeviceError, match=r"cannot be loaded .* install nnmpi\[cudnn\]"):
            agree()


def test_cudnn_is_taken_where_it_is() -> None:
    """With bias and ReLU in its own graph; each graph is built once."""
    with cudnn_double() as settings:
        agree()
        agree()
        assert settings.built == {"conv_fprop+bias+relu": 1, "conv_dgrad": 1, "conv_wgrad": 1}
        assert settings.executed == {"conv_fprop+bias+relu": 2, "conv_dgrad": 2, "conv_wgrad": 2}
        assert describe(device_backend().xp).startswith("cuDNN 9.27.0, 3 graphs built")
        with use_convolution("im2col"):
            agree()
            assert describe(device_backend().xp) == "im2col and cuBLAS, as asked for"
        assert settings.executed.total() == 6


REFUSALS: dict[str, tuple[Callable[[tuple[str, ...]], bool], str, set[str]]] = {
    "fusion": (lambda words: "relu" in words, "float32", {"conv_fprop", "conv_dgrad", "conv_wgrad"}),
    "wide gradients": (
        lambda words: words[0] == "conv_wgrad" and words[-1] == "FLOAT",
        "bf16",
        {"conv_fprop+bias+relu", "conv_dgrad", "conv_wgrad"},
    ),
    "forward": (lambda words: words[0] == "conv_fprop", "float32", {"conv_dgrad", "conv_wgrad"}),
    "gradients": (lambda words: words[0] != "conv_fprop", "fp16", {"conv_fprop+bias+relu"}),
    "everything": (lambda words: True, "float32", set()),
}


@pytest.mark.parametrize("how", ["refuses", "fails"])
@pytest.mark.parametrize("what", REFUSALS)
def test_what_cudnn_refuses_is_computed_otherwise(what: str, how: str) -> None:
    """Graphs that cannot be built, or not be run: the numbers are the same, it is tried once, and can be read."""
    refused, mode, done = REFUSALS[what]
    with cudnn_double() as settings, use_convolution("cudnn"):
        setattr(settings, how, refused)
        agree(mode)
        assert set(settings.executed) == done
        before = settings.built.copy()
        agree(mode)
        assert settings.built == before
        text = describe(device_backend().xp)
        assert "refused" in text
        assert ("No valid engine" if how == "refuses" else "EXECUTION_FAILED") in text


def test_float32_is_exact_unless_tf32_is_asked_for() -> None:
    """Tensor cores round to ten bits; in plain float32 plans with them are excluded."""
    xp, rng = device_backend().xp, np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 6, 6, 8)), rng.standard_normal((3, 3, 8, 4))
    expected = conv2d(Tensor(x), Tensor(weight)).data
    errors = {}
    for mode in ("float32", "tf32"):
        with cudnn_double(), use_convolution("cudnn"), precision(mode):
            y = conv2d(*(Tensor(xp.asarray(each.astype(np.float32))) for each in (x, weight)))
            errors[mode] = np.abs(xp.asnumpy(y.data) - expected).max() / np.abs(expected).max()
    assert errors["float32"] < 1e-6
    assert 1e-5 < errors["tf32"] < 2e-3


def test_plans_are_timed_where_that_is_asked_for() -> None:
    """Each of those that can be built runs four times; then the fastest alone is taken."""
    with cudnn_double() as settings:
        settings.plans = (0.02, None, 0.0, 0.01)
        with use_convolution("cudnn"):
            agree()
        assert settings.ran == {0: 3}
        settings.ran.clear()
        with use_convolution("tuned"):
            agree()
            assert settings.ran == {0: 12, 2: 12 + 3, 3: 12}
            settings.ran.clear()
            agree()
        assert settings.ran == {2: 3}
        settings.installed = False
        load.cache_clear()
        with use_convolution("tuned"), pytest.raises(DeviceError, match="'tuned' cannot be used"):
            agree()


def test_a_plan_that_wants_too_much_memory_is_not_the_last_word() -> None:
    """Another of cuDNN's plans may want less; where none does, im2col is taken."""
    with cudnn_double() as settings:
        settings.plans, settings.scratch = (0.0, 0.0), {0: 1 << 50}
        agree()
        assert settings.ran.keys() == {1}
        assert describe(device_backend().xp).startswith("cuDNN 9.27.0, 3 graphs built")
    with cudnn_double() as settings:
        settings.plans, settings.scratch = (0.0, 0.0), {0: 1 << 50, 1: 1 << 51}
        agree()
        agree()
        assert not settings.ran
        assert re.search("0 graphs built, . refused.*allocate", describe(device_backend().xp), re.DOTALL)


def test_an_unknown_algorithm() -> None:
    """The sentence names those that there are."""
    with (
        pytest.raises(UsageError, match="'fft' is unknown; choose one of auto, im2col, cudnn, tuned"),
        use_convolution("fft"),
    ):
        pass
