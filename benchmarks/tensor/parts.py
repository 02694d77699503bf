"""The parts of the benchmark: what each measures, in full and reduced; their tables, and what misses its mark."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.formulas import beside_formulas, formula_columns, missed_formulas
from benchmarks.harness.launch import run_job
from benchmarks.harness.parts import Content, Part, Suite
from benchmarks.harness.tables import Columns, mib, ms1, render, spread
from benchmarks.tensor.formulas import activation_bytes, exchanged_bytes, parameter_bytes, wire_bytes
from benchmarks.tensor.networks import Network

_FULL = [{"name": "mlp", "rows": 512, "width": 512, "layers": 15}, {"name": "cnn", "rows": 128}]
_CHECK = [{"name": "mlp", "rows": 256, "width": 256, "layers": 7}, {"name": "cnn", "rows": 64}]
_TOWERS = {"name": "towers", "rows": 128}  # timed alone: each rank has one of two
_ROUNDS = 20


def memory(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Measure memory and messages of groups of 1, 2 and 4."""
    settings = {"networks": _CHECK if check else _FULL}
    found: dict[str, Any] = {}
    for tp in (1, 2) if check else (1, 2, 4):
        part = run_job("benchmarks.tensor.memory", tp, settings)
        found = {**part, "settings": settings, "rows": [*found.get("rows", []), *part["rows"]]}
    return found


def memory_table(content: Content) -> str:
    """Return measured bytes beside those of the formulas; of the ranks, the one that is farthest off."""
    farthest: dict[tuple[str, int], dict[str, Any]] = {}
    for row in _memory_rows(content):
        worst = farthest.setdefault((row["network"], row["tp"]), row)
        if abs(row["activation_ratio"] - 1) > abs(worst["activation_ratio"] - 1):
            farthest[row["network"], row["tp"]] = row
    columns: Columns = (
        ("network", "network"),
        ("tp", "tp"),
        ("at most while made, MiB", lambda row: mib(row["building_bytes"], 2)),
        *formula_columns(digits=2),
        ("exchanged in a step, MiB", lambda row: mib(sum(row["exchanged_bytes"].values()), 2)),
        ("formula", lambda row: mib(sum(row["exchanged_formula"].values()), 2)),
        ("each rank sends, MiB", lambda row: mib(wire_bytes(row["exchanged_formula"], row["tp"]), 2)),
    )
    return render(columns, sorted(farthest.values(), key=lambda row: (row["network"] != "mlp", row["tp"])))


def missed_memory(content: Content) -> list[str]:
    """Return in words what is too far from its formula; messages must be exactly as long."""
    found = []
    for row in _memory_rows(content):
        case = f"{row['network']}, tp {row['tp']}, rank {row['rank']}"
        found += missed_formulas(case, row)
        if row["exchanged_bytes"] != row["exchanged_formula"]:
            found.append(f"{case}: exchanged {row['exchanged_bytes']}, by the formula {row['exchanged_formula']} bytes")
    return found


def _memory_rows(content: Content) -> Iterator[dict[str, Any]]:
    """Yield the rows with what the formulas say."""
    networks = {fields["name"]: Network(**fields) for fields in content["settings"]["networks"]}
    for row in content["rows"]:
        network, tp = networks[row["network"]], row["tp"]
        found = beside_formulas(row, parameter_bytes(network, tp), activation_bytes(network, tp))
        yield {**found, "exchanged_formula": exchanged_bytes(network, tp)}


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
    "Layers divided among ranks: memory and messages beside formulas, and the time of a step.",
    {"memory": Part(memory, memory_table, missed_memory), "times": Part(times, times_table, timed=True)},
)
