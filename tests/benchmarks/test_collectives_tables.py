"""The README's tables from the files of runs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.collectives.rows import CallTimes
from benchmarks.collectives.rows import content as rows_content
from benchmarks.collectives.tables import read, times_by_size
from benchmarks.harness import results
from nnmpi.errors import UsageError
from tests.benchmarks.collectives_job import ROOT

TABLES = ROOT / "benchmarks" / "collectives" / "tables.py"


def content(ranks: int, mpi: str, **times: dict[int, float]) -> dict[str, Any]:
    """Return a run's file with these medians by algorithm and size."""
    header = {"ranks": ranks, "nodes": 1, "mpi": mpi, "operation": "all-reduce", "dtype": "float32", "fit": "no fit"}
    header["machine"] = {"date": "2026-11-20", "cpu": "a processor", "cores": 2}
    rows = [
        {"algorithm": name.replace("_update", "+update"), "size": size, "p50_us": time}
        for name, own in times.items()
        for size, time in own.items()
    ]
    return {"header": header, "rows": rows}


def printed(folder: Path, *contents: dict[str, Any]) -> str:
    """Return what the command prints for these files."""
    files = []
    for number, each in enumerate(contents):
        files.append(folder / f"{number}.json")
        files[-1].write_text(json.dumps(each))
    return subprocess.run([sys.executable, TABLES, *files], check=True, capture_output=True, text=True).stdout


def row(text: str, title: str) -> list[str]:
    """Return the cells of the last row with this title."""
    (*_, line) = (line for line in text.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in line.strip("| ").split("|")][1:]


K, M = 2**10, 2**20
RUN: dict[str, Any] = {
    "native": {4 * K: 10.0, 64 * K: 100.0, 16 * M: 4000.0},
    "shared": {4 * K: 5.0, 64 * K: 20.0, 16 * M: 1700.0},
    "ring": {4 * K: 20.0, 64 * K: 120.0, 16 * M: 2000.0},
    "auto": {4 * K: 5.0, 64 * K: 25.0, 16 * M: 1700.0},
    "native_update": {4 * K: 12.0, 64 * K: 120.0, 16 * M: 5000.0},
    "fused": {4 * K: 12.0, 64 * K: 20.0, 16 * M: 1000.0},
}


def test_ratios_are_of_one_run_and_what_is_missed_is_bold(tmp_path: Path) -> None:
    text = printed(tmp_path, content(2, "Open MPI 5", **RUN, gloo={64 * K: 300.0}))
    assert row(text, "4 KB") == ["2.00", "1.00", "0.50", "1.00 (shared)", "-"]
    assert row(text, "64 KB") == ["5.00", "6.00", "**0.83**", "**0.80** (shared)", "**2.50** (ring)"]
    assert row(text, "16 MB") == ["**2.35**", "5.00", "2.00", "1.00 (shared)", "-"]


def test_the_summary_has_what_comes_closest_to_a_broken_promise(tmp_path: Path) -> None:
    kinds = [(2, "MPICH 5"), (2, "Open MPI 5"), (4, "MPICH 5")]
    text = printed(tmp_path, *(content(ranks, mpi, **RUN) for ranks, mpi in reversed(kinds)))
    assert row(text, "least ratio where one is promised") == [f"{ranks} ranks, {mpi}" for ranks, mpi in kinds]
    shared = row(text, "shared against native")
    assert shared == ["2.35 at 16 MB, needs 2.3", "**2.35** at 16 MB, needs 2.5", "2.35 at 16 MB, needs 1.8"]
    assert row(text, "ring against native")[1:] == ["**0.83** at 64 KB, needs 0.9", "-"]
    assert text.count("\n### ") == 3


def test_gloo_alone_counts_for_every_mpi_where_it_is_better(tmp_path: Path) -> None:
    mixed = content(2, "Open MPI 5", **RUN, gloo={64 * K: 3000.0, 16 * M: 9000.0})
    alone = content(2, "without MPI", gloo={64 * K: 480.0, 16 * M: 10_000.0})
    text = printed(tmp_path, alone, mixed)
    assert text.count("\n### ") == 1
    assert row(text, "64 KB")[-1] == "4.00 (ring)"
    assert row(text, "16 MB")[-1] == "4.50 (ring)"


def test_the_first_file_that_has_an_algorithm_counts() -> None:
    first, second = content(2, "M", native={4: 1.0}), content(2, "M", native={4: 9.0, 16: 3.0}, ring={4: 5.0})
    assert times_by_size([first, second]) == {4: {"native": 1.0, "ring": 5.0}, 16: {"native": 3.0}}


@pytest.mark.parametrize("words", [[], ["missing.json"]])
def test_without_results_a_sentence_says_what_is_needed(words: list[str]) -> None:
    ending = subprocess.run([sys.executable, TABLES, *words], check=False, capture_output=True, text=True)
    assert ending.returncode == 1
    assert "Traceback" not in ending.stderr
    assert ("missing.json holds no rows" if words else "python benchmarks/collectives/tables.py") in ending.stderr


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"header": {}, "rows": []}'])
def test_another_kind_of_file_is_no_result(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError, match=r"a\.json holds no rows of this benchmark"):
        read(tmp_path / "a.json")


def test_the_file_holds_what_was_measured_so_far(tmp_path: Path) -> None:
    file, header = tmp_path / "a.json", {"ranks": 2}
    row = CallTimes("ring", 4, *[1.0] * 5, 3, *[1.0] * 2, None, None, None)
    for finished, rows in ((False, [row]), (True, [row, replace(row, algorithm="tree")])):
        results.write(file, rows_content(header, rows, finished))
    found = read(file)
    assert found == json.loads(file.read_text())
    assert found["header"] == {**header, "finished": True}
    assert [each["algorithm"] for each in found["rows"]] == ["ring", "tree"]
    assert list(tmp_path.iterdir()) == [file]
