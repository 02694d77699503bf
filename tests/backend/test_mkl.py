"""Products by MKL, where it is installed (`pip install 'nnmpi[mkl]'`): what MKL computes, and what stays with NumPy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings

import nnmpi
from nnmpi import Tensor, nn, ops, optim
from nnmpi.backend import mkl
from nnmpi.backend.gemm import BlasName, gemm, other_blas, use_blas
from nnmpi.backend.recording import Recorder
from nnmpi.errors import UsageError
from tests.backend.test_gemm import HEADS, Case, cases, check, plain

with_mkl = pytest.mark.skipif(mkl.find_mkl() is None, reason="MKL is not installed")


@pytest.fixture(scope="module")
def every_size() -> Iterator[mkl.Mkl]:
    """MKL for products of any size, inside `use_blas`."""
    products = mkl.Mkl(least=(0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nnmpi.backend.gemm.installed_mkl", lambda: products)
        yield products


@with_mkl
@settings(max_examples=300)
@example(Case(((2, 3, 4, 5), (2, 3, 5, 4), (2, 3, 4, 4)), (HEADS, HEADS, plain(2, 3, 4, 4)), True, ("float64",) * 2, 0))
@given(cases())
def test_any_product(every_size: mkl.Mkl, case: Case) -> None:
    """Exactly what NumPy gives, of any shapes (0 among them), strides and dtypes, written or added."""
    with use_blas("mkl"):
        check(np, case)


@with_mkl
@pytest.mark.parametrize(
    ("shapes", "turned"),
    [
        pytest.param(((3, 4), (4, 5)), (), id="rows"),
        pytest.param(((4, 3), (5, 4)), (0, 1), id="columns"),
        pytest.param(((2, 3, 4), (4, 5)), (), id="stack"),
        pytest.param(((2, 3, 4), (2, 4, 5)), (2,), id="stack-result"),
    ],
)
def test_these_are_mkls(every_size: mkl.Mkl, shapes: tuple[tuple[int, ...], ...], turned: tuple[int, ...]) -> None:
    """Without them the test above could pass by NumPy alone."""
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    a, b = (x.swapaxes(-1, -2) if i in turned else x for i, x in enumerate(arrays))
    shape = (*a.shape[:-1], b.shape[-1])
    out = np.full(shape, np.nan, np.float32)
    if 2 in turned:
        out = np.full((*shape[:-2], shape[-1], shape[-2]), np.nan, np.float32).swapaxes(-1, -2)
    assert every_size.multiply(np, a, b, out, False) is out
    np.testing.assert_array_equal(out, np.full(shape, 4))


@with_mkl
def test_what_stays_with_numpy() -> None:
    """Small products, whole numbers, what lies neither in rows nor in columns, and what is no product."""
    products = mkl.Mkl()
    large, small = np.ones((128, 128), np.float32), np.ones((64, 64), np.float32)
    assert products.multiply(np, large, large, None, False) is not None
    apart = np.ones((256, 256), np.float32)[::2, ::2]
    for a, b in ((small, small), (large.astype(int), large.astype(int)), (apart, large), (large, large.astype(float))):
        assert products.multiply(np, a, b, None, False) is None
    assert products.multiply(np, large, small, None, False) is None
    assert products.multiply(np, large, large, np.empty((128, 128)), False) is None


@with_mkl
def test_the_block_ends() -> None:
    """Inside another one, too, and a wrong name is refused."""
    assert other_blas() is None
    with use_blas("mkl"):
        assert other_blas() is not None
        with use_blas("numpy"):
            assert other_blas() is None
        assert other_blas() is not None
    assert other_blas() is None
    with pytest.raises(UsageError, match="BLAS 'blis' is unknown; choose numpy, avx2 or mkl"), use_blas("blis"):  # type: ignore[arg-type]
        pass


def test_without_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence says what to do."""
    monkeypatch.setattr(mkl, "find_mkl", lambda: None)
    with pytest.raises(UsageError, match=r"MKL is not installed; install nnmpi\[mkl\]"):
        mkl._load.__wrapped__(False)


@with_mkl
def test_a_recording_multiplies_again(every_size: mkl.Mkl) -> None:
    """On the same memory, which the recording keeps though nobody else does; stacks too."""
    a, b = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)
    recorder = Recorder()
    with recorder.running(), use_blas("mkl"):
        module = recorder.module(np)
        between = gemm(module, module.add(a, 0), b)
        result = gemm(module, module.stack([between, between]), np.ones((2, 2, 2), np.float32))
        del between
    a[...] = 2
    for call in recorder.calls:
        call()
    np.testing.assert_array_equal(result, np.full((2, 2, 2), 12))


@with_mkl
@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_step(every_size: mkl.Mkl, compiled: bool) -> None:
    """Attention, products of tensors and linear layers, compiled and not: NumPy's losses but for rounding."""

    def losses(name: BlasName) -> list[float]:
        model = nn.Sequential(nn.TransformerBlock(8, 2, 16), nn.Linear(8, 3)).initialize(seed=0, dtype="float64")
        optimizer = optim.SGD(model.storage, lr=0.1)
        x = np.random.Generator(np.random.PCG64(0)).normal(size=(2, 5, 8))

        def step(values: Any) -> Tensor:
            model.zero_grad()
            with nn.training():
                y = model(values)
                loss = ops.mse(y @ y.transpose(0, 2, 1), np.ones((2, 5, 5)))
            loss.backward()
            optimizer.step()
            return loss

        with use_blas(name):
            run = nnmpi.compile(step) if compiled else step
            return [run(Tensor(x)).item() for _ in range(3)]

    np.testing.assert_allclose(losses("mkl"), losses("numpy"), rtol=1e-12)
