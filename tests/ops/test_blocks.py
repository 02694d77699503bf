"""What is computed in blocks of rows: the same as in one block, whatever the blocks, eagerly and
replayed.
"""

from importlib import import_module

import numpy as np
import pytest

from nnmpi import Tensor, ops
from nnmpi.backend.sums import row_blocks
from tests.device.here import here
from tests.device.library import device_backend
from tests.ops.replays import check_replays

SIZES = [(7, 5), (5, 5), (2, 9, 4), (64, 6), (1, 3), (0, 4), (3, 1)]


def set_elements(monkeypatch, count):
    """Make blocks of so many elements, or of one row at least."""
    for name in ("sums", "plain"):
        monkeypatch.setattr(import_module(f"nnmpi.backend.{name}"), "ELEMENTS", count)


@pytest.fixture(params=[1, 8, 20, 10**6])
def elements(request, monkeypatch):
    """Make blocks of several sizes."""
    set_elements(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("size", SIZES)
def test_blocks_cover_all_rows(size, elements):
    """Each once, in order; at least one block; the first is a largest one; a device gets a single
    one.
    """
    blocks = row_blocks(np.empty(size))
    assert [i for part in blocks for i in range(size[0])[part]] == list(range(size[0]))
    assert blocks[0].start == 0
    assert max(part.stop - part.start for part in blocks) == blocks[0].stop
    row = int(np.prod(size[1:]))
    assert all((part.stop - part.start) * row <= max(elements, row) for part in blocks)
    assert row_blocks(device_backend().asarray(np.empty(size))) == [slice(0, size[0])]


def run(function, arrays, grad):
    """Return the result and all gradients."""
    leaves = [Tensor(a, requires_grad=True) for a in arrays]
    y = function(*leaves)
    y.backward(grad)
    return [y.data, *[leaf.grad for leaf in leaves]]


FUNCTIONS = {
    "layer_norm": (lambda x, a, b: ops.layer_norm(x, a, b, 0.1), lambda n: [(n,), (n,)]),
    "group_norm": (lambda x, a, b: ops.group_norm(x, a, b, 1, 0.1), lambda n: [(n,), (n,)]),
    "gelu": (ops.gelu, lambda n: []),
    "gelu tanh": (lambda x: ops.gelu(x, "tanh"), lambda n: []),
    "linear, gelu": (lambda *args: ops.gelu(ops.linear(*args)), lambda n: [(n, 3), (3,)]),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_do_not_matter(name, size, elements, monkeypatch):
    """Results and gradients to rounding, and replayed ones bit for bit the eager ones."""
    function, shapes = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in (size, *shapes(size[-1]))]
    grad = rng.standard_normal((*size[:-1], 3) if name.startswith("linear") else size)
    results = run(function, arrays, grad)
    check_replays(
        function, [Tensor(np.zeros_like(a), requires_grad=True) for a in arrays], [arrays]
    )
    set_elements(monkeypatch, 10**6)
    for result, other in zip(results, run(function, arrays, grad), strict=True):
        np.testing.assert_allclose(result, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("features", [1, 3, 250, 300])
def test_layer_norm_in_float32(rows, features):
    """Within 2e-6 of the largest of float64's, with parameters' gradients in their place, and on
    constant rows.
    """
    rng = np.random.default_rng(rows)
    x, grad = (rng.standard_normal((rows, features)) for _ in range(2))
    x[0] = 3.25
    scale, shift = rng.uniform(0.5, 2, features), rng.standard_normal(features)
    exact = run(ops.layer_norm, [x, scale, shift], grad)
    leaves = [Tensor(a.astype("float32"), requires_grad=True) for a in (x, scale, shift)]
    for leaf in leaves[1:]:
        leaf.buffer = here(np.full(features, np.nan, np.float32))
    y = ops.layer_norm(*leaves)
    y.backward(grad.astype("float32"))
    np.testing.assert_array_equal(y.data[0], leaves[2].data)
    # of a constant row: the eps alone keeps it from being infinitely steep
    exact[1][0], leaves[0].grad[0] = 0, 0
    for first, other in zip([y.data, *[leaf.grad for leaf in leaves]], exact, strict=True):
        np.testing.assert_allclose(first, other, rtol=0, atol=2e-6 * max(1, abs(other).max()))
    assert all(leaf.grad is leaf.buffer for leaf in leaves[1:])
