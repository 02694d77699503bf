"""What the table refuses, and the sizes of grids."""

import numpy as np
import pytest

from nnmpi.backend.cuda import launch, tables
from nnmpi.backend.cuda.kernels import DeviceFunctions
from nnmpi.errors import DtypeError, ShapeError, UsageError
from tests.backend.cuda import test_dense, test_images, test_rows, test_tables
from tests.backend.cuda.host import BF16, F16, F32, F64, blank, draw, held, kernels, needs_emulator


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        ("bias_relu", (draw(4, 6).T, draw(4)), UsageError, r"bias_relu needs arrays without gaps.*shape \(6, 4\)"),
        ("bias_relu", (draw(4, 6), np.zeros(6, np.float32)), UsageError, r"shape \(6,\) in the host's memory"),
        ("bias_relu", (draw(4, 6), draw(6, dtype=F64)), DtypeError, "no form for arrays of float32, float64"),
        ("bias_relu", (draw(4, 6), draw(6, dtype=F16)), DtypeError, "float32, float16"),
        ("bias_relu", (draw(4, 6, dtype=F16), draw(6, dtype=BF16)), DtypeError, "float16, bfloat16"),
        ("bias_relu", (held(np.zeros((4, 6), np.int32)), held(np.zeros(6, np.int32))), DtypeError, "int32, int32"),
        ("bias_relu", (draw(4, 6), draw(7)), ShapeError, "needs 21 elements in its matrix, not 24"),
        ("sgd", (draw(4), draw(5), 0.1, 0.0), ShapeError, r"sgd needs arrays of one size, not \[4, 5\]"),
        ("sgd", (draw(4), draw(4, dtype=F64), 0.1, 0.0), DtypeError, "float32, float64"),
        ("softmax_loss", (draw(4, 6), draw(4), blank(4, F32), blank((4, 6), F32)), DtypeError, "float32, float32"),
        (
            "max_pool",
            (draw(1, 4, 4, 3), blank((1, 2, 3, 3), F32), None, (2, 2), (2, 2), (0, 0)),
            ShapeError,
            r"to \(1, 2, 2, 3\), not \(1, 2, 3, 3\)",
        ),
        ("im2col", (draw(1, 4, 4, 3), blank((4, 26), F32), (3, 3), (1, 1), (0, 0)), ShapeError, "columns, not 104"),
        ("im2col", (draw(1, 4, 4, 3), blank((4, 36), F32), (3, 3), (1, 1), (0, 0)), ShapeError, "do not fit images"),
        ("sum_of_squares", (draw(4), blank(2, F64)), ShapeError, "writes 1 number, not 2"),
        ("sum_of_squares", (draw(4), blank(1, F32)), DtypeError, "float32, float32"),
        (
            "dropout",
            (draw(4, 2), 0.5, (1, 2), 0, held(np.zeros(3, np.uint32)), draw(4, 2)),
            ShapeError,
            "needs 2 elements",
        ),
        (
            "embedding",
            (draw(4, 2), held([1, 2]), blank((3, 2), F32)),
            ShapeError,
            "needs 4 elements in its result, not 6",
        ),
    ],
)
@needs_emulator
def test_what_is_refused(name, arguments, error, words):
    """A kernel would read or write memory that is not the arrays'."""
    with pytest.raises(error, match=words):
        getattr(kernels(), name)(*arguments)


@needs_emulator
def test_too_many_places_for_a_byte():
    """255 says that none has won."""
    x, y = draw(1, 16, 16, 1), blank((1, 1, 1, 1), F32)
    with pytest.raises(ShapeError, match="cannot number 256 places by uint8"):
        kernels().max_pool(x, y, blank(y.shape, np.uint8), (16, 16), (1, 1), (0, 0))


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("rows", [0, 1, 63, 5000, 2**33])
@pytest.mark.parametrize("n", [1, 2, 10, 24, 768, 50257, 2**34])
def test_grids_are_what_cuda_takes(itemsize, rows, n):
    """256 threads whose width is a power of two, as the sums over a block's rows need it; no axis too long."""
    for grid, block in (launch.columns_grid(rows, n, itemsize), launch.sums_grid(rows, n, itemsize)):
        assert block[0] * block[1] == 256
        assert block[0] in (1, 2, 4, 8, 16, 32)
        assert 1 <= grid[0] <= 2**31 - 1
        assert 1 <= grid[1] <= 65535
    form, grid, block = launch.rows_grid(rows, n)
    assert grid[0] <= 2**31 - 1
    assert block in ([(32, 8)] if form == "warps" else [(256,), (1024,)])
    assert 1 <= launch.flat_grid(max(1, rows * n), itemsize)[0] <= launch.BLOCKS


def test_kernels_are_looked_up_once():
    """For the same dtypes the same compiled kernel, without a look into the source."""
    table = type(kernels())(kernels().xp)
    first = table.kernel("updates", "sgd", "TT", draw(3), draw(3))
    assert table.kernel("updates", "sgd", "TT", draw(4), draw(4)) is first
    assert table.kernel("updates", "sgd", "TT", draw(4, dtype=F64), draw(4, dtype=F64)) is not first


@needs_emulator
def test_one_block_does_the_work_of_many(monkeypatch):
    """As the largest arrays need it: every thread then goes on through what is left."""
    monkeypatch.setattr(launch, "BLOCKS", 1)
    monkeypatch.setattr(launch, "SUM_BLOCKS", 2)
    monkeypatch.setattr(tables, "SUM_BLOCKS", 2)
    for shape in ((33, 40), (700, 24), (3, 1300)):
        test_dense.test_bias(F32, shape)
        test_dense.test_column_sums(F32, shape, True)
        test_dense.test_gradients_of_relu_and_gelu(BF16, shape)
    test_dense.test_gelu(F32, 3001)
    test_rows.test_layer_norm(F32, 200)
    for geometry in (((3, 5, 7, 16), (2, 2), (2, 2), (0, 0)), ((4, 30, 30, 3), (3, 3), (2, 2), (1, 1))):
        test_images.test_max_pool(F32, *geometry)
        test_images.test_avg_pool(F32, *geometry)
        test_images.test_columns(F32, *geometry, (1, 1))
    test_tables.test_embedding(F32, 100, "int64")
    test_tables.test_dropout(F32, (3, 1001))
    test_tables.test_updates(F32, 5003)
    test_tables.test_sum_of_squares(F32, 70001)


@needs_emulator
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda each: each.name)
def test_places_in_64_bits(dtype, monkeypatch):
    """As arrays of more than 2 ** 31 elements have them, on small ones."""

    class Large(DeviceFunctions):
        def module(self, family, t, p):
            return self.xp.RawModule(code=launch.source(family), options=(*launch.options(t, p), "-DNNMPI_SMALL=0"))

    table = Large(kernels().xp)
    monkeypatch.setattr(test_images, "kernels", lambda: table)
    for geometry in (((3, 5, 7, 16), (2, 2), (2, 2), (0, 0)), ((2, 6, 5, 3), (3, 2), (1, 1), (1, 1))):
        test_images.test_max_pool(dtype, *geometry)
        test_images.test_avg_pool(dtype, *geometry)
        test_images.test_columns(dtype, *geometry, (1, 1))
