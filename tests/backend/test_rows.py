"""Row formulas: the loops that are printed of them compute what NumPy does, and what is no formula
of rows is left to NumPy.
"""

import numpy as np
import pytest

from nnmpi.backend.kernels import PLAIN, load
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
from tests.harness.slow import KERNELS

pytest.importorskip("numba")

pytestmark = pytest.mark.host_only("loops that numba compiles for NumPy's arrays")


@pytest.fixture(autouse=True)
def prints(monkeypatch):
    """See `print_all`."""
    print_all(monkeypatch)


def compare(formula, *operands, share=4e-7, **words):
    """Compare a printed loop with the formula in float64, within a share of the largest."""
    given, wide = [], []
    for x in operands:
        is_array = isinstance(x, np.ndarray)
        given.append(x.copy() if is_array else x)
        wide.append(x.astype(float) if is_array else x)
    with np.errstate(all="ignore"):
        expected = formula(*wide)
        found = load().rows(formula, *given, **words)
    assert loops_of(load(), formula)[-1]
    for mine, theirs in zip(found, expected, strict=False):
        assert mine.dtype == np.float32 and mine.shape == theirs.shape
        most = abs(theirs[np.isfinite(theirs)]).max(initial=1e-3)
        np.testing.assert_allclose(mine, theirs, rtol=share, atol=share * most)
    return found, expected


@pytest.mark.parametrize("name", ONE)
def test_functions_of_an_element(name):
    """Infinities, NaN and zeros as in NumPy, others within a few units of the last place."""
    with np.errstate(all="ignore"):
        compare(ONE[name], rows(9, 70), share=7e-7)


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (3, 33), (300, 5), (2, 3, 40), (40,)])
def test_shapes(shape):
    """Of elements alone, and with sums along rows, which need two axes."""
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    compare(mish, x, share=3e-6)
    if len(shape) > 1:
        scale = np.arange(1, shape[-1] + 1, dtype=np.float32)
        compare(own_norm, x, 0.5, scale, share=3e-6)


@pytest.mark.parametrize(
    "lead, columns", [((), 7), ((3,), (3, 1, 7)), ((3,), 7), ((1,), (1, 1, 7))]
)
def test_numbers_of_rows_and_columns(lead, columns):
    """Read and returned; a sum of many rows, whose last part is not full; each sample's own."""
    rng = np.random.default_rng(0)
    x, each, column = (
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((*lead, 131, 7), (*lead, 131, 1), columns)
    )
    sums = np.full((2, *lead, 7), 9, np.float32)
    found, expected = compare(mixed, x, each, column, 0.5, sums=[*sums], share=1e-4)
    assert len(found) == 2
    for mine, term in zip(sums, expected[2:], strict=True):
        np.testing.assert_allclose(mine, term.sum(axis=-2), rtol=2e-5, atol=1e-5)
    if lead:
        return
    plain = np.empty_like(sums)
    PLAIN.rows(mixed, x, each, column, 0.5, sums=[*plain])
    np.testing.assert_allclose(plain, sums, rtol=2e-5, atol=1e-5)


def test_a_nan_is_the_largest():
    """In whatever place, and with either sign."""
    x = np.random.default_rng(0).standard_normal((20, 20), dtype=np.float32)
    np.fill_diagonal(x, np.copysign(np.nan, np.resize([1, -1], 20)))
    (y,) = load().rows(lambda x: (x.max(axis=-1, keepdims=True),), x)
    assert np.isnan(y).all()


def test_memory_is_used_again():
    """But not where a row is read after it was overwritten."""
    x = rows(5, 40, seed=1)
    found, expected = compare(lambda x, b: (np.maximum(x + b, 0),), x, x[1], reuse=True)
    given = abs(x[1:].copy())
    (y,) = load().rows(lambda x: (x * 2,), given, reuse=True)
    assert y is given

    x = np.ones((3, 4), np.float32)
    for y, other in zip(load().rows(late, x, reuse=True), late(np.ones((3, 4))), strict=True):
        np.testing.assert_array_equal(y, other)


def test_constants_that_are_equal_are_two():
    """0.0 is not -0.0."""
    for y, zero in zip(
        load().rows(lambda x: (x * 0.0, x * -0.0), rows(3, 40)), (0.0, -0.0), strict=True
    ):
        np.testing.assert_array_equal(np.signbit(y[1]), np.signbit(rows(3, 40)[1] * zero))


@pytest.mark.parametrize("name", LEFT)
def test_other_functions_are_left_to_numpy(name):
    """And their results are its."""
    x = np.random.default_rng(0).standard_normal((6, 40), dtype=np.float32)
    for result, other in zip(load().rows(LEFT[name], x), LEFT[name](x), strict=True):
        np.testing.assert_array_equal(result, other)
    assert loops_of(load(), LEFT[name]) == [None]


def test_other_dtypes_and_operands_are_left_to_numpy():
    """Integers, float64, and what is neither a row nor repeated for one."""
    x = np.ones((6, 40), np.float32)
    for other in (np.ones((6, 40)), np.ones((6, 40), int), np.ones((1, 40), np.float32)):
        (y,) = load().rows(lambda x, y: (x + y,), x, other)
        np.testing.assert_array_equal(y, x + other)
        assert y.dtype == (x + other).dtype


@pytest.mark.parametrize("count", [6, 16000])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("formula", [updates, too_early, in_place])
def test_rows_are_written_where_the_formula_says(formula, step, count):
    """Of any strides, in blocks of NumPy's, too. What is read after it was overwritten, and rows
    with gaps, are left to NumPy.
    """
    for kernels in (load(), PLAIN):
        x, y = np.ones((2, count, 5 * step), np.float32)[..., ::step]
        x[...] = np.arange(x.size).reshape(x.shape) % 7
        wide = x.astype(float), y.astype(float)
        found, expected = kernels.rows(formula, x, y) or (), formula(*wide) or ()
        for mine, theirs in zip((x, y, *found), (*wide, *expected), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert bool(loops_of(load(), formula)[-1]) == (formula is not too_early)


def test_a_formula_writes_rows_to_rows():
    """Not where its first result is to be, and not to numbers of rows."""

    def to_numbers(x, each):
        each += 1
        return (x * each,)

    x, each = np.ones((3, 4), np.float32), np.ones((3, 1), np.float32)
    load().rows(in_place, x, x + 1, reuse=True)
    load().rows(to_numbers, x, each)
    assert loops_of(load(), in_place)[-1] is None is loops_of(load(), to_numbers)[-1]
    np.testing.assert_array_equal(each, 2)


@pytest.mark.slow(KERNELS)
@pytest.mark.parametrize("seed", range(3))
def test_random_formulas(seed):
    """Chains of functions, sums and choices."""
    rng = np.random.default_rng(seed)
    steps = tuple(STEPS[i] for i in rng.integers(0, len(STEPS), 12))
    shapes = (23, 37), (37,), (23, 1)
    operands = [rng.standard_normal(s, dtype=np.float32) for s in shapes]
    compare(chain(steps), *operands, share=3e-5)
