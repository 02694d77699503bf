"""What the header says of devices: one rank's slower products are every rank's business."""

from dataclasses import replace
from typing import cast

import pytest

from nnmpi.backend import cublas
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.device_errors import REMEDY
from nnmpi.comm.group import Group
from nnmpi.errors import DeviceError, UsageError
from nnmpi.train.build import find_layout
from nnmpi.train.cli import parse
from nnmpi.train.device import check_convolution, describe_device, explained
from tests.device.conv.cases import cudnn_double
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


def test_how_convolutions_are_computed(group: Group) -> None:
    """By cuDNN where it is; where it is insisted on and is not there, all ranks say so before anything is computed."""
    backend = device_backend()
    with cudnn_double() as settings:
        settings.installed = False
        check_convolution("auto", backend)
        check_convolution("im2col", backend)
        with pytest.raises(DeviceError, match=r"'tuned' cannot be used: .* install nnmpi\[cudnn\]"):
            check_convolution("tuned", backend)
        lines = describe_device(backend, group, "float32")
        assert "convolutions: im2col and cuBLAS: cuDNN itself cannot be loaded (Unable to find symbol" in str(lines)
    with cudnn_double():
        check_convolution("tuned", backend)
        assert "convolutions: cuDNN 9.27.0" in describe_device(backend, group, "float32")
    check_convolution("auto", numpy_backend())
    with pytest.raises(UsageError, match="--convolution im2col belongs to a CUDA device"):
        check_convolution("im2col", numpy_backend())


def test_the_host_has_nothing_to_say(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it was chosen automatically, and one rank could be meant to use a device, or somebody asks."""
    assert describe_device(numpy_backend(), group, "bf16", verbose=True) == []
    chosen = replace(numpy_backend(), reason="auto chose numpy: why")
    for there in (False, True):
        last = there and group.rank == group.size - 1
        monkeypatch.setattr("nnmpi.train.device.expects_device", lambda last=last: last)
        assert describe_device(chosen, group, "bf16") == (["chosen: auto chose numpy: why"] if there else [])
        assert describe_device(chosen, group, "bf16", verbose=True) == ["chosen: auto chose numpy: why"]


@pytest.mark.mpi
def test_ranks_that_compute_alike_do_not_tune_apart(group: Group) -> None:
    """Where layers are sharded those that are whole are computed by several ranks, which are to agree in every bit."""
    config = parse(["--model", "cnn", "--backend", "cupy", "--convolution", "tuned", "--tp", str(group.size)])
    if group.size == 1:
        assert find_layout(config, group)[1].tp == 1
        return
    with pytest.raises(UsageError, match=f"tuned lets each rank time plans .* tp {group.size} .* --convolution cudnn"):
        find_layout(config, group)
    dp = parse(["--model", "cnn", "--backend", "cupy", "--convolution", "tuned", "--dp", str(group.size)])
    assert find_layout(dp, group)[1].dp == group.size


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
