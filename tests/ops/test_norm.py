"""Normalization: statistics over ranks equal those of the whole batch."""

from contextlib import nullcontext
from math import prod

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, jit, nn, simulate
from nnmpi.backend.sums import ELEMENTS
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.ops import batch_norm, group_norm, layer_norm


class Ranks:
    """Ranks without MPI: each is run again and again until it knows what the others contribute to
    every sum.

    A rank's n-th all-reduce returns the sum of what all ranks contributed to their n-th in the
    previous round; after as many rounds as there are sums, all of them are right.
    """

    def __init__(self, run, parts, sums):
        self.stored = [[] for _ in parts]
        self.results = []
        for _ in range(sums + 1):
            now = [[] for _ in parts]
            self.results = [
                run(part, self.all_reduce(now[rank])) for rank, part in enumerate(parts)
            ]
            self.stored = now

    def all_reduce(self, mine):
        """Return the all-reduce of one rank, which also notes what it contributes."""

        def reduce(array):
            assert array.dtype == np.float64
            number = len(mine)
            mine.append(array.copy())
            before = [theirs[number] for theirs in self.stored if len(theirs) > number]
            return sum(before, 0 * array)

        return reduce


SHARES = [(4, 4), (5, 3), (8, 0), (0, 8), (1, 1, 6), (3, 0, 0, 5)]


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_statistics_over_ranks_are_those_of_the_whole_batch(shares, dtype, offset):
    """Results and gradients of x are the serial ones, row by row; scale's and shift's add up. Also
    without any rows.
    """
    rng = np.random.default_rng(0)
    x, grad = (rng.standard_normal((8, 2, 3)).astype(dtype) for _ in range(2))
    x += np.asarray(offset, dtype)
    scale, shift = (rng.uniform(0.5, 2, 3).astype(dtype) for _ in range(2))

    def run(part, all_reduce):
        leaves = [Tensor(a, requires_grad=True) for a in (x[part], scale, shift)]
        y, mean, variance, count = batch_norm(*leaves, all_reduce=all_reduce)
        y.backward(grad[part])
        assert y.dtype == mean.dtype == variance.dtype == dtype
        return y.data, *[leaf.grad for leaf in leaves], mean, variance, count

    serial = run(slice(None), None)
    stops = np.cumsum(shares)
    parts = [slice(stop - share, stop) for share, stop in zip(shares, stops, strict=True)]
    ranks = Ranks(run, parts, sums=3).results
    tolerance = (1e-12 if dtype == "float64" else 2e-5) * (1 + offset)
    for number in (0, 1):
        full = np.concatenate([result[number] for result in ranks])
        np.testing.assert_allclose(full, serial[number], atol=tolerance)
    for number in (2, 3):
        np.testing.assert_allclose(
            sum(result[number] for result in ranks), serial[number], atol=10 * tolerance
        )
    for result in ranks:
        np.testing.assert_allclose(
            result[4], serial[4], rtol=1e-6 if dtype == "float32" else 1e-13, atol=1e-7
        )
        np.testing.assert_allclose(result[5], serial[5], rtol=1e-4 if dtype == "float32" else 1e-10)
        assert result[6] == serial[6] == 16


def test_nothing_cancels_far_from_zero():
    """At a mean of 1e8 the variance over two ranks is still right to many digits."""
    x = np.random.default_rng(0).standard_normal((8, 3)) + 1e8
    item = Tensor(np.ones(3))
    serial = batch_norm(Tensor(x), item, item)[0].data
    ranks = Ranks(
        lambda part, reduce: batch_norm(Tensor(x[part]), item, item, all_reduce=reduce)[0].data,
        (slice(0, 5), slice(5, 8)),
        2,
    )
    np.testing.assert_allclose(np.concatenate(ranks.results), serial, atol=1e-6)
    np.testing.assert_allclose(serial, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) + 1, atol=1e-6)


def test_a_first_block_unlike_the_rest():
    """A batch of several blocks, of which the first has the mean 0 and the others 1000."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5 * ELEMENTS // 4, 4), dtype="float32")
    x[ELEMENTS // 4 :] += 1000
    grad = rng.standard_normal(x.shape, dtype="float32")
    leaves = [Tensor(a, requires_grad=True) for a in (x, *np.ones((2, 4), "float32"))]
    y, mean, variance, _ = batch_norm(*leaves)
    y.backward(grad)
    x, grad = x.astype("float64"), grad.astype("float64")
    inverse = 1 / np.sqrt(x.var(0) + 1e-5)
    normal = (x - x.mean(0)) * inverse
    to_x = inverse * (grad - grad.mean(0) - normal * (normal * grad).mean(0))
    exact = (normal + 1, x.mean(0), x.var(0), to_x, (normal * grad).sum(0), grad.sum(0))
    ours = (y.data, mean, variance, *(leaf.grad for leaf in leaves))
    for first, second in zip(ours, exact, strict=True):
        assert abs(first - second).max() < 5e-5 * abs(second).max()


@pytest.mark.parametrize(
    "shape", [(3, 5, 7, 12), (2, 33, 31, 64), (4, 6), (70, 9, 8), (0, 4, 4, 8)]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_groups_are_the_operations_one_by_one(shape, groups):
    """Some images in a block, and one; from numbers far from 0."""
    rng = np.random.default_rng(0)
    arrays = 3 + rng.standard_normal(shape), *rng.standard_normal((2, shape[-1]))
    grad = rng.standard_normal(shape)

    def one_by_one(x, scale, shift):
        parts = x.reshape(len(x), prod(shape[1:-1]), groups, shape[-1] // groups)
        centred = parts - parts.mean((1, 3), keepdims=True)
        variance = (centred * centred).mean((1, 3), keepdims=True)
        return (centred / (variance + 1e-5).sqrt()).reshape(shape) * scale + shift

    results = []
    for function in (lambda *x: group_norm(*x, groups), one_by_one):
        leaves = [Tensor(a, requires_grad=True) for a in arrays]
        y = function(*leaves)
        y.backward(grad)
        results.append([y.data, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("groups", [0, -1, 3, 8, 1.5])
def test_groups_that_do_not_divide_the_channels(groups):
    """One sentence, not an error of a division."""
    item = Tensor(np.ones(4))
    with pytest.raises((ShapeError, UsageError), match="group"):
        group_norm(Tensor(np.ones((2, 5, 4))), item, item, groups)


def test_infinite_variance_is_nan():
    """Where squares overflow in float64: not zeros, which would hide that a run diverges; elsewhere
    nothing changes.
    """
    for function, place in (
        (layer_norm, (1, slice(None))),
        (lambda *a: batch_norm(*a)[0], (slice(None), 2)),
    ):
        x = Tensor(np.random.default_rng(0).standard_normal((3, 4)), requires_grad=True)
        item, zero = (Tensor(np.full(4, float(value))) for value in (1, 0))
        before = function(x, item, zero).data.copy()
        x.data[1, 2] = 1e200
        y = function(x, item, zero)
        y.backward(np.ones((3, 4)))
        before[place] = np.nan
        np.testing.assert_array_equal(y.data, before)
        np.testing.assert_array_equal(np.isnan(x.grad), np.isnan(before))


LAYERS = {
    "layer": (lambda: nn.LayerNorm(8), (5, 8)),
    "rms": (lambda: nn.RMSNorm(8), (5, 8)),
    "group": (lambda: nn.GroupNorm(2, 8), (3, 4, 4, 8)),
    "batch": (lambda: nn.BatchNorm(8), (9, 8)),
    "batch of images": (lambda: nn.BatchNorm(8), (3, 4, 4, 8)),
}


def huge_inputs(shape):
    """Return samples whose squares overflow in float32, everywhere or in one place."""
    draw = np.random.default_rng(0)
    plain = draw.standard_normal(shape).astype("float32")
    mixed, single = plain.copy(), plain.copy()
    mixed[0] *= 1e25
    single.reshape(-1)[3] = 3e38
    return [plain, plain * np.float32(1e20), plain * np.float32(9e37), mixed, single, plain]


EACH_NAME = pytest.mark.parametrize("name", LAYERS)
ON_HOST = pytest.mark.host_only(
    "a device's normalizations stay NaN: the host would have to wait for each"
)


@pytest.mark.parametrize("compiles", [False, True])
@EACH_NAME
@ON_HOST
def test_huge_inputs_give_the_results_of_float64(name, compiles):
    """Forward and backward, and in replays of a step that was recorded with small ones."""
    make, shape = LAYERS[name]
    weights = np.random.default_rng(1).standard_normal(shape)

    def results(dtype, compiles):
        layer = make().initialize(seed=0, dtype=dtype)

        def step(x):
            with nn.training():
                y = layer(x)
            layer.zero_grad()
            (y * Tensor(weights.astype(dtype))).sum().backward()
            return y

        run = nnmpi.compile(step) if compiles else step
        found = []
        for x in huge_inputs(shape):
            # a replay repeats the first computation, too, and NumPy warns of it
            with np.errstate(over="ignore", invalid="ignore") if compiles else nullcontext():
                y = run(Tensor(x.astype(dtype)))
            found.append([y.numpy().copy(), *(p.grad.copy() for p in layer.parameters())])
        if name.startswith("batch"):
            found.append([layer.running_mean.data.copy()])
        return found

    for narrow, wide in zip(results("float32", compiles), results("float64", False), strict=True):
        for ours, right in zip(narrow, wide, strict=True):
            assert np.isfinite(ours).all()
            np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize("size", [1e3, 1e12, 1e17, 2e19])
@pytest.mark.parametrize("compiles", [False, True])
@ON_HOST
def test_running_statistics_of_large_inputs_are_those_of_float64(compiles, size):
    """A batch counts once, whether its squares, their sums or nothing overflows."""
    plain = np.random.default_rng(0).standard_normal((16, 4, 4, 3)).astype("float32")

    def statistics(dtype, compiles):
        layer = nn.BatchNorm(3).initialize(seed=0, dtype=dtype)
        run = nnmpi.compile(layer) if compiles else layer
        for factor in (1, size, size, 1):
            with nn.training(), np.errstate(over="ignore", invalid="ignore"):
                run(Tensor((plain * np.float32(factor)).astype(dtype)))
        return layer.running_mean.data, layer.running_variance.data

    for ours, right in zip(statistics("float32", compiles), statistics("float64", 0), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-4)


@EACH_NAME
@ON_HOST
def test_the_gradient_of_huge_inputs_is_that_of_float64(name):
    make, shape = LAYERS[name]
    weights = np.random.default_rng(1).standard_normal(shape)
    for x in huge_inputs(shape):
        found = []
        for dtype in ("float32", "float64"):
            layer = make().initialize(seed=0, dtype=dtype)
            leaf = Tensor(x.astype(dtype), requires_grad=True)
            with nn.training():
                y = layer(leaf)
            (y * Tensor(weights.astype(dtype))).sum().backward()
            found.append(leaf.grad.astype("float64"))
        ours, right = found
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


@EACH_NAME
@pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")
def test_compiled_kernels_overflow_no_more(name):
    make, shape = LAYERS[name]
    weights = np.random.default_rng(1).standard_normal(shape)
    for x in huge_inputs(shape):
        found = []
        for compiled in (jit(), nullcontext()):
            layer, leaf = make().initialize(seed=0), Tensor(x.copy(), requires_grad=True)
            with compiled, nn.training():
                y = layer(leaf)
                (y * Tensor(weights.astype("float32"))).sum().backward()
            found.append([y.numpy(), leaf.grad, *(p.grad for p in layer.parameters())])
        for ours, right in zip(*found, strict=True):
            assert np.isfinite(ours).all()
            np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


@ON_HOST
def test_ranks_overflow_together():
    """One rank's rows overflow the statistics of all."""

    def program(group):
        x = huge_inputs((8, 8))[3]
        layer = nn.BatchNorm(8).initialize(seed=0)
        parallel = nnmpi.DataParallel(layer, group)
        mine = np.array_split(np.arange(8), group.size)[group.rank]
        with nn.training():
            loss = (layer(x[mine]) ** 2).sum()
        parallel.backward(loss, 8)
        return [layer.weight.grad.copy(), layer.running_mean.data.copy()]

    (serial,) = simulate(program, 1)
    for result in simulate(program, 3):
        for ours, right in zip(result, serial, strict=True):
            assert np.isfinite(ours).all()
            np.testing.assert_allclose(ours, right, rtol=1e-4)
