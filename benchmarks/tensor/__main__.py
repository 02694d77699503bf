"""Sharded layers: `python benchmarks/tensor --help`, and the README beside this file."""

import sys
from pathlib import Path
from typing import Any

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.harness.launch import run_job  # noqa: E402
from benchmarks.harness.parts import Content, Part, Suite  # noqa: E402
from benchmarks.harness.tables import ms1, render, spread  # noqa: E402

FULL = {
    "mlp": {"rows": 512, "width": 512, "layers": 15},
    "cnn": {"rows": 128},
    "towers": {"rows": 128},
    "rounds": 20,
}
CHECK = {
    "mlp": {"rows": 256, "width": 256, "layers": 7},
    "cnn": {"rows": 64},
    "towers": {"rows": 64},
    "rounds": 2,
}


def times(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Measure steps on two ranks and on one."""
    return run_job("benchmarks.tensor.times", 2, CHECK if check else FULL)


def table(content: Content) -> str:
    """Return steps on two ranks beside those on one."""
    columns = (
        ("network", "network"),
        ("tp", "tp"),
        ("step, ms (quartiles)", lambda row: spread(row["step_s"], row["step_quartiles_s"], ms1)),
        ("on one rank, ms", lambda row: spread(row["serial_s"], row["serial_quartiles_s"], ms1)),
        ("times as fast", lambda row: spread(row["speed"], row["speed_quartiles"])),
    )
    return render(columns, content["rows"])


if __name__ == "__main__":
    parts = {"times": Part(times, table, timed=True)}
    sys.exit(Suite(Path(__file__).parent, "Sharded layers: the time of a step.", parts).main())
