"""The device of the checks: a real one, or the stand-in of the tests where that is on the path."""

import os

import pytest

from nnmpi.backend.backend import Backend
from nnmpi.backend.device import device_problem, select
from nnmpi.comm.mpi.start import import_mpi
from nnmpi.errors import LaunchError
from nnmpi.launcher import read_launch

RANKS = (1, 2, 4)


def mpi_missing() -> str | None:
    """Return why mpi4py finds no MPI library, None if it finds one; nothing is started."""
    try:
        import_mpi()
    except LaunchError as error:
        return str(error)
    return None


collect_ignore = ["test_ranks.py", "test_transports.py"] if mpi_missing() else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `numpy_backend()` mean the host here, also where the whole suite runs on the stand-in.

    Where there is no device, checks that need one are left out among other tests; by themselves they say why.
    """
    if device_problem() and any("tests/gpu/" not in item.nodeid for item in items):
        items[:] = [item for item in items if "tests/gpu/" not in item.nodeid or not needs_device(item)]
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.host_only("the checks of tests/gpu, which compare the device with the host"))


def needs_device(item: pytest.Item) -> bool:
    """Return whether a check asks for a device."""
    return "device" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def device() -> Backend:
    """The backend on the device of this rank; without one the check is skipped, and the reason says what is missing."""
    problem = device_problem()
    if problem is not None:
        pytest.skip(f"no device: {problem}")
    launch = read_launch(os.environ)
    if launch is not None and launch.size not in RANKS:
        pytest.skip(f"these checks are for {', '.join(map(str, RANKS))} ranks")
    return select("cupy", 0 if launch is None else launch.rank)


@pytest.fixture
def real_device(device: Backend) -> Backend:
    """The same, where it is a card: for what a stand-in cannot have."""
    if is_stand_in(device):
        pytest.skip("the stand-in for a device has no driver")
    return device


def is_stand_in(backend: Backend) -> bool:
    """Return whether the device is computed by NumPy."""
    return "tests/device/fake" in str(backend.xp.__file__)
