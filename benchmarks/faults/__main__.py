"""Faults injected into a training: `table` or `kills`, each with --help. See README.md."""

import sys

from benchmarks.faults import kills, table
from benchmarks.harness.command import run

SUITES = {"kills": kills.main, "table": table.main}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SUITES:
        sys.exit(run("faults", lambda: SUITES[sys.argv[1]](sys.argv[2:])))
    sys.exit(f"python -m benchmarks.faults {'|'.join(SUITES)} [--help]")
