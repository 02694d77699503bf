"""Measured memory beside what formulas say of it: fields of a row, columns of a table, and what is too far off."""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.tables import Columns, mib

OFF = 0.10  # by which measured memory may be off from its formula


def beside_formulas(row: Mapping[str, Any], parameters: float, activations: float) -> dict[str, Any]:
    """Return a row of measured bytes with those of the formulas, and measured over formula.

    Args:
        row: has "parameter_bytes" and "activation_bytes".
        parameters, activations: bytes by the formulas.
    """
    return {
        **row,
        "parameter_formula": parameters,
        "activation_formula": activations,
        "parameter_ratio": row["parameter_bytes"] / parameters,
        "activation_ratio": row["activation_bytes"] / activations,
    }


def missed_formulas(case: str, row: Mapping[str, Any]) -> list[str]:
    """Return in words what of a row of `beside_formulas` is too far from its formula.

    Args:
        case: names the row.
        row: of `beside_formulas`.
    """
    return [
        f"{case}: {what}s measured / formula {row[f'{what}_ratio']:.2f}"
        for what in ("parameter", "activation")
        if abs(row[f"{what}_ratio"] - 1) > OFF
    ]


def formula_columns(digits: int) -> Columns:
    """Return the columns of rows of `beside_formulas`, in MiB with so many digits behind the point."""
    return (
        ("parameters, MiB", lambda row: mib(row["parameter_bytes"], digits)),
        ("formula", lambda row: mib(row["parameter_formula"], digits)),
        ("ratio", lambda row: f"{row['parameter_ratio']:.2f}"),
        ("activations, MiB", lambda row: mib(row["activation_bytes"], digits)),
        ("formula", lambda row: mib(row["activation_formula"], digits)),
        ("ratio", lambda row: f"{row['activation_ratio']:.2f}"),
    )
