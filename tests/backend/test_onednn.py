"""Products and convolutions by oneDNN, where it makes bfloat16 fast: as NumPy computes them from
rounded operands; and products in float32.
"""

import os
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnmpi
from nnmpi import Tensor, nn, ops, optim, simulate, use_precision
from nnmpi.backend import gemm, onednn
from nnmpi.backend.blas import loaded_pools
from nnmpi.backend.gemm import rounded_once
from nnmpi.backend.precision import describe_products, round_to_bfloat16
from nnmpi.base.errors import DeviceError
from nnmpi.ops.conv.algorithm import ConvSpec, Gradients
from nnmpi.ops.conv.depthwise import Depthwise
from nnmpi.ops.conv.im2col import Im2col
from nnmpi.ops.conv.rounded import ByOnednn, ByProducts, Rounded
from tests.backend.test_gemm import cases, check

pytestmark = pytest.mark.host_only("the processor's products")
HERE = pytest.mark.skipif(onednn.installed() is None, reason=f"oneDNN {onednn.find().reason}")
LOADED = pytest.mark.skipif(onednn.find().library is None, reason=f"oneDNN {onednn.find().reason}")
NEAR = 1e-5  # of sums of a few hundred products in float32, relative to the largest


def draw(*shape, seed=0):
    """Return normal numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def check_near(found, exact):
    """Fail if an array differs by more than float32's sums do."""
    assert found.shape == exact.shape
    assert np.abs(found - exact).max(initial=0) <= NEAR * max(1, np.abs(exact).max(initial=0))


LIES = "rows", "columns", "axes apart", "every second", "reversed", "repeated"


@st.composite
def stacks(draws):
    """Return the shapes of two stacks of matrices and of their product, and how each lies."""
    n, k, m, *outer = (draws(st.integers(1, 9)) for _ in range(5))
    ndim = draws(st.integers(0, 2))
    full = tuple(outer[:ndim])
    left, right = (tuple(draws(st.sampled_from((1, size))) for size in full) for _ in range(2))
    product = tuple(map(max, left, right))
    shapes = (*left, n, k), (*right, k, m), (*product, n, m)
    *lies, last = (draws(st.sampled_from(LIES)) for _ in range(3))
    # nobody writes to what is repeated
    return shapes, lies, "rows" if last == "repeated" else last, draws(st.booleans())


def placed(x, lie):
    """Return an array's values in memory of another order."""
    if lie == "columns":
        return x.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    if lie == "axes apart":
        return np.moveaxis(np.moveaxis(x, 0, -2).copy(), -2, 0)
    if lie == "every second":
        return np.repeat(x, 2, axis=-1)[..., ::2]
    if lie == "reversed":
        return x[..., ::-1].copy()[..., ::-1]
    if lie == "repeated":
        return np.broadcast_to(x[..., :1, :], x.shape)
    return x


@HERE
@settings(max_examples=200, deadline=None)
@given(stacks())
def test_any_product(case):
    """Of any shapes and strides, written or added."""
    (*shapes, shape), lies, last, add = case
    a, b = (placed(draw(*item), lie) for item, lie in zip(shapes, lies, strict=True))
    out = placed(draw(*shape), last)
    exact = np.matmul(round_to_bfloat16(a), round_to_bfloat16(b)) + (out if add else 0)
    onednn.multiply(a, b, out, add)
    check_near(out, exact)
    low = onednn.rounded(b)
    again = np.zeros_like(out)
    onednn.multiply(a, low, again, False)
    check_near(again, np.matmul(round_to_bfloat16(a), round_to_bfloat16(b)))


@HERE
@pytest.mark.parametrize("lie", LIES)
def test_an_operand_that_is_rounded_once_gives_the_same_bits(lie):
    """In whatever order it lies, and as either operand."""
    x, right, left = placed(draw(96, 80), lie), draw(80, 64), draw(64, 96)
    low = rounded_once(x, x.size * 64)
    assert low.dtype == np.uint16 and low.flags.c_contiguous
    np.testing.assert_array_equal(
        gemm.gemm(low, right, rounds=True), gemm.gemm(x, right, rounds=True)
    )
    np.testing.assert_array_equal(
        gemm.gemm(left, low, rounds=True), gemm.gemm(left, x, rounds=True)
    )
    assert rounded_once(x, gemm.LOW - 1) is x


@HERE
def test_a_linear_layer_rounds_each_array_once(monkeypatch):
    """x and the result's gradient, though each is in two products; x may be a transposed view."""
    sizes, lower = [], onednn.lower
    monkeypatch.setattr(onednn, "lower", lambda x, out: (sizes.append(x.size), lower(x, out))[1])
    layer = nn.Linear(96, 64).initialize(seed=0)
    x, grad = Tensor(draw(4, 96, 32), requires_grad=True), draw(4, 32, 64, seed=1)
    with use_precision("bf16"):
        y = layer(x.swapaxes(1, 2))
        y.backward(grad)
    assert sizes == [x.size, y.size]
    rows, weight, sent = (
        round_to_bfloat16(item)
        for item in (x.data.swapaxes(1, 2).reshape(-1, 96), layer.weight.data, grad.reshape(-1, 64))
    )
    check_near(y.data.reshape(-1, 64), rows @ weight + layer.bias.data)
    check_near(layer.weight.grad, rows.T @ sent)
    check_near(x.grad, (sent @ weight.T).reshape(4, 32, 96).swapaxes(1, 2))


@HERE
@pytest.mark.parametrize("layer, gates", [(nn.LSTM, 4), (nn.GRU, 3)])
def test_a_recurrent_layer_rounds_all_steps_once(layer, gates, monkeypatch):
    """x, and the gates' gradient, of which a GRU has a second one in a single product."""
    sizes, lower = [], onednn.lower
    monkeypatch.setattr(onednn, "lower", lambda x, out: (sizes.append(x.size), lower(x, out))[1])
    x = Tensor(draw(16, 8, 48), requires_grad=True)
    with use_precision("bf16"):
        y = layer(48, 32).initialize(seed=0)(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    assert sizes == [x.size, 16 * 8 * gates * 32]


@HERE
def test_nothing_to_add_up():
    out = np.ones((3, 2), np.float32)
    onednn.multiply(draw(3, 0), draw(0, 2), out, True)
    assert (out == 1).all()
    onednn.multiply(draw(3, 0), draw(0, 2), out, False)
    assert (out == 0).all()


CONVOLUTIONS = [
    # images, kernel, outputs, spec
    ((2, 9, 8, 3), (3, 3), 5, ConvSpec((3, 3), (1, 1), (1, 1))),
    ((2, 9, 8, 4), (3, 2), 6, ConvSpec((3, 2), (2, 1), (1, 0), (1, 2), 2)),
    ((3, 8, 8, 8), (3, 3), 8, ConvSpec((3, 3), (1, 1), (1, 1), (1, 1), 8)),
    ((2, 16, 16, 16), (3, 3), 32, ConvSpec((3, 3), (2, 2), (1, 1))),
    ((2, 8, 8, 16), (1, 1), 16, ConvSpec((1, 1))),
    ((4, 12, 12, 1), (5, 5), 6, ConvSpec((5, 5), (1, 1), (2, 2))),  # of one channel: LeNet's
    # of large kernels, for few pixels: products; and of slow image gradients
    ((3, 2, 3, 96), (3, 3), 80, ConvSpec((3, 3), (1, 1), (1, 1))),
    ((3, 5, 4, 96), (3, 3), 80, ConvSpec((3, 3), (2, 2), (1, 1))),
    ((3, 4, 4, 96), (3, 3), 80, ConvSpec((3, 3), (1, 1), (1, 1))),
    ((3, 9, 8, 16), (3, 3), 16, ConvSpec((3, 3), (2, 2), (1, 1), (1, 1), 16)),
]


@HERE
@pytest.mark.parametrize("images, kernel, outputs, spec", CONVOLUTIONS)
def test_all_passes_of_a_convolution(images, kernel, outputs, spec):
    """With strides, borders, holes and groups, of one channel, too; and the bias."""
    x, weight = draw(*images), draw(*kernel, images[3] // spec.groups, outputs)
    bias, y = draw(outputs), np.empty((images[0], *spec.pooled_size(*images[1:3]), outputs), "f4")
    grad, results = draw(*y.shape, seed=1), []
    assert onednn.convolves(images, weight.shape, y.shape, spec[1:5])
    exact = (Depthwise if spec.groups == images[3] > 1 else Im2col)(spec)
    ways = [ByOnednn(exact, weight.shape, y.shape, is_amx) for is_amx in (True, False)]
    products = [ByProducts(spec)] if spec.groups == 1 else []
    for algorithm in (*ways, *products, Rounded(Im2col(spec))):
        kept = algorithm.forward(x, weight, bias, y, True)
        out = Gradients(*(np.empty_like(item) for item in (x, weight, bias)))
        algorithm.backward(grad, x, weight, kept, out)
        results.append([y.copy(), *out])
    for found in results[:-1]:
        for array, right in zip(found, results[-1], strict=True):
            check_near(array, right)
    np.testing.assert_allclose(results[0][3], grad.sum((0, 1, 2)), rtol=1e-4, atol=1e-4)


@HERE
def test_what_it_refuses_is_a_sentence_with_the_shape(monkeypatch):
    def refuse(*_):
        return 1

    session = onednn._Session(onednn.installed())
    monkeypatch.setattr(onednn._local, "session", session)
    monkeypatch.setattr(session.functions, "dnnl_primitive_create", refuse)
    with pytest.raises(DeviceError, match=r"\(31, 32\): out of memory"):
        onednn.multiply(draw(31, 32), draw(32, 33), np.empty((31, 33), np.float32), False)


@HERE
def test_the_table_of_primitives_is_bounded(monkeypatch):
    monkeypatch.setattr(onednn, "PRIMITIVES", 3)
    session = onednn._Session(onednn.installed())
    monkeypatch.setattr(onednn._local, "session", session)
    for n in (5, 6, 7, 8, 5):
        out = np.empty((n, n), np.float32)
        onednn.multiply(draw(n, n), np.eye(n, dtype="f4"), out, False)
        np.testing.assert_array_equal(out, round_to_bfloat16(draw(n, n)))
    assert len(session._made) == 3


@HERE
def test_threads_at_once():
    """Each has its own stream and scratch memory."""
    a, b = draw(64, 300), draw(300, 48)
    exact, wrong = round_to_bfloat16(a) @ round_to_bfloat16(b), []

    def work(factor):
        for _ in range(200):
            out = np.empty((64, 48), np.float32)
            onednn.multiply(a * factor, b, out, False)
            if not np.allclose(out, exact * factor, atol=1e-3):
                wrong.append(factor)

    threads = [threading.Thread(target=work, args=(2.0**i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@HERE
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_multiplies():
    """Though OpenMP's threads stay with the parent."""
    a, out = draw(256, 256), np.empty((256, 256), np.float32)
    with loaded_pools().limit(limits=2, user_api="blas"):
        onednn.multiply(a, a, out, False)
        child = os.fork()
        if not child:
            again = np.empty_like(out)
            onednn.multiply(a, a, again, False)
            os._exit(0 if np.allclose(again, out, atol=1e-3) else 1)
        assert os.waitpid(child, 0)[1] == 0


@HERE
def test_the_bits_repeat():
    a, b = draw(300, 200), draw(200, 100)
    first, second = (np.empty((300, 100), np.float32) for _ in range(2))
    onednn.multiply(a, b, first, False)
    simulate(lambda _: onednn.multiply(a, b, second, False), ranks=1)
    assert first.tobytes() == second.tobytes()


@pytest.fixture
def searched(monkeypatch):
    """Return a function that looks for the library anew."""
    onednn.find.cache_clear()
    yield onednn.find
    monkeypatch.undo()
    onednn.find.cache_clear()


def test_why_there_is_none(searched, monkeypatch):
    """The sentence names the file of the environment, or how to install it."""
    monkeypatch.setenv("NNMPI_ONEDNN", "/nowhere/libdnnl.so.3")
    assert "cannot be loaded from NNMPI_ONEDNN=/nowhere" in searched().reason
    assert "by NumPy, slower than float32: oneDNN cannot be loaded" in describe_products()
    searched.cache_clear()
    monkeypatch.delenv("NNMPI_ONEDNN")
    monkeypatch.setattr(onednn, "_installed", list)
    monkeypatch.setattr(onednn, "NAME", "libdnnl-that-nobody-has.so.3")
    assert searched().reason == "is not installed: pip install onednn-cpu-gomp"


@HERE
def test_other_versions_and_processors(searched, monkeypatch):
    library = onednn.installed()
    known = library.functions.dnnl_version().contents
    monkeypatch.setattr(onednn, "OLDEST", (4, 0))
    assert "is not 3.2" in onednn._library(library.functions, known)
    monkeypatch.undo()
    monkeypatch.setattr(onednn, "UNITS", {})
    assert onednn._library(library.functions, known).unit == ""
    searched.cache_clear()
    assert "no instructions for bfloat16" in searched().reason and onednn.installed() is None


@HERE
def test_layers_multiply_by_it(monkeypatch):
    """Both passes of a linear layer whose products are large enough: three products."""
    calls, multiply = [], onednn.multiply
    monkeypatch.setattr(gemm.onednn, "multiply", lambda *a: (calls.append(1), multiply(*a)))
    layer = nn.Linear(128, 96).initialize(seed=0)
    with use_precision("bf16"):
        x = layer(draw(64, 128)).sum()
        x.backward()
    assert len(calls) == 2  # the input needs no gradient


# ---- float32


@contextmanager
def every_float32_product():
    """Let oneDNN have float32 products of any size, on any processor; yield a list of them."""
    calls, multiply = [], onednn.multiply_exactly

    def counted(a, b, out, add):
        calls.append(out.shape)
        multiply(a, b, out, add)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "for_float32", lambda: onednn.find().library)
        patch.setattr(onednn, "LEAST", 1)
        patch.setattr(onednn, "multiply_exactly", counted)
        yield calls


@LOADED
@settings(max_examples=300, deadline=None)
@given(case=cases([("float32", "float32"), ("float64", "float64")]))
def test_any_float32_product(case):
    """Exactly what NumPy gives, of any shapes (0 among them) and strides, written or added."""
    with every_float32_product():
        check(np, case)


@LOADED
@pytest.mark.parametrize("turned", [(), (0,), (1,), (0, 1)])
def test_float32_products_are_its(turned):
    """Without them the test above could pass by NumPy alone."""
    a, b = (
        placed(x.astype(np.float32), "columns" if i in turned else "rows")
        for i, x in enumerate((np.eye(3, 4), np.arange(20.0).reshape(4, 5)))
    )
    out = np.ones((3, 5), np.float32)
    with every_float32_product() as products:
        gemm.gemm(a, b, out, add=True)
    assert products == [(3, 5)]
    np.testing.assert_array_equal(out, 1 + a @ b)


def test_which_float32_products_stay_with_numpy():
    """Small ones, other dtypes, stacks, what lies neither in rows nor in columns, a result in
    columns, large ones of a transposed first matrix, and what is no product.
    """
    large, small = np.ones((256, 256), np.float32), np.ones((64, 64), np.float32)
    assert onednn.takes(large, large, None) and onednn.takes(large.T, large, large)
    apart, wide = np.ones((512, 512), np.float32)[::2, ::2], np.ones((256, 4096), np.float32)
    assert onednn.takes(wide, wide.T, None)
    for a, b, out in [
        (small, small, None),
        (large.astype(int), large.astype(int), None),
        (large.astype(float), large.astype(float), None),
        (large, large.astype(float), None),
        (large[None], large[None], None),
        (apart, large, None),
        (large, large, large.T),
        (large, large, small),
        (large, large, large.astype(float)),
        (wide.T, wide, None),
        (large, small, None),
    ]:
        assert not onednn.takes(a, b, out)


@LOADED
@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_step_in_float32(compiled):
    """Attention, products of tensors and linear layers, compiled and not: NumPy's losses but for
    rounding.
    """

    def losses():
        model = nn.Sequential(nn.TransformerBlock(8, 2, 16), nn.Linear(8, 3)).initialize(seed=0)
        optimizer = optim.SGD(model.storage, lr=0.1)
        x = draw(2, 5, 8)

        def step(values):
            model.zero_grad()
            with nn.training():
                y = model(values)
                loss = ops.mse(y @ y.transpose(0, 2, 1), np.ones((2, 5, 5), np.float32))
            loss.backward()
            optimizer.step()
            return loss

        run = nnmpi.compile(step) if compiled else step
        return [run(Tensor(x)).item() for _ in range(3)]

    with every_float32_product() as products:
        found = losses()
    assert products
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "for_float32", lambda: None)
        np.testing.assert_allclose(found, losses(), rtol=1e-5)
