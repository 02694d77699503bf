"""`scripts/test-gpu --measure`, with a Python that only writes down what it is asked."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "test-gpu"
# The serial checks fail, the train command hangs, and xdist is not installed.
PYTHON = """#!/bin/sh
case "$*" in
    *"import xdist"*) exit 1 ;;
    "-c import "*) exit 0 ;;
    *harness*|*benchmarks*) echo "$*" >>"$LOG"; echo "said: $*" ;;
esac
case "$*" in
    *"--ranks  "*) exit 3 ;;
    *--train*) exec sleep 60 ;;
esac
"""


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(tmp_path):
    python, log, out = tmp_path / "python", tmp_path / "log", tmp_path / "a folder"
    python.write_text(PYTHON)
    python.chmod(0o755)
    words = ["sh", SCRIPT, "--fake", "--measure", out, "zoo=30", "train=1", "--cases", "lenet5"]
    ran = subprocess.run(
        words,
        env={**os.environ, "NNMPI_PYTHON": str(python), "LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2
    assert f"not all of it ended well: serial (3), train (124); see {out}" in ran.stderr
    assert log.read_text().splitlines() == [
        "-m tests.harness --ranks  tests/gpu",
        "-m tests.harness --no-serial --ranks 2 tests/gpu",
        f"benchmarks/gpu --check --markdown --json {out}/zoo.json --cases lenet5",
        f"benchmarks/gpu --check --markdown --train 20 --json {out}/train.json",
    ]
    assert sorted(file.name for file in out.iterdir()) == [
        "ranks.txt",
        "serial.txt",
        "train.txt",
        "zoo.txt",
    ]
    assert "==== zoo, at most 30 s ====\nsaid: benchmarks/gpu" in ran.stdout


def test_a_part_of_no_seconds_is_left_out(tmp_path):
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(PYTHON)
    python.chmod(0o755)
    words = ["sh", SCRIPT, "--fake", "--measure", tmp_path, "serial=0", "train=0", "zoo=0"]
    env = {**os.environ, "NNMPI_PYTHON": str(python), "LOG": str(log)}
    assert subprocess.run(words, env=env, timeout=60).returncode == 0
    assert log.read_text() == "-m tests.harness --no-serial --ranks 2 tests/gpu\n"
