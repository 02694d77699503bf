"""The command that runs the checks on a device: its report, its sentence without one, and a run on the stand-in."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nnmpi.backend.device_errors import _FATAL
from nnmpi.errors import DeviceError
from tests.gpu import recorder, report
from tests.gpu.recorder import Recorded
from tests.harness.records import FAILED, PASSED, SKIPPED, STARTED
from tests.harness.slow import ONCE_MORE
from tests.harness.suite import Result

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.host_only("the command chooses its backend itself")


PHASES = ("setup", "call", "teardown")


def lines(
    test: str, outcome: str, seconds: float = 0.0, words: str = "", when: str = "call"
) -> list[dict[str, object]]:
    """Return what one rank notes of a check; the outcome is that of the phase named."""
    found: list[dict[str, object]] = [{"test": test, "when": STARTED}]
    for phase in PHASES:
        here = phase == when
        if outcome != PASSED and phase == "call" and when == "setup":
            continue
        line = {
            "when": phase,
            "outcome": outcome if here else PASSED,
            "seconds": seconds,
            "words": words if here else "",
        }
        found.append({"test": test, **line})
    return found


def write(file: Path, *records: dict[str, object]) -> None:
    """Write what ranks noted."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_what_is_noted_of_each_check(tmp_path: Path) -> None:
    """The mean of the ranks' seconds; the words of the first rank that failed; how each ended, or that it did not."""
    file = tmp_path / "records"
    several = [*lines("b", PASSED, 1.0), *lines("b", FAILED, 2.0, "no"), *lines("b", FAILED, 3.0, "yes", "teardown")]
    left_out = lines("c", SKIPPED, 0.0, "no cuDNN", "setup")
    write(file, *lines("a", PASSED, 0.5), *several, *left_out, *lines("d", PASSED)[:2])
    with file.open("a") as more:
        more.write('{"test": "e", "wh')
    found = recorder.read(file)
    assert found.outcomes == {"a": PASSED, "b": FAILED, "c": SKIPPED, "d": STARTED}
    assert (found.seconds["a"], found.seconds["b"], found.words) == (1.5, 6.0, {"b": "no"})
    assert found.reasons == {"c": "no cuDNN"}
    assert recorder.read(tmp_path / "none") == Recorded()


def test_parts_and_their_summary() -> None:
    """Every check with how it ended; what was skipped, why; what could not be run at all."""
    result = Result(2, {"a": PASSED, "b": FAILED, "c": SKIPPED, "d": FAILED}, {"c": "no cuDNN"}, 1.25)
    part = report.part(result, Recorded({"a": 0.5}, {"b": "AssertionError"}))
    assert (part["passed"], part["failed"], part["skipped"], part["ranks"]) == (1, 2, 1, 2)
    assert [check.get("reason") for check in part["checks"]] == [None, "AssertionError", "no cuDNN", "it did not end"]
    text = report.summary([{**part, "stopped": "stopped after 9 s"}, report.not_run(4, "mpi4py finds no MPI library")])
    for words in (
        "2 ranks:     1 passed, 2 failed, 1 skipped",
        "2 ranks: stopped after 9 s",
        "4 ranks: not run: mpi4py finds",
        "skipped 1: no cuDNN",
    ):
        assert words in text
    assert not report.passed([part]) and not report.passed([report.not_run(1, "")])
    assert report.passed([report.part(Result(0, {"a": PASSED}), Recorded())])


@pytest.mark.parametrize("number", sorted(_FATAL))
def test_errors_after_which_the_device_is_lost(number: int) -> None:
    """Those of the engine's table, by their number, also below the sentence that explains them; no other."""

    class CUDARuntimeError(RuntimeError):
        status = number

    below = DeviceError("in words")
    below.__cause__ = CUDARuntimeError()
    unlike = CUDARuntimeError()
    unlike.status = 2
    assert recorder.is_fatal(CUDARuntimeError()) and recorder.is_fatal(below)
    assert recorder.is_fatal(ExceptionGroup("two", [ValueError(), CUDARuntimeError()]))
    assert not recorder.is_fatal(unlike) and not recorder.is_fatal(AssertionError("assertion"))


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


@pytest.mark.slow(ONCE_MORE)
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


def plant(folder: Path, checks: str) -> Path:
    """Write a file of checks."""
    file = folder / "test_planted.py"
    file.write_text(checks)
    return file


def part_of(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a report's last part, and its checks by their names."""
    part = json.loads(file.read_text())["parts"][-1]
    return part, {check["name"].rpartition("::")[2]: check for check in part["checks"]}


@pytest.mark.slow(ONCE_MORE)
def test_a_lost_device_does_not_take_the_other_checks_along(tmp_path: Path) -> None:
    """A check ends the process with an error of the device; the next one is run in a new process."""
    checks = plant(
        tmp_path,
        "import os\nclass CUDADriverError(RuntimeError):\n    status = 710\n"
        "def test_first():\n    os.environ['LOST'] = 'yes'\n    raise CUDADriverError('device-side assert triggered')\n"
        "def test_second():\n    assert 'LOST' not in os.environ\n",
    )
    file = tmp_path / "report.json"
    done = run("--backend", "fake", "--ranks", "", "--json", str(file), str(checks))
    assert done.returncode == 1
    _, found = part_of(file)
    assert (found["test_first"]["outcome"], found["test_second"]["outcome"]) == (FAILED, PASSED)
    assert "device-side assert triggered" in found["test_first"]["reason"]


@pytest.mark.slow(ONCE_MORE)
@pytest.mark.parametrize("options", [(), ("-p", "no:timeout")], ids=["plain", "without pytest-timeout"])
def test_a_hung_check_does_not_take_the_other_checks_along(tmp_path: Path, options: tuple[str, ...]) -> None:
    """It keeps the interpreter's lock, as a call into CUDA may, so no signal and no thread of Python ends it."""
    checks = plant(
        tmp_path,
        "import ctypes\ndef test_before():\n    pass\ndef test_hung():\n    ctypes.PyDLL(None).sleep(999)\n"
        "def test_after():\n    pass\n",
    )
    file = tmp_path / "report.json"
    limits = ("--limit-s", "60", "--test-limit-s", "2")
    done = run("--backend", "fake", "--ranks", "", *limits, "--json", str(file), *options, str(checks))
    assert done.returncode == 1, done.stdout + done.stderr
    part, found = part_of(file)
    ends = [found[name]["outcome"] for name in ("test_before", "test_hung", "test_after")]
    assert ends == [PASSED, FAILED, PASSED] and "stopped" not in part
    reason = found["test_hung"]["reason"]
    assert reason.startswith("It has not ended after 2 s.") and "in test_hung" in reason


@pytest.mark.slow(ONCE_MORE)
def test_a_part_that_reaches_its_limit(tmp_path: Path) -> None:
    """What ran is in the report, and so is why the rest is not."""
    checks = plant(tmp_path, "import time\ndef test_quick():\n    pass\ndef test_slow():\n    time.sleep(999)\n")
    file = tmp_path / "report.json"
    done = run("--backend", "fake", "--ranks", "", "--limit-s", "8", "--json", str(file), str(checks))
    assert done.returncode == 1, done.stdout + done.stderr
    part, found = part_of(file)
    assert part["stopped"] in done.stdout and "--limit-s" in part["stopped"]
    assert (found["test_quick"]["outcome"], found["test_slow"]["outcome"]) == (PASSED, FAILED)


@pytest.mark.slow(ONCE_MORE)
def test_a_killed_command_leaves_what_was_known(tmp_path: Path) -> None:
    """The report is written while checks run: it says what ended, and what was running."""
    checks = plant(tmp_path, "import time\ndef test_quick():\n    pass\ndef test_slow():\n    time.sleep(60)\n")
    file = tmp_path / "report.json"
    words = ("--backend", "fake", "--ranks", "", "--json", str(file), str(checks))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.gpu", *words]
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + 50
        while time.monotonic() < end and not (file.exists() and "test_slow" in file.read_text()):
            time.sleep(0.1)
        process.terminate()  # and not SIGKILL, which would leave the planted check running for a minute
    found = json.loads(file.read_text())
    assert not found["passed"] and found["parts"][0]["unfinished"]
    _, ends = part_of(file)
    assert (ends["test_quick"]["outcome"], ends["test_slow"]["outcome"]) == (PASSED, STARTED)
