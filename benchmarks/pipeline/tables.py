"""The tables of the README and the screen, from what was measured."""

from collections.abc import Iterator
from typing import Any

from benchmarks.harness.formulas import beside_formulas, formula_columns, missed_formulas
from benchmarks.harness.parts import Content
from benchmarks.harness.tables import Columns, mib, ms1, number, percent, render, spread
from benchmarks.pipeline.formulas import activation_bytes, parameter_bytes
from benchmarks.pipeline.network import EvenMlp


def times(content: Content) -> str:
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


def memory(content: Content) -> str:
    """Return the measured bytes of each stage beside those of the formulas."""
    columns: Columns = (
        ("pp", "pp"),
        ("schedule", lambda row: row["schedule"] if row["pp"] > 1 else "-"),
        ("recompute", "recompute"),
        ("stage", "stage"),
        *formula_columns(digits=1),
    )
    return render(columns, _memory_rows(content))


def missed_memory(content: Content) -> list[str]:
    """Return in words what is too far from its formula."""
    found = []
    for row in _memory_rows(content):
        case = f"pp {row['pp']}, {row['schedule']}, recompute {row['recompute']}, stage {row['stage']}"
        found += missed_formulas(case, row)
    return found


def _memory_rows(content: Content) -> Iterator[dict[str, Any]]:
    """Yield the rows with what the formulas say."""
    network = EvenMlp(**content["settings"]["network"])
    for row in content["rows"]:
        stage, stages = row["stage"], row["pp"]
        activations = activation_bytes(network, stage, stages, row["schedule"], row["recompute"])
        yield beside_formulas(row, parameter_bytes(network, stage, stages), activations)


def order(content: Content) -> str:
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


def limit(content: Content) -> str:
    """Return how each run under a limit ended."""

    def limited(row: Content) -> str:
        by = [name for name, held in (("the layout", row["known"]), ("the system", row["enforced"])) if held]
        return f"{mib(row['limit_bytes'], 1)}, by {' and '.join(by)}"

    columns = (
        ("layout", "layout"),
        ("a rank needs, MiB", lambda row: mib(row.get("needed_bytes", content["settings"]["whole_bytes"]), 1)),
        ("limit, MiB", limited),
        ("outcome", "outcome"),
        (
            "in its words",
            lambda row: f'"{row["words"]}"' if row["words"] else "loss {:.3f} to {:.3f}".format(*row["losses"]),
        ),
    )
    return render(columns, content["rows"])


def accuracy(content: Content) -> str:
    """Return the layouts' accuracies after the same epochs."""
    columns = (
        ("layout", "layout"),
        ("ranks", "ranks"),
        ("test accuracy, %", lambda row: f"{100 * row['accuracy']:.2f}"),
        ("after each epoch", lambda row: ", ".join(f"{100 * each:.2f}" for each in row["epochs"])),
        ("test loss", lambda row: f"{row['loss']:.4f}"),
        ("seconds", lambda row: f"{row['seconds']:.0f}"),
    )
    return render(columns, content["rows"])
