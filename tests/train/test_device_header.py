"""What the header says of devices: one rank's slower products are every rank's business."""

from dataclasses import replace
from typing import cast

import pytest

from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.device import REMEDY
from nnmpi.base.errors import DeviceError
from nnmpi.train.computing import describe_device, explain_errors

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.host_only("it asks for the host's backend and the device's by itself"),
]


def test_the_host_has_nothing_to_say(group, monkeypatch):
    """Unless it was chosen automatically, and one rank could be meant to use a device, or somebody
    asks.
    """
    assert describe_device(numpy_backend(), group, verbose=True) == []
    chosen = replace(numpy_backend(), reason="auto chose numpy: why")
    for there in (False, True):
        last = there and group.rank == group.size - 1
        monkeypatch.setattr("nnmpi.train.computing.expects_device", lambda last=last: last)
        assert describe_device(chosen, group) == (
            ["chosen: auto chose numpy: why"] if there else []
        )
        assert describe_device(chosen, group, verbose=True) == ["chosen: auto chose numpy: why"]


class _FullDevice:
    """A library whose every error means that the device has no room."""

    def explain(self, error):
        return DeviceError(f"the device has no room for more ({error}); {REMEDY}")


def test_a_full_device_names_the_options_that_help():
    with pytest.raises(DeviceError) as caught, explain_errors(cast("Backend", _FullDevice())):
        raise RuntimeError("out of memory")
    assert (
        str(caught.value)
        == "the device has no room for more (out of memory); lower --batch-size, raise"
        " --microbatches, use --activation-memory least or --precision bf16, or spread the model"
        " over more ranks with --tp or --pp"
    )
