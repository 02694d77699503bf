"""Faults injected into commands: a suite each of SUITES, each with --help. See README.md."""

import sys

from benchmarks.faults import attacks, flat, kills, midway, table
from benchmarks.harness.command import run

SUITES = {
    "attacks": attacks.main,
    "flat": flat.main,
    "kills": kills.main,
    "midway": midway.main,
    "table": table.main,
}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SUITES:
        sys.exit(run("faults", lambda: SUITES[sys.argv[1]](sys.argv[2:])))
    sys.exit(f"python -m benchmarks.faults {'|'.join(SUITES)} [--help]")
