"""Products of matrices: any shapes, strides, broadcast axes and dtypes, on NumPy and on the double
of a device.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nnmpi.backend.gemm import gemm
from nnmpi.backend.precision import bfloat16, use_precision
from nnmpi.backend.program.record import bare
from nnmpi.backend.program.replay import Arena, StepProgram
from nnmpi.backend.recording import Recorder
from nnmpi.base.errors import DeviceError, DtypeError, ShapeError
from tests.device.library import load
from tests.harness.refusals import refuses, usage_error

GEMM = import_module("nnmpi.backend.gemm")
BFLOAT16 = bfloat16()
KINDS = [
    ("float32", "float32"),
    ("float64", "float64"),
    ("float16", "float16"),
    ("float16", "float32"),
    (BFLOAT16, BFLOAT16),
    (BFLOAT16, "float32"),
]
ON_NUMPY = [*KINDS[:2], ("int32", "int32")]


@dataclass
class Layout:
    """How an array lies in memory.

    Attributes:
        order: its axes from the one that is furthest apart to the nearest.
        steps: per axis, of the slice by which it is taken from a larger array.
        slack: per axis, how much longer that one is.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    slack: tuple[int, ...]

    def place(self, xp, values, dtype):
        """Return an array of these values that lies so."""
        shape = [
            values.shape[axis] * abs(self.steps[axis]) + self.slack[axis] for axis in self.order
        ]
        slices = tuple(
            slice(0, values.shape[axis] * abs(self.steps[axis]), abs(self.steps[axis]))
            for axis in self.order
        )
        mirrored = tuple(
            slice(None, None, -1 if self.steps[axis] < 0 else 1) for axis in range(values.ndim)
        )
        back = np.argsort(self.order)
        # nobody is to read that
        base = np.full(shape, 7 if dtype == "int32" else np.nan).astype(dtype)
        base[slices].transpose(back)[mirrored][...] = values
        return xp.asarray(base)[slices].transpose(tuple(int(axis) for axis in back))[mirrored]


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> Layout:
    """Any, most of them such as occur: matrices in rows or columns, heads between batch and
    time.
    """
    order = draw(st.permutations(range(ndim)))
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, -1]), min_size=ndim, max_size=ndim))
    slack = draw(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=ndim, max_size=ndim))
    return Layout(tuple(order), tuple(steps), tuple(slack))


@dataclass
class Case:
    """One product: shapes, layouts, whether it is added, and the kind."""

    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    layouts: tuple[Layout, Layout, Layout]
    add: bool
    kind: tuple[Any, Any]
    seed: int


@st.composite
def cases(draw: st.DrawFn, kinds: list[tuple[Any, Any]]) -> Case:
    """Any products of up to three leading axes."""
    n, k, m = (draw(st.integers(0, 4)) for _ in range(3))
    leading = draw(st.lists(st.integers(1, 3), max_size=3))
    first = [draw(st.sampled_from([length, length, 1])) for length in leading]
    other = [
        1 if length == 1 and mine != 1 else length
        for length, mine in zip(leading, first, strict=True)
    ]
    other = [draw(st.sampled_from([length, 1])) if mine == length else length
             for length, mine in zip(other, first, strict=True)]  # fmt: skip
    other = other[
        draw(st.integers(0, len(other)))
        if all(x == y for x, y in zip(first, leading, strict=True))
        else 0 :
    ]
    shapes = (
        (*first, n, k),
        (*other, k, m),
        (*np.broadcast_shapes(tuple(first), tuple(other)), n, m),
    )
    lies = tuple(draw(layouts(len(shape))) for shape in shapes)
    return Case(
        shapes, lies, draw(st.booleans()), draw(st.sampled_from(kinds)), draw(st.integers(0, 99))
    )  # type: ignore[arg-type]


def check(xp, case):
    """Compare the product with that of float64."""
    generator = np.random.Generator(np.random.PCG64(case.seed))
    a, b, out = (generator.integers(-3, 4, shape).astype(np.float64) for shape in case.shapes)
    expected = a @ b + (out if case.add else 0)
    dtypes = case.kind[0], case.kind[0], case.kind[1]
    places = [
        lay.place(xp, v, t) for lay, v, t in zip(case.layouts, (a, b, out), dtypes, strict=True)
    ]
    if not case.add:
        places[2].fill(7 if case.kind[1] == "int32" else np.nan)
    result = gemm(places[0], places[1], out=places[2], add=case.add)
    assert result is places[2]
    host = result if xp is np else result.get()
    assert host.dtype == case.kind[1]
    np.testing.assert_array_equal(host.astype(np.float64), expected)
    if not case.add:
        fresh = gemm(places[0], places[1], dtype=case.kind[1])
        assert fresh.dtype == case.kind[1]
        np.testing.assert_array_equal(
            (fresh if xp is np else fresh.get()).astype(np.float64), expected
        )


def plain(*shape):
    """A C-contiguous layout."""
    return Layout(tuple(range(len(shape))), (1,) * len(shape), (0,) * len(shape))


HEADS = Layout(
    (0, 2, 1, 3), (1,) * 4, (0,) * 4
)  # (batch, heads, time, width), as a view of (batch, time, heads, width)
ATTENTION = Case(
    ((2, 3, 4, 5), (2, 3, 5, 4), (2, 3, 4, 4)),
    (HEADS, HEADS, plain(2, 3, 4, 4)),
    False,
    KINDS[4],
    0,
)


@given(cases(ON_NUMPY))
def test_on_numpy(case):
    """The product, or the sum, exactly: whole numbers leave nothing to rounding."""
    check(np, case)


@settings(max_examples=300)
@example(ATTENTION)
@given(cases([*KINDS, ("int32", "int32")]))
def test_on_the_device_by_cublas(case):
    """The double of cuBLAS refuses what cuBLAS refuses, and reads no further than the arrays."""
    check(load(), case)


def test_numpys_own_calls():
    """On NumPy's float32 and float64 it is the call that it was: dot for matrices, matmul for
    stacks.
    """

    a, out = np.ones((3, 3), np.float32), np.empty((3, 3), np.float32)
    for arguments, calls in (
        ((a, a), ["dot"]),
        ((a, a, out), ["dot"]),
        ((a, a, out, True), ["dot", "add"]),
        ((a[None], a[None]), ["matmul"]),
        ((a[:, :2], a[:2], out[:, :]), ["dot"]),
        ((a[:, :2], a[:2, :2], out[:, :2]), ["matmul"]),
    ):
        recorder = Recorder()
        with recorder.running():
            gemm(*map(recorder.wrap, arguments))
        assert [call.function.__name__ for call in recorder.calls] == calls


# (m, k, n), which of the matrices are column-major, and whether Intel's processors and others take
# strips
STRIPS = [
    ((2, 700, 1000), "", False, True),
    ((32, 256, 1024), "", False, True),
    ((33, 300, 257), "", False, True),
    ((33, 300, 257), "b", True, True),
    ((33, 990, 192), "b", True, True),
    ((128, 128, 90), "", False, True),
    ((128, 128, 90), "b", False, False),
    ((31, 5000, 17), "a", False, False),
    ((300, 300, 300), "", False, False),
    ((9, 9, 9), "", False, False),
]


@pytest.mark.parametrize("shape, columns, on_intel, elsewhere", STRIPS)
@pytest.mark.parametrize("intel", [False, True])
def test_strips_give_the_product(intel, shape, columns, on_intel, elsewhere, monkeypatch):
    """Whatever code OpenBLAS runs: into new arrays and given ones, added, and in a recording;
    arrays that are neither row- nor column-major are one product.
    """
    monkeypatch.setattr(GEMM, "has_small_products", lambda: True)
    monkeypatch.setattr(GEMM, "_strip_width", GEMM._strip_width.__wrapped__)
    monkeypatch.setattr(GEMM, "is_intel", lambda: intel)
    monkeypatch.setattr("nnmpi.backend.onednn.for_float32", lambda: None)
    calls = []
    by_strips = GEMM._by_strips
    monkeypatch.setattr(GEMM, "_by_strips", lambda *args: (calls.append(1), by_strips(*args))[1])
    draw, (m, k, n) = np.random.default_rng(0), shape
    a, b = (
        np.float32(draw.integers(-9, 9, (y, x) if name in columns else (x, y)))
        for name, (x, y) in (("a", (m, k)), ("b", (k, n)))
    )
    a, b = (x.T if name in columns else x for name, x in (("a", a), ("b", b)))
    expected = (a.astype("int64") @ b.astype("int64")).astype("float32")
    out = np.empty((m, n), np.float32)
    recorder = Recorder()
    with recorder.running():
        given = map(recorder.wrap, (a, b))
        x, y = given
        np.testing.assert_array_equal(bare(gemm(x, y)), expected)
        gemm(x, y, recorder.wrap(out))
        gemm(x, y, recorder.wrap(out), add=True)
    out[...] = 0
    StepProgram(recorder, Arena()).replay()
    np.testing.assert_array_equal(out, 2 * expected)
    in_strips = on_intel if intel else elsewhere
    assert len(calls) == 6 * in_strips
    out[...] = 0
    times = GEMM.multiplier(b)
    times(a, out)
    np.testing.assert_array_equal(out, expected)
    times(a, out, add=True)
    np.testing.assert_array_equal(out, 2 * expected)
    calls.clear()
    wide = np.zeros((m, n + 1), np.float32)[:, :n]
    np.testing.assert_array_equal(gemm(a, b, wide), expected)
    np.testing.assert_array_equal(gemm(a, np.repeat(b, 2, 1)[:, ::2]), expected)
    assert len(calls) == in_strips
    for other in ((m + 1, n), (n, m) if n != m else (1, n), (2, m, n)):
        with pytest.raises(ValueError):
            gemm(a, b, np.empty(other, np.float32))


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16], ids=str)
def test_half_precision_adds_up_in_float32_and_rounds_once(dtype):
    """1 + 2^-11 four thousand times is lost in half precision; a sum rounded once is to the
    nearest, ties to even.
    """
    xp = load()
    ones = xp.ones((1, 4096), dtype)
    small = xp.asarray(np.full((4096, 1), 2.0**-11).astype(dtype))
    assert float(gemm(ones, small)[0, 0]) == 2.0
    # between two numbers that there are
    tie = {np.dtype("float16"): 2049.0, BFLOAT16: 257.0}[np.dtype(dtype)]
    result = gemm(
        ones[:, :1], ones[:1, :1], out=xp.asarray(np.array([[tie - 1]]).astype(dtype)), add=True
    )
    assert float(result[0, 0]) == tie - 1


@pytest.mark.parametrize("mode", ["tf32", "bf16", "fp16"])
def test_tf32_where_it_is_asked_for(mode):
    """Operands of float32 lose 13 bits in modes that allow it, and those of float64 none."""
    cupy = load()
    value = np.array([[1 + 2.0**-20]])
    item = cupy.ones((1, 1), "float32")
    assert float(gemm(cupy.asarray(value.astype("float32")), item)[0, 0]) == value[0, 0]
    with use_precision(mode):
        assert float(gemm(cupy.asarray(value.astype("float32")), item)[0, 0]) == 1
        assert float(gemm(cupy.asarray(value), cupy.ones((1, 1)))[0, 0]) == value[0, 0]


@pytest.mark.parametrize(
    "on_device, dtype", [(False, "float32"), (True, "float32"), (True, BFLOAT16)], ids=str
)
def test_a_recording_multiplies_again(on_device, dtype):
    """Replayed with other values in the operands, and in the mode of the recording."""
    xp = load() if on_device else np
    a, b = xp.ones((2, 3), dtype), xp.ones((3, 2), dtype)
    total = xp.zeros((2, 2), "float32")
    recorder = Recorder()
    with recorder.running(), use_precision("tf32"):
        x, y = map(recorder.wrap, (a, b))
        result = bare(gemm(x, y))
        gemm(x, y, out=recorder.wrap(total), add=True)
    a[...] = 1 + 2.0**-20 if dtype == "float32" else 2
    StepProgram(recorder, Arena()).replay()
    rounded = 3 if on_device else np.float32(3 * (1 + 2.0**-20))
    item = rounded if dtype == "float32" else 6
    np.testing.assert_array_equal(
        (result if xp is np else result.get()).astype("float32"), np.full((2, 2), item)
    )
    np.testing.assert_array_equal(
        (total if xp is np else total.get()).astype("float32"),
        np.full((2, 2), np.float32(3 + item)),
    )


def test_what_is_no_product():
    """One sentence with the shapes or dtypes."""
    xp = load()
    half, single = xp.ones((2, 3), "float16"), xp.ones((3, 2), "float32")
    refuses(DtypeError, "float16 cannot be multiplied by float32", gemm, half, single)
    refuses(ShapeError, r"shapes \(2, 3\) and \(2, 3\) cannot be multiplied", gemm, half, half)
    refuses(
        ShapeError,
        "leading axes do not broadcast",
        lambda: gemm(xp.ones((2, 2, 3), "float16"), xp.ones((3, 3, 2), "float16")),
    )
    refuses(
        ShapeError,
        r"is \(2, 2\), but `out` has \(3, 3\)",
        lambda: gemm(half, xp.ones((3, 2), "float16"), out=xp.ones((3, 3), "float16")),
    )
    refuses(
        DtypeError,
        "cannot be written to float64",
        lambda: gemm(half, xp.ones((3, 2), "float16"), out=xp.ones((2, 2), "float64")),
    )
    usage_error("give `out`", lambda: gemm(half, xp.ones((3, 2), "float16"), add=True))
    usage_error("give `out`", gemm, single, single.T, add=True)


def test_an_array_of_the_host_among_the_devices():
    """It says which, whether this combination of shapes was seen before or not."""
    cupy = load()
    device, host = cupy.ones((2, 2), "float32"), np.ones((2, 2), "float32")
    for _ in range(2):
        for a, b in ((host, device), (device, host)):
            refuses(
                DeviceError,
                r"host's memory \(input . \(shape \(2, 2\), float32\)\).*asarray",
                gemm,
                a,
                b,
            )
        gemm(device, device)
        refuses(
            DeviceError,
            r"host's memory \(input 2 \(shape \(2, 2\), float32\)\)",
            gemm,
            device,
            device,
            out=host,
        )
