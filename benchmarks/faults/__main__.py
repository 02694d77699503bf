"""What nnmpi makes of faults, measured: `table` or `kills`, each with --help. See README.md."""

import sys

from benchmarks.faults import kills, table

SUITES = {"kills": kills.main, "table": table.main}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SUITES:
        sys.exit(SUITES[sys.argv[1]](sys.argv[2:]))
    sys.exit(f"python -m benchmarks.faults {'|'.join(SUITES)} [--help]")
