"""Row formulas: the kernels that are printed of them compute what NumPy does in float64, and what
is no formula of rows is left to the library.
"""

import numpy as np
import pytest

from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.precision import dtype_named
from tests.backend.formulas import (
    LEFT,
    ONE,
    STEPS,
    chain,
    in_place,
    late,
    loops_of,
    mish,
    mixed,
    own_norm,
    print_all,
    rows,
    too_early,
    updates,
)
from tests.gpu.conftest import is_stand_in

DTYPES = {"float32": 1e-6, "float64": 1e-13, "bfloat16": 1e-2, "float16": 2e-3}


@pytest.fixture
def kernels(device, monkeypatch):
    """What a device prints kernels with, see `print_all`; the stand-in prints none."""
    print_all(monkeypatch)
    if is_stand_in(device):
        pytest.skip("the stand-in for a device has no compiler")
    return kernels_of(device.zeros((1,), np.float32))


def drawn(*shape, seed=0):
    """Return numbers that every dtype has."""
    return np.random.default_rng(seed).integers(-64, 65, shape) / 16


def is_printed(kernels, formula):
    """Return whether the kernels of a formula were printed."""
    return all(loop is not None for loop in loops_of(kernels, formula))


def compare(device, formula, *operands, dtype="float32", **words):
    """Compare a formula's results with NumPy's; rows and numbers of rows have this dtype, vectors
    float32 in half precision.
    """
    wide = "float64" if dtype == "float64" else "float32"
    given = [
        device.asarray(
            x.astype(dtype_named(dtype if x.shape[:1] == operands[0].shape[:1] else wide))
        )
        if isinstance(x, np.ndarray)
        else x
        for x in operands
    ]
    kernels = kernels_of(given[0])
    with np.errstate(all="ignore"):
        expected = formula(*(x.astype(float) if isinstance(x, np.ndarray) else x for x in operands))
    found = kernels.rows(formula, *given, **words)
    assert is_printed(kernels, formula)
    for mine, theirs in zip(found, expected, strict=False):
        assert mine.shape == theirs.shape
        whole = mine.shape == given[0].shape and mine.shape[-1] > 1
        assert mine.dtype.name == (dtype if whole else wide) or mine.shape[-1:] == (1,)
        most = DTYPES[dtype] * abs(theirs[np.isfinite(theirs)]).max(initial=1e-3)
        mine = device.to_host(mine).astype(float)
        np.testing.assert_allclose(mine, theirs, rtol=DTYPES[dtype], atol=most)
    return found, expected


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("along", [False, True])
def test_functions_of_an_element(kernels, device, name, along):
    """Infinities, NaN and zeros as in NumPy: of elements alone, and of rows with a sum."""
    x = np.float32(rows(9, 70))
    x[abs(x) < 1e-30] = 0  # CuPy's compiler takes smaller ones for 0

    def summed(x):
        return *ONE[name](x), (x * 0 + 1).sum(axis=-1, keepdims=True)

    compare(device, summed if along else ONE[name], x)


SHAPES = [(1, 1), (5, 1), (3, 33), (300, 8), (2, 3, 40), (40,), (3, 1040), (2, 9001), (0, 4)]


EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


@EACH_DTYPE
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(kernels, device, shape, dtype):
    """Of elements alone; with sums along rows of a warp, of a block, and of a large block."""
    x = drawn(*shape)
    compare(device, mish, x, dtype=dtype)
    if len(shape) > 1:
        compare(device, own_norm, x, 0.5, 1 + np.arange(shape[-1]) % 7 / 8.0, dtype=dtype)


@EACH_DTYPE
@pytest.mark.parametrize("shape", [(131, 7), (5003, 8), (12, 1100)])
def test_numbers_of_rows_and_columns(kernels, device, shape, dtype):
    """Read and returned, with the sums over rows of several blocks."""
    total = np.float64 if dtype == "float64" else np.float32
    sums = [device.asarray(np.full(shape[1], 9, total)) for _ in range(2)]
    operands = drawn(*shape), drawn(shape[0], 1, seed=1), drawn(shape[1], seed=2), 0.5
    found, expected = compare(device, mixed, *operands, dtype=dtype, sums=sums)
    assert len(found) == 2
    for mine, term in zip(sums, expected[2:], strict=True):
        right, most = term.sum(axis=0), abs(term).sum(axis=0)
        np.testing.assert_allclose(device.to_host(mine), right, rtol=1e-6, atol=most.max() * 1e-6)


@pytest.mark.parametrize("shape", [(3, 700, 8), (2, 5, 7), (4, 1, 8), (1, 9, 16)])
def test_samples_have_columns_of_their_own(kernels, device, shape):
    """Vectors of each sample beside those of all, and sums of each."""

    def formula(x, own, column, each):
        y = (x - own) * column * each
        return y, y, x

    samples, _, n = shape
    sums = [device.asarray(np.zeros((samples, n), np.float32)) for _ in range(2)]
    if shape[1] > 1:  # beside sums along rows they are left to the library

        def along(x, own):
            return (x - own - x.max(axis=-1, keepdims=True),)

        given = [x.astype("f4") for x in (drawn(*shape), drawn(samples, 1, n))]
        (y,) = kernels.rows(along, *map(device.asarray, given))
        np.testing.assert_array_equal(device.to_host(y), along(*given)[0])
    operands = drawn(*shape), drawn(samples, 1, n), drawn(n), drawn(*shape[:2], 1)
    _, expected = compare(device, formula, *operands, sums=sums)
    for mine, term in zip(sums, expected[1:], strict=True):
        np.testing.assert_allclose(device.to_host(mine), term.sum(axis=1), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("n", [20, 1100])
def test_a_nan_is_the_largest(kernels, device, n):
    """In whatever place, and with either sign."""
    x = np.random.default_rng(0).standard_normal((n, n), dtype=np.float32)[-40:]
    x[range(len(x)), np.arange(len(x)) * n // len(x)] = np.resize([np.nan, -np.nan], len(x))
    (y,) = kernels.rows(lambda x: (x.max(axis=-1, keepdims=True),), device.asarray(x))
    assert np.isnan(device.to_host(y)).all()


@pytest.mark.parametrize("n", [3, 100, 1000, 1100, 10000])
def test_the_mean_of_equal_elements_is_that_element(kernels, device, n):
    """Whatever it is: so a row of equal elements has no variance."""
    x = np.random.default_rng(n).normal(1e4, 1, (9, 1)).astype("f4").repeat(n, 1)
    (y,) = kernels.rows(lambda x: (x - x.mean(axis=-1, keepdims=True),), device.asarray(x))
    assert not device.to_host(y).any()


def test_memory_is_used_again(kernels, device):
    """But not where a row is read after it was overwritten; with a number as the guard that is not
    finite nothing is written.
    """
    given = [device.asarray(drawn(5, 33, seed=seed).astype("f4")) for seed in range(2)]
    before = [device.to_host(x) for x in given]

    def swapped(x, y):
        return y * 2, x + y

    for guard in (np.nan, -np.inf, 1.0):
        number = device.asarray(np.float64(guard))
        found = kernels.launch(kernels.found(swapped, given, (), 2), given, (), number)
        assert found[0] is given[0] and found[1] is given[1]
        right = swapped(*before) if guard == 1 else before
        for mine, theirs in zip(found, right, strict=True):
            np.testing.assert_array_equal(device.to_host(mine), theirs)
    x = device.asarray(np.ones((3, 4), np.float32))
    for y, other in zip(kernels.rows(late, x, reuse=True), late(np.ones((3, 4))), strict=True):
        np.testing.assert_array_equal(device.to_host(y), other)


@EACH_DTYPE
@pytest.mark.parametrize("formula", [updates, too_early, in_place])
def test_rows_are_written_where_the_formula_says(kernels, device, formula, dtype):
    """What is read after it was overwritten, and rows with gaps, are left to the library."""
    for step in (1, 2):
        given = [device.asarray(drawn(5, 8, seed=k).astype(dtype_named(dtype))) for k in (0, 1)]
        given = [x[:, ::step] for x in given]
        wide = [device.to_host(x).astype(float) for x in given]
        found, expected = kernels.rows(formula, *given) or (), formula(*wide) or ()
        for mine, theirs in zip((*given, *found), (*wide, *expected), strict=True):
            mine = device.to_host(mine).astype(float)
            np.testing.assert_allclose(mine, theirs, rtol=DTYPES[dtype], atol=60 * DTYPES[dtype])
    assert is_printed(kernels, formula) == (formula is not too_early)


@pytest.mark.parametrize("name", sorted({*LEFT} - {"values decide", "other functions"}))
def test_other_functions_are_left_to_the_library(kernels, device, name):
    """And their results are its."""
    x = device.asarray(drawn(6, 40).astype("f4"))
    if name == "arrays around":
        formula, table = LEFT[name], device.asarray(np.ones(40, "f4"))
        results = kernels.rows(lambda x: formula(x, table), x), formula(x, table)
    else:
        results = kernels.rows(LEFT[name], x), LEFT[name](x)
        assert not is_printed(kernels, LEFT[name])
    for result, other in zip(*results, strict=True):
        np.testing.assert_array_equal(*map(device.to_host, (result, other)))


def test_arrays_of_the_host_are_refused(kernels, device):
    """CuPy would pass their contents as a number."""
    x = np.ones((3, 4), np.float32)
    with pytest.raises(Exception, match="in the host's memory; copy it there"):
        (
            kernels.rows(mish, device.asarray(x)),
            kernels.rows(lambda x, y: (x + y,), device.asarray(x), x),
        )


@pytest.mark.parametrize("seed", range(3))
def test_random_formulas(kernels, device, seed):
    """Chains of functions, sums and choices."""
    rng = np.random.default_rng(seed)
    steps = tuple(STEPS[i] for i in rng.integers(0, len(STEPS), 12))
    operands = [rng.standard_normal(shape) for shape in ((23, 37), (37,), (23, 1))]
    compare(device, chain(steps), *operands, dtype="float64")


def test_a_users_formula_runs_in_the_library(device):
    """It is read anew in each call, and nothing of it is kept."""
    if is_stand_in(device):
        pytest.skip("the stand-in for a device has no compiler")
    x = device.asarray(drawn(5, 33).astype("f4"))
    kernels, factor = kernels_of(x), 1.0

    def formula(x):
        return (x * factor,)

    for factor in (1.0, 3.0):
        (y,) = kernels.rows(formula, x)
        np.testing.assert_array_equal(device.to_host(y), device.to_host(x) * factor)
    assert not loops_of(kernels, formula)
