"""Updates inside `jit` are the plain ones within rounding, compiled or not, and other arrays are left to those."""

import numpy as np
import pytest

from nnmpi.backend.kernels import jit
from nnmpi.optim.adam import Adam, AdamW
from nnmpi.optim.sgd import SGD
from nnmpi.optim.storage import Arrays

pytest.importorskip("numba")

MAKERS = {
    "sgd": lambda s: SGD(s, 0.1),
    "decay": lambda s: SGD(s, 0.1, weight_decay=0.3),
    "momentum": lambda s: SGD(s, 0.1, momentum=0.9, weight_decay=0.3),
    "nesterov": lambda s: SGD(s, 0.1, momentum=0.9, nesterov=True, weight_decay=0.3),
    "adam": lambda s: Adam(s, 0.1, weight_decay=0.3),
    "adam, other settings": lambda s: Adam(s, 0.1, betas=(0.5, 0.7), eps=0.1),
    "adamw": lambda s: AdamW(s, 0.1, weight_decay=0.3),
}


def train(make, dtype, shape, contiguous=True):
    """Return the weights and the state after some updates."""
    rng = np.random.default_rng(0)
    data, grad = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    if not contiguous:
        data, grad = data[:, ::2], grad[:, ::2]
    optimizer = make(Arrays([data], [grad]))
    for _ in range(3):
        grad[...] = rng.standard_normal(grad.shape)
        optimizer.step()
    return [data, *(array for arrays in optimizer.slots().values() for array in arrays)]


@pytest.mark.parametrize("name", MAKERS)
def test_as_the_plain_update(name):
    """Against float64, for more elements than a block has."""
    expected = train(MAKERS[name], np.float64, (70001,))
    with jit():
        found = train(MAKERS[name], np.float32, (70001,))
    plain = train(MAKERS[name], np.float32, (70001,))
    for mine, theirs, wide in zip(found, plain, expected, strict=True):
        bound = 1e-5 * abs(wide).max()  # Adam's first updates divide numbers near 0 by one another
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=bound)
        assert abs(mine - wide).max() <= 2 * abs(theirs - wide).max() + 1e-7


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", [(np.float64, (30,), True), (np.float32, (5, 8), False)])
def test_other_arrays_as_before(name, kind):
    """float64, and arrays with gaps: bit for bit."""
    with jit():
        found = train(MAKERS[name], *kind)
    for mine, theirs in zip(found, train(MAKERS[name], *kind), strict=True):
        np.testing.assert_array_equal(mine, theirs)
