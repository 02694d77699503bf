"""Whether MPI is given device pointers: asked in order, agreed, and tried by a process that may die of it.

Over the double a device's memory is the host's, so that any MPI can take it: what is given to MPI is really sent.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from nnmpi.comm.algorithms.registry import ALGORITHMS, NATIVE
from nnmpi.comm.collective import ALL_GATHER, BROADCAST, REDUCE_SCATTER
from nnmpi.comm.device import cuda_aware
from nnmpi.comm.device.cuda_aware import VARIABLE, Awareness, ask, detect
from nnmpi.comm.device.transport import Devices
from nnmpi.comm.execution import NativeExecution
from nnmpi.comm.group import Group
from nnmpi.comm.mpi import mpi_world as cuda
from nnmpi.comm.mpi.mpi_world import mpi_world, wrap
from nnmpi.errors import UsageError
from tests.device.library import FOLDER, load

# A device whose memory is not the host's: touching it there is a segmentation fault, as with a real one.
FOREIGN = """
class Array:
    def __init__(self, size): self.size = size
    __cuda_array_interface__ = property(lambda self: {"shape": (self.size,), "typestr": "|u1", "data": (4096, False),
                                                      "version": 3, "strides": None})
class _Runtime:
    def getDeviceCount(self): return 1
    def getDeviceProperties(self, number): return {"name": b"foreign"}
    def memGetInfo(self): return 1, 1
    def driverGetVersion(self): return 13000
    runtimeGetVersion = driverGetVersion
class _Stream:
    def synchronize(self): pass
class _Device:
    def __init__(self, number): pass
    def use(self): pass
class cuda:
    runtime, Device = _Runtime(), _Device
    get_current_stream = staticmethod(_Stream)
def asarray(values): return Array(len(values))
def zeros(size, dtype): return Array(size)
"""


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let the child find packages in folders of ours, and let each test try anew."""

    def prepend(folder: Path) -> None:
        root = str(Path(__file__).parents[3])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), root]))

    cuda_aware.probe.cache_clear()
    yield prepend
    cuda_aware.probe.cache_clear()


def test_the_users_word_comes_first() -> None:
    assert ask(mpi_world(), {VARIABLE: "0"}) == Awareness(False, "NNMPI_CUDA_AWARE=0")
    assert ask(mpi_world(), {VARIABLE: "1"}) == Awareness(True, "NNMPI_CUDA_AWARE=1")


def test_the_wheels_say_no_by_themselves() -> None:
    """Both Open MPI's and MPICH's from PyPI are built without CUDA, and say so."""
    found = ask(mpi_world(), {})
    assert not found.aware
    assert found.reason.startswith(("MPI is not CUDA-aware: MPIX_", "MPI is not known to be CUDA-aware"))


def test_memory_kinds_are_believed_before_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_alloc_kinds", lambda: "mpi,system,cuda:device")
    assert ask(mpi_world(), {}) == Awareness(True, "MPI's memory kinds are mpi,system,cuda:device")
    monkeypatch.setattr(cuda, "_alloc_kinds", lambda: "mpi,system")
    assert not ask(mpi_world(), {}).aware


@pytest.mark.parametrize(("name", "answer"), [("MPIX_Query_cuda_support", 1), ("MPIX_GPU_query_support", 0)])
def test_functions_are_asked(monkeypatch: pytest.MonkeyPatch, name: str, answer: int) -> None:
    class Library:
        """An MPI that has one of them."""

    def query(*args: Any) -> int:
        if args:
            args[1]._obj.value = 1
        return answer

    library = Library()
    setattr(library, name, query)
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda file: library)
    assert ask(mpi_world(), {}) == Awareness(True, f"{name} says yes")
    delattr(library, name)
    assert "it does not say" in ask(mpi_world(), {}).reason or "memory kinds" in ask(mpi_world(), {}).reason


@pytest.mark.mpi
def test_one_rank_that_says_no_decides(group: Group) -> None:
    """The process that tries it is not even started."""
    word = "0" if group.rank == group.size - 1 else "1"
    assert group.gather(detect(group, {VARIABLE: word}).aware) == [False] * group.size


@pytest.mark.mpi
def test_an_unknown_word_is_refused(group: Group) -> None:
    with pytest.raises(UsageError, match="NNMPI_CUDA_AWARE is 'yes' on rank 0; give one of auto, 0, 1"):
        detect(group, {VARIABLE: "yes"})


@pytest.mark.mpi
@pytest.mark.timeout(180)
def test_a_right_yes_is_tried_and_believed(group: Group, path: Any) -> None:
    path(FOLDER)
    found = detect(group, {VARIABLE: "1"})
    wanted = "NNMPI_CUDA_AWARE=1, and a process that tried it got its bytes back"
    assert group.gather([found.aware, found.reason]) == [[True, wanted]] * group.size


@pytest.mark.mpi
@pytest.mark.timeout(180)
def test_a_wrong_yes_costs_a_child_and_not_the_job(group: Group, path: Any, tmp_path: Path) -> None:
    """MPI reads the address of foreign memory, and the child dies; the arrays are staged then."""
    (tmp_path / "cupy.py").write_text(FOREIGN)
    path(tmp_path)
    found = detect(group, {VARIABLE: "1"})
    assert group.gather(found.aware) == [False] * group.size
    assert found.reason.startswith("NNMPI_CUDA_AWARE=1, but a process that tried it ")
    assert "SIGSEGV" in found.reason or "status" in found.reason
    twin = group.duplicate()
    twin._devices = Devices(twin, twin.memory, found)
    device = load().ones(3, np.float32)
    twin.all_reduce(device)
    assert group.gather(device.get().tolist()) == [[group.size] * 3] * group.size
    assert twin.devices().describe().startswith("staged through page-locked host memory (NNMPI_CUDA_AWARE=1, but")
    twin.free()


@pytest.mark.mpi
@pytest.mark.timeout(180)
def test_no_device_in_the_child_is_said(group: Group, path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path(FOLDER)
    monkeypatch.setenv("NNMPI_FAKE_DEVICES", "0")
    found = detect(group, {VARIABLE: "1"})
    assert not found.aware
    assert "ended with status" in found.reason


@pytest.fixture
def direct(group: Group) -> Iterator[Group]:
    """A group whose MPI takes device arrays."""
    twin = group.duplicate()
    twin._devices = Devices(twin, twin.memory, Awareness(True, "the test says so"))
    yield twin
    twin.free()


@pytest.mark.mpi
@pytest.mark.parametrize("n", [0, 5, 7919])
@pytest.mark.parametrize("algorithm", [NATIVE, *ALGORITHMS])
def test_sums_of_arrays_that_mpi_is_given(direct: Group, algorithm: str, n: int) -> None:
    every = [np.random.default_rng(rank).standard_normal(n).astype(np.float32) for rank in range(direct.size)]
    host = every[direct.rank].copy()
    direct.all_reduce(host, algorithm)
    device = load().asarray(every[direct.rank])
    bound = direct.bind(device, algorithm, 1)
    bound.run()
    right = [device.get().tobytes() == host.tobytes()]
    device[...] = load().asarray(every[direct.rank])
    bound.start()
    while not bound.poll():
        pass
    right.append(bool(np.allclose(device.get(), host, rtol=1e-5, atol=1e-5)))
    bound.free()
    assert direct.gather(right) == [[True, True]] * direct.size


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", [NATIVE, "ring", "tree"])
def test_other_collectives_of_arrays_that_mpi_is_given(direct: Group, algorithm: str) -> None:
    results = []
    for operation in (REDUCE_SCATTER.name, ALL_GATHER.name, BROADCAST.name):
        host = np.arange(11, dtype=np.float32) * (direct.rank + 1)
        device = load().asarray(host)
        direct.bind(host, algorithm, 2, operation).run()
        direct.bind(device, algorithm, 2, operation).run()
        start = direct.rank * 11 // direct.size + 1 if operation == REDUCE_SCATTER.name else 0
        results.append(bool(np.array_equal(device.get()[start : start + 1], host[start : start + 1])))
    shaped = load().full((2, 3), direct.rank, dtype=np.float64)
    direct.broadcast(shaped, direct.size - 1)
    results.append(bool((shaped.get() == direct.size - 1).all()))
    assert direct.gather(results) == [[True] * 4] * direct.size
    assert direct.devices().describe() == "given to MPI as they are (the test says so)"


@pytest.mark.parametrize("operation", ["all-reduce", "broadcast", "all-gather", "reduce-scatter"])
def test_started_collectives_of_device_arrays_are_blocking_ones(operation: str) -> None:
    """Open MPI takes no device pointers in the others."""

    class Watched:
        """A communicator, whose calls are noted."""

        def __init__(self) -> None:
            self.calls: list[str] = []

        def __getattr__(self, name: str) -> Any:
            found = getattr(wrap(MPI.COMM_SELF), name)

            def call(*args: Any) -> Any:
                self.calls.append(name)
                return found(*args)

            return call if callable(found) else found

    comm, array = Watched(), load().arange(5.0)
    pending = NativeExecution(array, comm, operation, on_device=True)  # type: ignore[arg-type]
    for _ in range(2):
        pending.start()
        assert pending.poll()
        pending.wait()
    done = [name for name in comm.calls if name != "wait_all"]  # of nothing
    assert len(done) == 2 and not any(name.startswith("i") for name in done)
    np.testing.assert_array_equal(array.get(), np.arange(5.0))
