"""The benchmark inside the ranks of a test: device buffers, and what one rank does wrong."""

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.collectives.command import main
from benchmarks.collectives.options import algorithms
from benchmarks.collectives.tables import read
from benchmarks.collectives.timing import MpiRanks
from nnmpi.comm.execution import Execution
from nnmpi.comm.group import Group
from nnmpi.comm.shared_memory.memory import SharedMemory
from nnmpi.errors import CommError, DeviceError, UsageError
from tests.device.library import device_backend

pytestmark = pytest.mark.mpi

SHORT = "--min 400 --max 4k --factor 8 --iterations 2 --check"


def test_device_buffers_are_staged_and_right(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SHORT.split(), "--backend", "cupy"], group, device_backend())
    printed = capsys.readouterr().out
    assert ("cupy on Fake device" in printed) == group.is_root
    assert ("device arrays: staged through page-locked host memory (MPI is not" in printed) == group.is_root
    for name in ("native", "shared", "ring", "auto"):
        assert sum(line.startswith(f"{name} ") for line in printed.splitlines()) == (2 if group.is_root else 0)
    if group.size > 1:
        assert ("nccl is left out: NCCL needs a GPU for each rank, but ranks 0-" in printed) == group.is_root


@pytest.mark.parametrize("operation", ["broadcast", "all-gather", "reduce-scatter"])
def test_device_buffers_of_other_operations(group: Group, operation: str) -> None:
    main([*SHORT.split(), "--backend", "cupy", "--operation", operation], group, device_backend())


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint32"])
def test_other_dtypes(group: Group, dtype: str, tmp_path: Path) -> None:
    file = Path(group.share(str(tmp_path))) / "a.json"
    main([*SHORT.split(), "--dtype", dtype, "--json", str(file)], group)
    group.barrier()
    timed = {row["algorithm"] for row in read(file)["rows"]}
    assert set(algorithms("all-reduce")) - timed == (
        set() if dtype == "float64" else {"native+update", "fused"} & set(algorithms("all-reduce"))
    )


def test_a_wrong_element_on_one_rank_is_the_same_error_on_all(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    guilty = group.size - 1
    run = Execution.run

    def spoil(self: Execution) -> None:
        run(self)
        if group.rank == guilty and self._array.nbytes == 4096:
            self._array[17] += 2

    monkeypatch.setattr(Execution, "run", spoil)
    bind = Execution.__init__

    def keep(self: Execution, steps: object, array: np.ndarray, *rest: object, **others: object) -> None:
        self._array = array
        bind(self, steps, array, *rest, **others)

    monkeypatch.setattr(Execution, "__init__", keep)
    text = f"rank {guilty} of {group.size} has a wrong result of tree with 4 KB of float32, call 0: element 17 is "
    with pytest.raises(CommError, match=re.escape(text)) as caught:
        main(["--algorithms", "native,tree", "--min", "1k", "--max", "4k", "--check", "--iterations", "1"], group)
    assert len(set(group.gather(str(caught.value)))) == 1
    assert caught.value.exit_status == 1


def test_a_disk_that_fails_on_rank_0_is_an_error_on_all(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("benchmarks.harness.results.write_atomically", fail)
    with pytest.raises(CommError, match="No space left on device"):
        main(f"--algorithms native --max 4 --iterations 1 --json {tmp_path / 'a'}".split(), group)


def test_without_shared_memory_all_goes_on_and_shared_alone_is_an_error(
    group: Group, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise DeviceError("there is no room")

    monkeypatch.setattr(SharedMemory, "__init__", fail)
    main(SHORT.split(), group)
    printed = capsys.readouterr().out
    assert printed.count("shared is left out: there is no room") == (2 if group.is_root else 0)
    assert ("ring  " in printed) == group.is_root
    with pytest.raises(DeviceError, match="there is no room"):
        main([*SHORT.split(), "--algorithms", "shared"], group)


def test_an_update_of_whole_numbers_is_refused(group: Group) -> None:
    with pytest.raises(UsageError, match=r"native\+update .*float32 or float64"):
        main([*SHORT.split(), "--dtype", "int32", "--algorithms", "native+update"], group)


def test_numbers_are_gathered_in_rank_order(group: Group) -> None:
    found = MpiRanks(group).gather_floats(np.array([group.rank, 0.5]))
    assert found.tolist() == [[rank, 0.5] for rank in range(group.size)]
