"""Pipelines measured beside their simulation: `python benchmarks/pipeline --help`, and the README
beside this file.
"""

import sys
from pathlib import Path
from typing import Any

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.harness.launch import run_job  # noqa: E402
from benchmarks.harness.parts import Content, Part, Suite  # noqa: E402
from benchmarks.harness.tables import ms1, number, percent, render, spread  # noqa: E402

# Wide enough that products take nearly all of the time: a stage's backward of one microbatch takes
# 15 ms.
FULL = {"width": 512, "layers": 16, "rows": 128, "microbatches": [8, 16], "rounds": 15}
CHECK = {"width": 64, "layers": 4, "rows": 16, "microbatches": [4], "rounds": 2}
OFF, SPEED = 0.15, 1.5  # of measured from simulated time; against one rank


def times(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Measure steps on two ranks and on one."""
    return run_job("benchmarks.pipeline.times", 2, CHECK if check else FULL)


def missed(content: Content) -> list[str]:
    """Return a sentence for each schedule too far from its simulation or too slow; the naive one
    need not be fast.
    """
    result = []
    for row in content["rows"]:
        what = f"{row['name']}, {row['microbatches']} microbatches"
        ratio = row.get("measured_over_simulated", 1)
        if abs(ratio - 1) > OFF:
            result.append(f"{what}: measured / simulated {ratio:.2f} is not within {OFF:.0%}")
        if row["name"] != "naive" and row.get("speed", SPEED) < SPEED:
            result.append(f"{what}: {row['speed']:.2f} times as fast as one rank, not {SPEED}")
    return result


def table(content: Content) -> str:
    """Return steps beside their simulation, and relative to one rank."""
    columns = (
        ("microbatches", "microbatches"),
        ("schedule", "name"),
        ("step, ms (quartiles)", lambda row: spread(row["step_s"], row["step_quartiles_s"], ms1)),
        ("simulated, ms", lambda row: ms1(row["simulated_s"]) if "simulated_s" in row else "-"),
        ("measured / simulated", lambda row: number(row.get("measured_over_simulated"))),
        (
            "times as fast as one rank (quartiles)",
            lambda row: spread(row["speed"], row["speed_quartiles"]) if "speed" in row else "1",
        ),
        ("bubble, simulated", lambda row: percent(row.get("bubble"))),
    )
    return render(columns, content["rows"])


if __name__ == "__main__":
    parts = {"times": Part(times, table, missed, timed=True)}
    sys.exit(
        Suite(Path(__file__).parent, "Pipelines measured beside their simulation.", parts).main()
    )
