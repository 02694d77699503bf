"""The parts of the benchmark: what each measures, in full and reduced, and what was to be reached."""

from pathlib import Path
from typing import Any

from benchmarks.harness.launch import run_job
from benchmarks.harness.parts import Content, Part, Suite
from benchmarks.harness.tables import ms1, number, percent, render, spread
from benchmarks.pipeline import order

# Wide enough that products take nearly all of the time: 15 ms for a stage's backward of one microbatch.
_TIMES = {"network": {"width": 512, "layers": 16, "rows": 128}, "microbatches": [8, 16], "rounds": 15}
_TIMES_CHECK = {"network": {"width": 64, "layers": 4, "rows": 16}, "microbatches": [4], "rounds": 2}
_PICTURE_MICROBATCHES = 16

OFF, SPEED = 0.15, 1.5  # of measured from simulated time; against one rank


def times(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Measure steps on two ranks and on one."""
    settings: dict[str, Any] = _TIMES_CHECK if check else _TIMES
    return {**run_job("benchmarks.pipeline.times", 2, settings), "settings": settings}


def missed_times(content: Content) -> list[str]:
    """Return in words what is too far from its simulation, or too slow; naive pipelines need not be fast."""
    found = []
    for row in content["rows"]:
        if "speed" not in row:
            continue
        what = f"{row['name']}, {row['microbatches']} microbatches"
        ratio = row["measured_over_simulated"]
        if abs(ratio - 1) > OFF:
            found.append(f"{what}: measured / simulated {ratio:.2f} is not within {OFF:.0%}")
        if row["name"] != "naive" and row["speed"] < SPEED:
            found.append(f"{what}: {row['speed']:.2f} times as fast as one rank, not {SPEED}")
    return found


def times_table(content: Content) -> str:
    """Return steps beside their simulation, and against one rank."""
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


def simulated(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Simulate the schedules."""
    counts = [8] if check else [8, 16, 32]
    return {"settings": {"microbatches": counts}, "rows": order.rows(counts)}


def missed_order(content: Content) -> list[str]:
    """Return in words when the schedules are not in the order that they should be in."""
    return [] if order.is_in_order(content["rows"]) else ["the schedules' bubbles are in another order"]


def order_table(content: Content) -> str:
    """Return the simulated schedules."""
    columns = (
        ("microbatches", "microbatches"),
        ("schedule", "name"),
        ("makespan", lambda row: f"{row['makespan']:g}"),
        ("bubble", lambda row: percent(row["bubble"])),
        ("formula", lambda row: percent(row["formula"])),
        ("activations kept, at most", lambda row: f"{row['kept']:g}"),
    )
    return render(columns, content["rows"])


PIPELINE = Suite(
    Path(__file__).parent,
    "Pipelines measured beside their simulation, and their schedules beside one another.",
    {
        "times": Part(times, times_table, missed_times, timed=True),
        "order": Part(
            simulated,
            order_table,
            missed_order,
            draw=lambda folder, content: order.draw(folder / "order.png", _PICTURE_MICROBATCHES),
        ),
    },
)
