"""The tables of the README and the screen, from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from benchmarks.pipeline.marks import Content, memory_ratios
from benchmarks.pipeline.readme import table


def times(content: Content) -> str:
    """Return steps beside their simulation, and against one rank."""
    rows = []
    for row in content["rows"]:
        first, third = (1e3 * each for each in row["step_quartiles_s"])
        cells = [str(row["microbatches"]), row["name"], f"{1e3 * row['step_s']:.1f} ({first:.1f} to {third:.1f})"]
        if "speed" in row:
            low, high = row["speed_quartiles"]
            cells += [f"{1e3 * row['simulated_s']:.1f}", f"{row['measured_over_simulated']:.2f}"]
            cells += [f"{row['speed']:.2f} ({low:.2f} to {high:.2f})", f"{100 * row['bubble']:.1f} %"]
        else:
            cells += ["-", "-", "1", "-"]
        rows.append(" | ".join(cells))
    head = "microbatches | schedule | step, ms (quartiles) | simulated, ms | measured / simulated "
    return table(head + "| times as fast as one rank (quartiles) | bubble, simulated", rows)


def memory(content: Content) -> str:
    """Return the measured bytes of each stage beside those of the formulas."""
    rows = []
    for row in memory_ratios(content):
        cells = [str(row["pp"]), row["schedule"] if row["pp"] > 1 else "-", row["recompute"], str(row["stage"])]
        for what in ("parameter", "activation"):
            cells += [_mib(row[f"{what}_bytes"]), _mib(row[f"{what}_formula"]), f"{row[f'{what}_ratio']:.2f}"]
        rows.append(" | ".join(cells))
    head = "pp | schedule | recompute | stage | parameters, MiB | formula | ratio | activations, MiB | formula | ratio"
    return table(head, rows)


def order(content: Content) -> str:
    """Return the simulated schedules."""
    rows = []
    for row in content["rows"]:
        formula = "-" if row["formula"] is None else f"{100 * row['formula']:.1f} %"
        cells = [str(row["microbatches"]), row["name"], f"{row['makespan']:g}", f"{100 * row['bubble']:.1f} %"]
        rows.append(" | ".join([*cells, formula, f"{row['kept']:g}"]))
    return table("microbatches | schedule | makespan | bubble | formula | activations kept, at most", rows)


def limit(content: Content) -> str:
    """Return how each run under a limit ended."""
    rows = []
    for row in content["rows"]:
        who = " and ".join(
            name for name, held in (("the layout", row["told"]), ("the system", row["enforced"])) if held
        )
        needs = _mib(row["needed_bytes"]) if "needed_bytes" in row else _mib(content["settings"]["whole_bytes"])
        words = f'"{row["words"]}"' if row["words"] else "loss {:.3f} to {:.3f}".format(*row["losses"])
        rows.append(f"{row['layout']} | {needs} | {_mib(row['limit_bytes'])}, by {who} | {row['outcome']} | {words}")
    return table("layout | a rank needs, MiB | limit, MiB | outcome | in its words", rows)


def accuracy(content: Content) -> str:
    """Return the layouts' accuracies after the same epochs."""
    rows = []
    for row in content["rows"]:
        epochs = ", ".join(f"{100 * each:.2f}" for each in row["epochs"])
        cells = [row["layout"], str(row["ranks"]), f"{100 * row['accuracy']:.2f}", epochs, f"{row['loss']:.4f}"]
        rows.append(" | ".join([*cells, f"{row['seconds']:.0f}"]))
    return table("layout | ranks | test accuracy, % | after each epoch | test loss | seconds", rows)


def machine(content: Content) -> str:
    """Return what a part was measured on, as one sentence."""
    if "mpi" not in content:
        return "Simulated, so the same on any machine."
    facts = content["machine"]
    return (
        f"Taken on {facts['date']}: {facts['cpu']}, {facts['cores']} cores, {facts['system']}, Python "
        f"{facts['python']}, NumPy {facts['numpy']}, {content['mpi']}, {content['blas']} per rank."
    )


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f}"


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType(
    {"times": times, "memory": memory, "order": order, "limit": limit, "accuracy": accuracy}
)
