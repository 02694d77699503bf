"""Every operation gives on the device what it gives on the host, forward and backward, in every
precision.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from nnmpi import Tensor, ops, tensor
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.kernels import copy
from nnmpi.backend.precision import dtype_named, low_dtype
from tests.device import interpreted
from tests.gpu.conftest import INTERPRETED, is_stand_in
from tests.gpu.play import (
    BF16,
    FLOAT64,
    FP16,
    MODES,
    TOLERANCES,
    call,
    differences,
    dtypes,
    exact,
    precise,
)
from tests.gpu.table import TABLE, Sample
from tests.ops.replays import check_replays
from tests.tensor.rows import TENSOR


def apart(sample, device, mode, least=0.0):
    """Compare a call with NumPy's in float64 on the same inputs, rounded to what the precision
    has.
    """
    sample = exact(sample, mode)
    right = call(sample, numpy_backend(), [np.dtype(FLOAT64)] * len(sample.inputs))
    with precise(mode):
        result = call(sample, device, dtypes(sample, mode))
    # NumPy, where it stands in for the kernels too, adds up thousands of rows one after another
    return differences(result, right, TOLERANCES[mode] * (2 if is_stand_in(device) else 1), least)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sample", TABLE, ids=lambda sample: f"{sample.public}-{sample.way}")
def test_operation_is_the_hosts(device, sample, mode):
    assert not apart(sample, device, mode)


EACH_ROW = pytest.mark.parametrize("row", TENSOR, ids=lambda row: row.name)


@pytest.mark.parametrize("mode", MODES)
@EACH_ROW
def test_what_has_no_kernel_is_the_hosts(device, row, mode):
    """Of the library's functions alone: any shape, stride and broadcast."""

    @settings(max_examples=10)
    @given(row.cases)
    def same(case: Any) -> None:
        assert not apart(
            Sample(row.public, "drawn", case.function, case.inputs), device, mode, least=1.0
        )

    same()


def replay(sample, device):
    """Compare a call's replays with it; where products lie elsewhere, they may add up in another
    order.
    """
    leaves = [Tensor(device.asarray(np.array(item)), requires_grad=True) for item in sample.inputs]
    fixed = [device.asarray(item) for item in sample.fixed]
    values = [[item * factor for item in sample.inputs] for factor in (0.5, 1.0)]
    check_replays(
        lambda *given: sample.function(*given, *fixed), leaves, values, TOLERANCES[FLOAT64]
    )


@pytest.mark.parametrize(
    "sample", {item.public: item for item in reversed(TABLE)}.values(), ids=lambda x: x.public
)
def test_every_operation_replays(device, sample):
    replay(sample, device)


@EACH_ROW
def test_every_function_replays(device, row):
    """Those that the library computes."""

    @settings(max_examples=5)
    @given(row.cases)
    def same(case: Any) -> None:
        replay(Sample(row.public, "drawn", case.function, case.inputs), device)

    same()


def test_a_condition_of_numpys_replays(device):
    """It is a number of the host's, beside arrays of the device's."""
    inputs = [np.arange(3.0), np.arange(3.0)[::-1]]
    replay(Sample("tensor.where", "number", partial(tensor.where, np.bool_(True)), inputs), device)


@pytest.mark.parametrize("mode", [BF16, FP16])
def test_results_are_rounded_to_nearest(device, mode):
    """Bit for bit, and to even where two are as near: a bias alone, which no sum or product
    hides.
    """
    low = low_dtype(mode)
    # 64 and 8 to each number of half precision
    bias = np.linspace(1, 2, 2**14 + 1, dtype=np.float32)[:-1]
    x, weight = device.zeros((3, 1), low), device.zeros((1, bias.size), np.float32)
    with precise(mode):
        result = ops.linear(*map(Tensor, (x, weight, device.asarray(bias)))).data
    np.testing.assert_array_equal(
        device.to_host(result).astype("float32"), [bias.astype(low).astype("float32")] * 3
    )


VIEWS = {
    "all": lambda xp, x: x,
    "turned": lambda xp, x: x.transpose(2, 0, 1, 3),
    "every other one": lambda xp, x: x[::-1, 1::2],
    "slices of rows": lambda xp, x: x[:, :, :3, 8:-9],
    "first columns": lambda xp, x: x[..., :16],
    "every other column": lambda xp, x: x[..., ::2],
    "one column": lambda xp, x: x[..., 0],
    "one row, repeated": lambda xp, x: xp.broadcast_to(x[:1], x.shape),
    "columns first": lambda xp, x: x.transpose(3, 2, 1, 0),
}


@pytest.mark.parametrize("target", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("columns", [32, 19])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_copies_are_the_hosts(device, view, columns, source, target):
    """Bit for bit, in packs of 16 bytes or one by one, to an array and to the middle of one."""
    dtype = dtype_named(target)
    x = np.random.default_rng(0).uniform(-2, 2, (4, 6, 5, columns)).astype(dtype_named(source))
    given, shape = view(device.xp, device.asarray(x)), view(np, x).shape
    for before, after in ((0, 0), (16, 16), (16, 1)):
        right = np.zeros((*shape[:-1], before + shape[-1] + after), dtype)
        result, middle = device.asarray(right), slice(before, before + shape[-1])
        right[..., middle] = view(np, x)
        copy(result[..., middle], given)
        np.testing.assert_array_equal(device.to_host(result).astype("f8"), right.astype("f8"))


@pytest.mark.parametrize("bias", [True, False])
def test_relu_stops_gradients_at_0(device, bias):
    """Of small whole numbers, whose products are often 0 and always exact: as on the host, to the
    last bit.
    """
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-1, 2, shape).astype("float32") for shape in ((9, 4), (4, 6), (6,))][
        : 2 + bias
    ]
    results = []
    for backend in (device, numpy_backend()):
        leaves = [Tensor(backend.asarray(array), requires_grad=True) for array in arrays]
        y = ops.relu(ops.linear(*leaves))
        y.backward(backend.asarray(np.arange(54, dtype="float32").reshape(9, 6)))
        results.append(
            [backend.to_host(item) for item in (y.data, *(leaf.grad for leaf in leaves))]
        )
    for ours, host in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, host)


@pytest.mark.parametrize(
    "function, gates, biases",
    [(ops.lstm, 4, ()), (partial(ops.lstm, reverse=True), 4, ()), (ops.gru, 3, (3,))],
    ids=["lstm", "lstm backwards", "gru"],
)
def test_a_time_step_is_a_product_and_a_kernel(device, function, gates, biases):
    """Each way: so much more work is on the device's streams for a longer sequence. A first state
    and strided gradients make no difference.
    """
    if not INTERPRETED:
        pytest.skip("the interpreted device alone counts its work")

    def counts(time):
        sizes = (2, time, 5), (5, gates * 3), (3, gates * 3), (gates * 3,), biases, (2, 3)
        x, *rest = (
            Tensor(device.asarray(np.ones(size, "float32")), requires_grad=True)
            for size in sizes
            if size
        )
        *parameters, first = rest
        marks = [interpreted.enqueued()]
        y = function(x, *parameters, state=first if biases else (first, first))
        marks.append(interpreted.enqueued())
        y.backward(device.asarray(np.ones((2, 2 * time, 3), "float32"))[:, ::2])
        return [*np.diff([*marks, interpreted.enqueued()])]

    counts(3)
    short, long = counts(3), counts(13)
    assert [b - a for a, b in zip(short, long, strict=True)] == [2 * 10, 2 * 10]
