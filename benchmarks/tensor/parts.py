"""The parts of the benchmark: what each measures, in full and reduced; their tables."""

from pathlib import Path
from typing import Any

from benchmarks.harness.launch import run_job
from benchmarks.harness.parts import Content, Part, Suite
from benchmarks.harness.tables import ms1, render, spread

_FULL = [{"name": "mlp", "rows": 512, "width": 512, "layers": 15}, {"name": "cnn", "rows": 128}]
_CHECK = [{"name": "mlp", "rows": 256, "width": 256, "layers": 7}, {"name": "cnn", "rows": 64}]
_TOWERS = {"name": "towers", "rows": 128}  # timed alone: each rank has one of two
_ROUNDS = 20


def times(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Measure steps on two ranks and on one."""
    settings = {"networks": [*(_CHECK if check else _FULL), _TOWERS], "rounds": 2 if check else _ROUNDS}
    return {**run_job("benchmarks.tensor.times", 2, settings), "settings": settings}


def times_table(content: Content) -> str:
    """Return steps on two ranks beside those on one."""
    columns = (
        ("network", "network"),
        ("tp", "tp"),
        ("step, ms (quartiles)", lambda row: spread(row["step_s"], row["step_quartiles_s"], ms1)),
        ("on one rank, ms", lambda row: spread(row["serial_s"], row["serial_quartiles_s"], ms1)),
        ("times as fast", lambda row: spread(row["speed"], row["speed_quartiles"])),
    )
    return render(columns, content["rows"])


TENSOR = Suite(
    Path(__file__).parent,
    "Layers divided among ranks: the time of a step.",
    {"times": Part(times, times_table, timed=True)},
)
