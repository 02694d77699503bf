"""What the header says of devices: one rank's slower products are every rank's business."""

from dataclasses import replace
from typing import cast

import pytest

from nnmpi.backend import cublas
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.device_errors import REMEDY
from nnmpi.comm.group import Group
from nnmpi.errors import DeviceError
from nnmpi.train.device import describe_device, explained
from tests.device.library import device_backend

pytestmark = [pytest.mark.mpi, pytest.mark.host_only("it asks for the host's backend and the device's by itself")]


def test_products_that_cublas_does_not_compute(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing where its calls pass their test; a line on all ranks where one does without them."""
    pytest.importorskip("ml_dtypes")  # which bf16 needs
    backend = device_backend()
    assert not any(line.startswith("products:") for line in describe_device(backend, group, "bf16"))
    if group.rank == group.size - 1:
        monkeypatch.setenv("NNMPI_GEMM", "matmul")
    cublas.products_of.cache_clear()
    try:
        lines = describe_device(backend, group, "bf16")
    finally:
        monkeypatch.undo()
        cublas.products_of.cache_clear()
    assert [line for line in lines if line.startswith("products:")] == [
        "products: cupy.matmul computes products of float32 to float32, bfloat16 to bfloat16, bfloat16 to float32: "
        "NNMPI_GEMM=matmul says so"
    ]


def test_the_host_has_nothing_to_say(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it was chosen automatically, and one rank could be meant to use a device, or somebody asks."""
    assert describe_device(numpy_backend(), group, "bf16", verbose=True) == []
    chosen = replace(numpy_backend(), reason="auto chose numpy: why")
    for there in (False, True):
        last = there and group.rank == group.size - 1
        monkeypatch.setattr("nnmpi.train.device.expects_device", lambda last=last: last)
        assert describe_device(chosen, group, "bf16") == (["chosen: auto chose numpy: why"] if there else [])
        assert describe_device(chosen, group, "bf16", verbose=True) == ["chosen: auto chose numpy: why"]


class _FullDevice:
    """A library whose every error means that the device has no room."""

    def explain(self, error: BaseException) -> DeviceError:
        return DeviceError(f"the device has no room for more ({error}); {REMEDY}")


def test_a_full_device_names_the_options_that_help() -> None:
    with pytest.raises(DeviceError) as caught, explained(cast("Backend", _FullDevice())):
        raise RuntimeError("out of memory")
    assert str(caught.value) == (
        "the device has no room for more (out of memory); lower --batch-size, raise --grad-accum, use "
        "--activation-memory least or --precision bf16, or spread the model over more ranks with --tp or --pp"
    )
