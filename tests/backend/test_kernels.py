"""Compiled kernels: each against a float64 reference, and how they are switched on, kept on disk, and done without."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from nnmpi.backend.kernels.lookup import compiled_kernels, jit
from nnmpi.errors import UsageError
from tests.harness.slow import KERNELS

SIZES = [1, 2, 15, 16, 17, 100]


@pytest.fixture
def compiled():
    """The kernels of this process."""
    pytest.importorskip("numba")
    with jit():
        yield compiled_kernels().functions


def draw(*shape, seed=0):
    """Return float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def close(found, expected, least=1e-3):
    """Compare with a float64 reference, whose size is at least `least`."""
    scale = abs(expected).max(initial=least)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * scale)


# ---------------------------------------------------------------- switching


def test_off_unless_switched_on():
    """Nested contexts switch on and off, and each puts back what was before, after an error too."""
    pytest.importorskip("numba")
    assert compiled_kernels() is None
    with jit():
        first = compiled_kernels()
        assert first is not None
        with jit(False):
            assert compiled_kernels() is None
        with pytest.raises(ZeroDivisionError), jit(False):
            raise ZeroDivisionError
        assert compiled_kernels() is first
        seen = []
        thread = threading.Thread(target=lambda: seen.append(compiled_kernels()))
        thread.start()
        thread.join()
        assert seen == [None]  # a mode of the context, not of the process
    assert compiled_kernels() is None


def run(program, **environment):
    """Run a program in a process of its own and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_numba():
    """All but `jit` works, and `jit` says what to install."""
    program = """
import sys
sys.modules["numba"] = None
import numpy as np
import nnmpi
from nnmpi import nn, ops, optim
from nnmpi.backend.kernels.lookup import jit
model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
model.initialize(0)
ops.cross_entropy(model(nnmpi.Tensor(np.ones((2, 4, 4, 1), np.float32))), np.array([0, 1])).backward()
optim.Adam(model.storage).step()
with jit(False):
    pass
try:
    with jit():
        pass
except nnmpi.NnmpiError as error:
    print(error)
"""
    words = run(program)
    assert "numba" in words
    assert "nnmpi[jit]" in words


@pytest.mark.slow(KERNELS)
def test_the_next_process_finds_the_machine_code(tmp_path):
    """Kernels for given sizes too: numba tells them apart by the sizes, and knows them again."""
    pytest.importorskip("numba")
    program = """
import numba
from nnmpi.backend.kernels.lookup import compiled_kernels, jit
with jit():
    k = compiled_kernels().functions
    found = [k.sgd, *k.direct(2, 4, 1, 3), *k.direct(4, 2, 1, 3)]
print(sum(sum(f.stats.cache_hits.values()) for f in found), sum(sum(f.stats.cache_misses.values()) for f in found))
"""
    assert run(program, NUMBA_CACHE_DIR=str(tmp_path)) == "0 5"
    assert run(program, NUMBA_CACHE_DIR=str(tmp_path)) == "5 0"


@pytest.mark.slow(KERNELS)
def test_a_changed_helper_is_noticed(tmp_path):
    """Machine code made from another state of the folder is not used, though the kernel's own file is the same."""
    pytest.importorskip("numba")
    program = """
import sys
from nnmpi.backend.jit import build, loops
build.sources = lambda: sys.argv[0] + "{}"
sgd = build.build(loops.sgd, build.write(1), build.read(1), build.float64, build.float64)
print(sum(sgd.stats.cache_hits.values()), sum(sgd.stats.cache_misses.values()))
"""
    found = [run(program.format(state), NUMBA_CACHE_DIR=str(tmp_path)) for state in ("old", "old", "new")]
    assert found == ["0 1", "1 0", "0 1"]


def test_one_process_compiles_and_the_others_load(tmp_path):
    """Of several at once; the others have waited."""
    pytest.importorskip("numba")
    program = """
from nnmpi.backend.kernels.lookup import compiled_kernels, jit
with jit():
    print(sum(compiled_kernels().functions.softmax_loss.stats.cache_misses.values()))
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert sorted(process.communicate(timeout=100)[0].strip() for process in running) == ["0", "0", "1"]


def test_where_no_lock_can_be_had(tmp_path):
    """Compiling works without it."""
    pytest.importorskip("numba")
    program = """
from nnmpi.backend.kernels.lookup import compiled_kernels, jit
with jit():
    compiled_kernels().functions.sgd
print("well")
"""
    (tmp_path / f"nnmpi-compile-{os.getuid()}.lock").mkdir()
    assert run(program, TMPDIR=str(tmp_path)) == "well"


def test_where_nothing_can_be_kept(tmp_path):
    """Each process compiles for itself."""
    pytest.importorskip("numba")
    program = """
from nnmpi.backend.jit import build, loops

class Nowhere:
    def __init__(self, function):
        raise RuntimeError("no locator available")

build._Cache = Nowhere
sgd = build.build(loops.sgd, build.write(1), build.read(1), build.float64, build.float64)
print(sum(sgd.stats.cache_hits.values()), len(sgd.signatures))
"""
    assert run(program, NUMBA_CACHE_DIR=str(tmp_path)) == "0 1"


def test_what_does_not_fit_is_refused(compiled):
    """Another dtype, or an array with gaps: never converted silently."""
    with pytest.raises(TypeError):
        compiled.sgd(np.zeros(3), np.zeros(3), 0.1, 0.0)
    with pytest.raises(TypeError):
        compiled.sgd(np.zeros(6, np.float32)[::2], np.zeros(3, np.float32), 0.1, 0.0)


def test_what_is_only_read_may_be_read_only(compiled):
    """As arrays from files often are."""
    grad = draw(3)
    grad.flags.writeable = False
    data = np.zeros(3, np.float32)
    compiled.sgd(data, grad, 1.0, 0.0)
    np.testing.assert_array_equal(data, -grad)


# ---------------------------------------------------------------- dense layers


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_bias_and_relu(compiled, rows, n):
    """Forward and backward."""
    y, bias, grad = draw(rows, n), draw(n, seed=1), draw(rows, n, seed=2)
    expected = np.maximum(y + bias, 0)
    compiled.bias_relu(y, bias)
    np.testing.assert_array_equal(y, expected)
    kept = grad * (y > 0)
    out, to_bias = np.full_like(grad, 9), np.full_like(bias, 9)
    compiled.relu_grad_bias(grad, y, out, to_bias)
    np.testing.assert_array_equal(out, kept)
    close(to_bias, kept.astype(np.float64).sum(axis=0))


def test_relu_keeps_nan(compiled):
    """A run that diverges shows it."""
    y = np.full((2, 20), np.nan, np.float32)
    compiled.bias_relu(y, draw(20))
    assert np.isnan(y).all()


@pytest.mark.parametrize("classes", SIZES)
def test_softmax_and_loss(compiled, classes):
    """Large logits of either sign do not overflow; the gradient may take the logits' place."""
    logits = draw(7, classes) * np.float32(30)
    logits[1] += 1e4
    logits[2] -= 1e4
    labels = np.arange(7) % classes
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True)
    expected = np.exp(shifted) / total
    expected[np.arange(7), labels] -= 1
    losses = np.zeros(7, np.float32)
    compiled.softmax_loss(logits, labels, losses, logits)
    close(losses, (np.log(total) - shifted[np.arange(7), labels][:, None])[:, 0])
    close(logits, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_softmax_shows_what_is_not_finite(compiled, bad):
    """The loss is NaN then, at whatever place it stands."""
    logits = np.zeros((20, 20), np.float32)
    np.fill_diagonal(logits, bad)
    losses, gradient = np.zeros(20, np.float32), np.zeros_like(logits)
    compiled.softmax_loss(logits, np.zeros(20, np.int64), losses, gradient)
    assert np.isnan(losses).all()


# ---------------------------------------------------------------- transformers


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rows", [0, 5])
def test_layer_norm(compiled, rows, n):
    """Forward and backward; a constant row is among them."""
    x, scale, shift, grad = draw(rows, n), draw(n, seed=1), draw(n, seed=2), draw(rows, n, seed=3)
    x[1:2] = 3
    y, normal, inverse = np.zeros_like(x), np.zeros_like(x), np.zeros(rows, np.float32)
    compiled.layer_norm(x, scale, shift, 1e-5, y, normal, inverse)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    factor = 1 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    close(y, centred * factor * scale + shift)
    to_x, to_scale, to_shift = np.zeros_like(x), np.full_like(scale, 9), np.full_like(shift, 9)
    compiled.layer_norm_grad(grad, normal, inverse, scale, to_x, to_scale, to_shift)
    inner, unit = grad * scale.astype(np.float64), centred * factor
    mean = (inner * unit).mean(axis=1, keepdims=True)
    close(to_x, (inner - inner.mean(axis=1, keepdims=True) - unit * mean) * factor, abs(inner * factor).max(initial=0))
    close(to_scale, (grad * unit).sum(axis=0))
    close(to_shift, grad.astype(np.float64).sum(axis=0))


def test_layer_norm_of_infinite_variance(compiled):
    """It is NaN, also as the function says it: what machine code makes of 1 / sqrt(infinity) is up to the compiler."""
    from nnmpi.backend.jit.loops import layer_norm

    ones = np.ones(4, np.float32)
    for function in (compiled.layer_norm, layer_norm):
        x, inverse = draw(3, 4), np.zeros(3, np.float32)
        x[1, 2] = 1e30
        y, normal = np.zeros_like(x), np.zeros_like(x)
        with np.errstate(all="ignore"):
            function(x, ones, ones, 1e-5, y, normal, inverse)
        for found in (y, normal, inverse[:, None]):
            np.testing.assert_array_equal(np.isnan(found).all(axis=1), [False, True, False])


@pytest.mark.parametrize("n", [0, *SIZES])
def test_gelu(compiled, n):
    """Forward and backward, with the bias and in place, far out too."""
    x, grad = draw(n) * np.float32(5), draw(n, seed=1)
    x[:2] = (-100, 100)[: min(n, 2)]
    wide = x.astype(np.float64)
    c = np.sqrt(2 / np.pi)
    tanh = np.tanh(c * (wide + 0.044715 * wide**3))
    expected = 0.5 * wide * (1 + tanh)
    slope = 0.5 * (1 + tanh) + 0.5 * wide * (1 - tanh**2) * c * (1 + 3 * 0.044715 * wide**2)
    y = np.zeros_like(x)
    compiled.gelu_tanh(x, y)
    close(y, expected)
    bias = draw(n, seed=2)
    moved, steep = (x - bias)[None], np.zeros((1, n), np.float32)
    compiled.bias_gelu_tanh_slope(moved, bias, steep)
    close(moved[0], expected, 1)
    close(steep[0], slope, 1)
    compiled.gelu_tanh_grad(x, grad, grad)
    close(grad, draw(n, seed=1) * slope)


def test_gelu_far_out(compiled):
    """The value is 0 or x and the slope 0 or 1 up to the largest number; -infinity and NaN give NaN."""
    far = np.array([11, 13, 100, 1e4, 1e12, 1e13, 1e15, 1.8e19, 2e19, 1e30, 3.4e38] * 3, np.float32)
    x = np.concatenate([far, -far, [np.inf, -np.inf, np.nan]]).astype(np.float32)
    value = np.where(x < 0, np.where(np.isinf(x), np.nan, 0), x)
    slope = np.where(np.isinf(x), np.nan, np.where(x < 0, 0, np.where(x > 0, 1, np.nan)))
    y, steep, to_x = x.copy(), np.zeros((1, x.size), np.float32), np.ones_like(x)
    compiled.gelu_tanh(x, y)
    np.testing.assert_array_equal(y, value)
    compiled.gelu_tanh_grad(x, to_x, to_x)
    np.testing.assert_array_equal(to_x, slope)
    moved = x[None].copy()
    compiled.bias_gelu_tanh_slope(moved, np.zeros_like(x), steep)
    np.testing.assert_array_equal(moved[0], value)
    np.testing.assert_array_equal(steep[0], slope)


# ---------------------------------------------------------------- images


@pytest.mark.parametrize("shape", [(2, 4, 6, 5), (1, 2, 2, 1), (3, 5, 7, 17), (0, 4, 4, 2), (1, 1, 1, 3)])
def test_max_pool(compiled, shape):
    """The first of equal elements wins, and what no window covers is 0; NaN is found at each place."""
    x = np.random.default_rng(0).integers(0, 3, shape).astype(np.float32)
    n, h, w, c = shape
    h, w = h // 2, w // 2
    y, corner, out = np.zeros((n, h, w, c), np.float32), np.zeros((n, h, w, c), np.uint8), np.full(shape, 9, np.float32)
    windows = x[:, : 2 * h, : 2 * w].reshape(n, h, 2, w, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(n, h, w, 4, c)
    compiled.max_pool2(x, y, corner)
    np.testing.assert_array_equal(y, windows.max(axis=3))
    np.testing.assert_array_equal(corner, windows.argmax(axis=3))
    grad = draw(n, h, w, c)
    compiled.max_pool2_grad(grad, corner, out)
    for a in range(4):
        kept = out[:, a // 2 : 2 * h : 2, a % 2 : 2 * w : 2]
        np.testing.assert_array_equal(kept, np.where(corner == a, grad, 0))
    np.testing.assert_allclose(out.sum(), grad.sum(), atol=1e-4)
    for place in range(4):
        bad = np.zeros((1, 2, 2, 1), np.float32)
        bad[0, place // 2, place % 2] = np.nan
        single = np.zeros((1, 1, 1, 1), np.float32)
        compiled.max_pool2(bad, single, np.zeros((1, 1, 1, 1), np.uint8))
        assert np.isnan(single).all()


def test_an_import_that_fails_is_told(monkeypatch):
    """Not only a missing numba: one that does not fit this NumPy raises, too."""
    from nnmpi.backend.kernels import lookup

    monkeypatch.setitem(sys.modules, "nnmpi.backend.jit.kernels", None)
    with pytest.raises(UsageError, match=r"need numba.*nnmpi\[jit\]"):
        lookup.load.__wrapped__()
