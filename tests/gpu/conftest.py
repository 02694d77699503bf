"""The device of the checks: the double of CuPy; an interpreted one, or a card, where
`scripts/test-gpu` runs them.
"""

import os

import pytest

from nnmpi.backend.device import device_problem, select
from nnmpi.base.errors import LaunchError
from nnmpi.base.launcher import read_launch
from nnmpi.comm.mpi.start import import_mpi
from tests.device import interpreted
from tests.device.library import device_backend

DEVICE = os.environ.get("NNMPI_TEST_GPU")
ON_A_CARD, INTERPRETED = DEVICE == "card", DEVICE in interpreted.MODES
RANKS = (1, 2, 4)
if INTERPRETED:
    interpreted.load()


def mpi_missing():
    """Return whether mpi4py finds no MPI library; nothing is started."""
    try:
        import_mpi()
    except LaunchError:
        return True
    return False


collect_ignore = ["test_ranks.py", "test_transports.py"] if mpi_missing() else []


def pytest_collection_modifyitems(items):
    """Let `numpy_backend()` mean the host here, also where the whole suite runs on the double."""
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(
                pytest.mark.host_only(
                    "the checks of tests/gpu, which compare the device with the host"
                )
            )


@pytest.fixture(scope="session")
def device():
    """The backend on this rank's device; without the card that is asked for, a check is skipped and
    says why.
    """
    launch = read_launch(os.environ)
    rank = 0 if launch is None else launch.rank
    if DEVICE is None:
        return device_backend(rank)
    problem = device_problem()
    if problem is not None:
        pytest.skip(f"no device: {problem}")
    if launch is not None and launch.size not in RANKS:
        pytest.skip(f"these checks are for {', '.join(map(str, RANKS))} ranks")
    return select("cupy", rank)


@pytest.fixture
def real_device(device):
    """The same, where it is a card: for what a stand-in cannot have."""
    if is_stand_in(device):
        pytest.skip("the stand-in for a device has no driver")
    return device


def is_stand_in(backend):
    """Return whether the device is computed by NumPy."""
    return "tests/device/fake" in str(backend.xp.__file__)
