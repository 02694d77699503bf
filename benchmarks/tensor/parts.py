"""The parts of the benchmark: what each measures, in full and reduced; their tables, and what misses its mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.pipeline.command import Benchmark
from benchmarks.pipeline.launch import run_job
from benchmarks.pipeline.marks import MEMORY_OFF, Content
from benchmarks.pipeline.readme import table
from benchmarks.tensor.formulas import activation_bytes, exchanged_bytes, parameter_bytes, wire_bytes
from benchmarks.tensor.networks import Network

_MLP = {"name": "mlp", "rows": 512, "width": 512, "layers": 15}
_CNN = {"name": "cnn", "rows": 128}
_FULL = [_MLP, _CNN]
_CHECK = [{"name": "mlp", "rows": 256, "width": 256, "layers": 7}, {"name": "cnn", "rows": 64}]
_ROUNDS = 20


def memory(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Measure memory and messages of groups of 1, 2 and 4."""
    settings = {"networks": _CHECK if check else _FULL}
    found: dict[str, Any] = {}
    for tp in (1, 2) if check else (1, 2, 4):
        part = run_job("benchmarks.tensor.memory", tp, settings)
        found = {**part, "settings": settings, "rows": [*found.get("rows", []), *part["rows"]]}
    return found


def times(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Measure steps on two ranks and on one."""
    settings = {"networks": _CHECK if check else _FULL, "rounds": 2 if check else _ROUNDS}
    return {**run_job("benchmarks.tensor.times", 2, settings), "settings": settings}


def ratios(content: Content) -> list[dict[str, Any]]:
    """Return the rows of `memory` with what the formulas say, and measured over that."""
    networks = {given["name"]: Network(**given) for given in content["settings"]["networks"]}
    found = []
    for row in content["rows"]:
        network, tp = networks[row["network"]], row["tp"]
        parameters, activations = parameter_bytes(network, tp), activation_bytes(network, tp)
        more = {"parameter_formula": parameters, "activation_formula": activations}
        more["parameter_ratio"] = row["parameter_bytes"] / parameters
        more["activation_ratio"] = row["activation_bytes"] / activations
        found.append({**row, **more, "exchanged_formula": exchanged_bytes(network, tp)})
    return found


def memory_table(content: Content) -> str:
    """Return measured bytes beside those of the formulas; of the ranks, the one that is farthest off."""
    rows: list[str] = []
    seen: dict[tuple[str, int], dict[str, Any]] = {}
    for row in ratios(content):
        worst = seen.setdefault((row["network"], row["tp"]), row)
        if abs(row["activation_ratio"] - 1) > abs(worst["activation_ratio"] - 1):
            seen[row["network"], row["tp"]] = row
    for (network, tp), row in sorted(seen.items(), key=lambda pair: (pair[0][0] != "mlp", pair[0][1])):
        cells = [network, str(tp), _mib(row["building_bytes"])]
        for what in ("parameter", "activation"):
            cells += [_mib(row[f"{what}_bytes"]), _mib(row[f"{what}_formula"]), f"{row[f'{what}_ratio']:.2f}"]
        given, formula = sum(row["exchanged_bytes"].values()), sum(row["exchanged_formula"].values())
        cells += [_mib(given), _mib(formula), _mib(wire_bytes(row["exchanged_formula"], tp))]
        rows.append(" | ".join(cells))
    head = "network | tp | at most while made, MiB | parameters, MiB | formula | ratio | activations, MiB | formula "
    return table(head + "| ratio | exchanged in a step, MiB | formula | each rank sends, MiB", rows)


def times_table(content: Content) -> str:
    """Return steps on two ranks beside those on one."""
    rows = []
    for row in content["rows"]:
        cells = [row["network"], str(row["tp"])]
        for what in ("step", "serial"):
            low, high = (1e3 * each for each in row[f"{what}_quartiles_s"])
            cells.append(f"{1e3 * row[f'{what}_s']:.1f} ({low:.1f} to {high:.1f})")
        low, high = row["speed_quartiles"]
        rows.append(" | ".join([*cells, f"{row['speed']:.2f} ({low:.2f} to {high:.2f})"]))
    return table("network | tp | step, ms (quartiles) | on one rank, ms | times as fast", rows)


def missed_memory(content: Content) -> list[str]:
    """Return in words what is too far from its formula; messages must be exactly as long."""
    found = []
    for row in ratios(content):
        case = f"{row['network']}, tp {row['tp']}, rank {row['rank']}"
        for what in ("parameter", "activation"):
            if abs(row[f"{what}_ratio"] - 1) > MEMORY_OFF:
                found.append(f"{case}: {what}s measured / formula {row[f'{what}_ratio']:.2f}")
        if row["exchanged_bytes"] != row["exchanged_formula"]:
            found.append(f"{case}: exchanged {row['exchanged_bytes']}, by the formula {row['exchanged_formula']} bytes")
    return found


def _mib(count: float) -> str:
    return f"{count / 2**20:.2f}"


TENSOR = Benchmark(
    "python benchmarks/tensor",
    "Layers shared out over ranks: memory and messages beside formulas, and the time of a step.",
    {"memory": memory, "times": times},
    {"memory": memory_table, "times": times_table},
    {"memory": missed_memory, "times": lambda content: []},
    Path(__file__).parent,
    ("times",),
    {},
)
