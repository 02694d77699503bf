"""Products by MKL, where it is installed (`pip install mkl`): what MKL computes, and what stays
with NumPy.
"""

import numpy as np
import pytest
from hypothesis import given, settings

import nnmpi
from nnmpi import Tensor, nn, ops, optim
from nnmpi.backend.blas import Mkl, load_mkl
from tests.backend.test_gemm import ON_NUMPY, cases, check

pytestmark = pytest.mark.skipif(load_mkl() is None, reason="MKL is not installed")


@pytest.fixture(scope="module")
def every_size():
    """MKL for products of any size."""
    mkl = load_mkl()
    return Mkl(mkl._library, 1, least=0)


@settings(max_examples=300)
@given(cases(ON_NUMPY))
def test_any_product(every_size, case):
    """Exactly what NumPy gives, of any shapes (0 among them), strides and dtypes, written or
    added.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nnmpi.backend.gemm.installed_mkl", lambda: every_size)
        check(np, case)


@pytest.mark.parametrize("turned", [(), (0,), (1,), (0, 1)])
def test_these_are_mkls(every_size, turned):
    """Without them the test above could pass by NumPy alone."""
    a, b = (
        x.T.copy().T if i in turned else x
        for i, x in enumerate((np.eye(3, 4), np.arange(20.0).reshape(4, 5)))
    )
    out = np.ones((3, 5))
    assert every_size.takes(a, b, out)
    every_size.multiply(a, b, out, True)
    np.testing.assert_array_equal(out, 1 + a @ b)


def test_what_stays_with_numpy():
    """Small products, whole numbers, stacks, what lies neither in rows nor in columns, and what is
    no product.
    """
    mkl = load_mkl()
    large, small = np.ones((128, 128), np.float32), np.ones((64, 64), np.float32)
    assert mkl.takes(large, large, None)
    apart = np.ones((256, 256), np.float32)[::2, ::2]
    full, stack = large.astype(int), large[None]
    for a, b in (
        (small, small),
        (full, full),
        (apart, large),
        (large, large.astype(float)),
        (stack, stack),
    ):
        assert not mkl.takes(a, b, None)
    assert not mkl.takes(large, small, None)
    for out in (np.empty((128, 128)), large.T, small):
        assert (
            not mkl.takes(large, large, out) or out.flags.c_contiguous and out.shape == (128, 128)
        )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_step(every_size, compiled, monkeypatch):
    """Attention, products of tensors and linear layers, compiled and not: NumPy's losses but for
    rounding.
    """

    def losses(mkl):
        monkeypatch.setattr("nnmpi.backend.gemm.installed_mkl", lambda: mkl)
        model = nn.Sequential(nn.TransformerBlock(8, 2, 16), nn.Linear(8, 3)).initialize(
            seed=0, dtype="float64"
        )
        optimizer = optim.SGD(model.storage, lr=0.1)
        x = np.random.Generator(np.random.PCG64(0)).normal(size=(2, 5, 8))

        def step(values):
            model.zero_grad()
            with nn.training():
                y = model(values)
                loss = ops.mse(y @ y.transpose(0, 2, 1), np.ones((2, 5, 5)))
            loss.backward()
            optimizer.step()
            return loss

        run = nnmpi.compile(step) if compiled else step
        return [run(Tensor(x)).item() for _ in range(3)]

    np.testing.assert_allclose(losses(every_size), losses(None), rtol=1e-12)
