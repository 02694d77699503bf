"""gloo as a contestant, where torch is installed, and alone."""

import sys
from pathlib import Path

import pytest

from benchmarks.collectives.gloo import check_gloo
from nnmpi.errors import UsageError
from tests.benchmarks.collectives_job import LIMIT_S, ROOT, bench, read
from tests.harness.job import run

pytest.importorskip("torch")

SHORT = "--min 400 --max 64k --factor 100 --iterations 2 --check"


@pytest.mark.parametrize("ranks", [1, 3])
def test_gloo_takes_part_and_is_right(tmp_path: Path, ranks: int) -> None:
    ending = bench(tmp_path, f"--algorithms native,gloo {SHORT} --json a.json", ranks)
    assert ending.status == 0, ending.output
    rows = read(tmp_path / "a.json")["rows"]
    assert [row["algorithm"] for row in rows] == ["native", "gloo"] * 2
    assert all(row["speed_against_native"] > 0 for row in rows)


def test_gloo_alone_needs_no_mpi(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    program = str(ROOT / "benchmarks" / "collectives" / "alone.py")
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--"]
    ending = run([*start, program, *SHORT.split(), "--json", str(file)], tmp_path / "output", LIMIT_S)
    assert ending.status == 0, ending.output
    content = read(file)
    assert [(row["algorithm"], row["size"], row["iterations"]) for row in content["rows"]] == [
        ("gloo", 400, 2),
        ("gloo", 40_000, 2),
    ]
    assert (content["header"]["mpi"], content["header"]["ranks"]) == ("without MPI", 2)


def test_several_nodes_have_no_loopback_device_in_common() -> None:
    with pytest.raises(UsageError, match="over the loopback device of one node, not on 2"):
        check_gloo(2)
