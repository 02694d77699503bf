"""Compiled steps on a device: replayed, they give bit for bit what eager ones give there."""

import numpy as np
import pytest

import nnmpi
from nnmpi import nn, ops, optim
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.kernels import jit
from tests.device.library import device_backend, load
from tests.nn.test_compiled import step_of


def test_kernels_that_are_switched_off_are_recorded_apart() -> None:
    """As on the host: within `jit(False)` a step is another one."""
    backend = device_backend()
    step = nnmpi.compile(lambda x: ops.softmax(x))
    x = backend.asarray(np.linspace(0, 1, 12, dtype="float32").reshape(3, 4))
    first = step(x)
    with jit(False):
        second = step(x)
    assert step.recordings == 2
    np.testing.assert_allclose(backend.to_host(first.data), backend.to_host(second.data), rtol=1e-6)


def test_a_replay_makes_no_more_calls_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the library and of kernels: results are written where they lie, and none is copied there."""
    cupy = load()
    backend = device_backend()
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).initialize(backend=backend)
    update = optim.Adam(model.storage)

    copies = []
    monkeypatch.setattr("nnmpi.backend.recording._fill", lambda *args: copies.append(args))
    compiled = nnmpi.compile(step_of(model, update))
    x, y = backend.asarray(np.ones((4, 6), "float32")), backend.asarray(np.zeros(4, "int64"))
    compiled(x, y)
    with cupy._sync.no_synchronize():
        compiled(x, y)
    assert not copies and compiled.calls < 40


@pytest.mark.parametrize("bias", [True, False])
def test_relu_stops_gradients_at_0(bias: bool) -> None:
    """Of small whole numbers, whose products are often 0 and always exact: as on the host, to the last bit."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-1, 2, shape).astype("float32") for shape in ((9, 4), (4, 6), (6,))][: 2 + bias]
    results = []
    for backend in (device_backend(), numpy_backend()):
        leaves = [nnmpi.Tensor(backend.asarray(each), requires_grad=True) for each in arrays]
        y = ops.linear_relu(*leaves)
        y.backward(backend.asarray(np.arange(54, dtype="float32").reshape(9, 6)))
        results.append([backend.to_host(each) for each in (y.data, *(leaf.grad for leaf in leaves))])
    for ours, host in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, host)
