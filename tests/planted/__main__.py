"""Plant each fault of `faults.py` in a copy of the package and show which test finds it.

    python -m tests.planted                  all faults; the exit status is 1 if one is not found
    python -m tests.planted ring adam        those whose names contain one of these words
    python -m tests.planted --list           the faults, and the tests that should find them

Each fault is one replaced line. Its tests run on the copy with the fault, and must fail there; that
they pass without it is the business of scripts/test. A fault that nothing finds is a hole in the
tests, and one whose line is gone must be planted anew in what took its place.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.planted.faults import FAULTS

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def find(fault, scratch):
    """Return the test that finds a fault, or a sentence in capitals that begins with why there is
    none.
    """
    path = fault.file
    text = (ROOT / path).read_text()
    if text.count(fault.before) != 1:
        return f"GONE: {path} has {text.count(fault.before)} times {fault.before!r}"
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        copy = Path(name)
        for folder in ("nnmpi", "tests"):
            shutil.copytree(
                ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__")
            )
        for file in ("setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / file, copy / file)
        (copy / path).write_text(text.replace(fault.before, fault.after))
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--quick",
            *fault.tests.split(),
        ]
        environ = {
            **os.environ,
            "PYTHONPATH": str(copy),
            **({"NNMPI_TEST_GPU": fault.device} if fault.device else {}),
        }
        try:
            ended = subprocess.run(
                words, cwd=copy, env=environ, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return "(a test that hangs)"
    result = FAILED.search(ended.stdout)
    if result:
        return result.group(1)
    return (
        f"NOT FOUND: {fault.tests} ends with status {ended.returncode}:"
        f" {ended.stdout[-200:].strip()!r}"
    )


def main():
    """Plant the faults; return 1 if one is not found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="plant faults whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print the faults, and plant none")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="faults at once (default: one per core)",
    )
    options = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if not options.words or any(word in fault.name for word in options.words)
    ]
    if options.list:
        for fault in chosen:
            print(f"{fault.name:40} {fault.file}  {fault.tests}")
        return 0
    missed = 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        for fault, result in zip(
            chosen, pool.map(lambda item: find(item, Path(scratch)), chosen), strict=True
        ):
            missed += result.startswith(("GONE", "NOT"))
            print(f"{fault.name:40} {result}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} planted faults are found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
