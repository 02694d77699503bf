"""When a device's kernels are chosen, and what optimizers and clipping make of them; on the double of CuPy."""

import numpy as np
import pytest

from nnmpi.backend.cuda.kernels import DeviceFunctions, DeviceKernels
from nnmpi.backend.kernels.base import Kernels
from nnmpi.backend.kernels.lookup import compiled_kernels, jit, kernels_for
from nnmpi.optim import SGD, Adam, AdamW, clip
from nnmpi.optim.storage import Arrays
from tests.backend.cuda.host import BF16, F16, F32, F64, needs_emulator
from tests.device.library import device_backend, load

pytestmark = needs_emulator


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=lambda each: each.name)
def test_a_devices_arrays_of_any_floating_point(dtype):
    """One table for all; NumPy's arrays and integers get none of it, and `jit(False)` does without."""
    backend = device_backend()
    found = kernels_for(backend.zeros(3, dtype))
    assert isinstance(found, DeviceKernels)
    assert found.is_device
    assert kernels_for(backend.zeros(3, F32)) is found
    assert type(kernels_for(backend.zeros(3, np.int32))) is Kernels
    assert type(kernels_for(np.zeros(3, dtype))) is Kernels
    with jit(False):
        assert type(kernels_for(backend.zeros(3, dtype))) is Kernels
    assert kernels_for(backend.zeros(3, dtype)) is found


def test_compiled_kernels_for_numpy_beside_them():
    """`jit()` switches those on, and leaves a device's as they are, also after `jit(False)`."""
    pytest.importorskip("numba")
    x = device_backend().zeros(3, F32)
    with jit(False), jit():
        assert compiled_kernels() is not None
        assert kernels_for(np.zeros(3, np.float32)) is compiled_kernels()
        assert not compiled_kernels().is_device
        assert kernels_for(x).is_device
    assert type(kernels_for(np.zeros(3, np.float32))) is Kernels


FORMS = {
    "sgd": lambda storage: SGD(storage, 0.1, weight_decay=0.01),
    "momentum": lambda storage: SGD(storage, 0.1, momentum=0.9),
    "nesterov": lambda storage: SGD(storage, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda storage: Adam(storage, 0.1, weight_decay=0.01),
    "adamw": lambda storage: AdamW(storage, 0.1),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda each: each.name)
def test_optimizers_take_one_kernel_per_buffer(name, dtype, monkeypatch):
    """Several steps give NumPy's numbers, with one launch for each buffer and nothing else."""
    backend, launches = device_backend(), []
    rng = np.random.default_rng(0)
    data = [rng.standard_normal(shape).astype(dtype) for shape in ((3, 50), (7,))]
    grads = [rng.standard_normal(each.shape).astype(dtype) for each in data]
    there = Arrays([backend.xp.asarray(each) for each in data], [backend.xp.asarray(each) for each in grads])
    one, other = FORMS[name](Arrays(data, grads)), FORMS[name](there)
    update = DeviceFunctions._update
    monkeypatch.setattr(DeviceFunctions, "_update", lambda *args: (launches.append(args[1]), update(*args)))
    for _ in range(3):
        one.step()
        other.step()
    assert len(launches) == 6
    for ours, theirs in zip(data, there.data, strict=True):
        tolerance = 16 * np.finfo(dtype).eps
        np.testing.assert_allclose(backend.to_host(theirs), ours, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=lambda each: each.name)
def test_clipping_waits_once(dtype):
    """The norm of all gradients is one number from the device; those with gaps count, too."""
    backend, counts = device_backend(), load()._sync.COUNTS
    values = [np.random.default_rng(i).standard_normal((40, 6)).astype(dtype) for i in range(3)]
    grads = [backend.xp.asarray(each) for each in values]
    grads[1] = grads[1][:, ::2]
    values[1] = values[1][:, ::2]
    before = counts.total()
    norm = clip.global_norm(grads)
    assert counts.total() - before == 1
    assert norm == pytest.approx(np.sqrt(sum((each.astype(np.float64) ** 2).sum() for each in values)), rel=1e-14)
    assert clip.global_norm([]) == 0.0


def test_the_norm_of_very_large_gradients():
    """Squares beyond float32 are added up in float64 at once."""
    grad = device_backend().xp.asarray(np.full(10, 1e30, np.float32))
    assert clip.global_norm([grad]) == pytest.approx(np.float32(1e30) * np.sqrt(10.0))
