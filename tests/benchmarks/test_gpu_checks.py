"""The command that runs the checks on a device: its report, its sentence without one, and a run on the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import recorder, report
from tests.harness.records import FAILED, PASSED, SKIPPED
from tests.harness.suite import Result

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.host_only("the command chooses its backend itself")


def test_seconds_and_words_of_each_check(tmp_path: Path) -> None:
    """Three phases a rank; the words of the first rank that failed."""
    file = tmp_path / "records"
    lines = [("a", 0.5, ""), ("a", 1.0, ""), ("a", 0.5, ""), *[("b", 1.0, "")] * 5, ("b", 3.0, "no"), ("b", 0.0, "yes")]
    records = [{"test": test, "seconds": taken, "words": said} for test, taken, said in lines]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    seconds, words = recorder.read(file)
    assert seconds == {"a": 2.0, "b": 4.0} and words == {"b": "no"}
    assert recorder.read(tmp_path / "none") == ({}, {})


def test_parts_and_their_summary() -> None:
    """Every check with how it ended; what was skipped, why; what could not be run at all."""
    result = Result(2, {"a": PASSED, "b": FAILED, "c": SKIPPED, "d": FAILED}, {"c": "no cuDNN"}, 1.25)
    part = report.part(result, {"a": 0.5}, {"b": "AssertionError"})
    assert (part["passed"], part["failed"], part["skipped"], part["ranks"]) == (1, 2, 1, 2)
    assert [check.get("reason") for check in part["checks"]] == [None, "AssertionError", "no cuDNN", "it did not end"]
    text = report.summary([part, report.not_run(4, "mpi4py finds no MPI library")])
    for words in (
        "2 ranks:     1 passed, 2 failed, 1 skipped",
        "4 ranks: not run: mpi4py finds",
        "skipped 1: no cuDNN",
    ):
        assert words in text
    assert not report.passed([part]) and not report.passed([report.not_run(1, "")])
    assert report.passed([report.part(Result(0, {"a": PASSED}), {}, {})])


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command as scripts/test-gpu does, without a device; `more` is added to the environment."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **more}
    command = [sys.executable, "-m", "tests.gpu", *words]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110)


def test_without_a_device() -> None:
    """One sentence, and status 1."""
    done = run()
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("scripts/test-gpu: there is no device to run the checks on: ")


def test_a_run_on_the_stand_in(tmp_path: Path) -> None:
    """Serial, and on the one rank that needs no mpirun of several; the report is where it was asked for."""
    file = tmp_path / "report.json"
    done = run("--backend", "fake", "--ranks", "", "--json", str(file), "tests/gpu/test_errors.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    (part,) = found["parts"]
    assert found["passed"] and found["facts"]["stand_in"] and part["ranks"] == 0 and part["failed"] == 0
    outcomes = {check["name"].partition("::")[2]: check for check in part["checks"]}
    assert outcomes["test_out_of_memory"]["outcome"] == PASSED and outcomes["test_out_of_memory"]["seconds"] > 0
    assert outcomes["test_more_than_the_card_has"]["reason"] == "Skipped: the stand-in for a device has no driver"


def test_without_an_mpi_library(tmp_path: Path) -> None:
    """All files are read; only the check that needs the library is left out, and says why; so is the part of ranks."""
    file = tmp_path / "report.json"
    words = ("--backend", "fake", "--ranks", "1", "--json", str(file), "-k", "to_the_last_bit or no_copy_overtakes")
    done = run(*words, MPI4PY_LIBMPI="/nonexistent.so")
    assert done.returncode == 0, done.stdout + done.stderr
    serial, one = json.loads(file.read_text())["parts"]
    assert (serial["passed"], serial["failed"], serial["skipped"]) == (2, 0, 1)
    (reason,) = (check["reason"] for check in serial["checks"] if check["outcome"] == SKIPPED)
    assert reason.startswith("Skipped: no MPI library can be loaded")
    assert "mpi4py finds no MPI library" in one["not_run"]


def test_a_lost_device_does_not_take_the_other_checks_along(tmp_path: Path) -> None:
    """A check ends the process with an error of the device; the next one is run in a new process."""
    checks = tmp_path / "test_lost.py"
    checks.write_text(
        "def test_first():\n    raise RuntimeError('cudaErrorIllegalAddress: an illegal memory access')\n"
        "def test_second():\n    pass\n"
    )
    file = tmp_path / "report.json"
    done = run("--backend", "fake", "--ranks", "", "--json", str(file), str(checks))
    assert done.returncode == 1
    outcomes = {
        check["name"].rpartition("::")[2]: check for check in json.loads(file.read_text())["parts"][0]["checks"]
    }
    assert (outcomes["test_first"]["outcome"], outcomes["test_second"]["outcome"]) == (FAILED, PASSED)
    assert "cudaErrorIllegalAddress" in outcomes["test_first"]["reason"]
