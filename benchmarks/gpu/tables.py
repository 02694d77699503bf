"""The tables for the screen, the results' README and the documents."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.cases import COMPILED, EAGER, OURS, PEERS, TORCH
from benchmarks.gpu.measure import compare
from benchmarks.harness.tables import MISSING, Columns, ms, number, render, spread

Row = Mapping[str, Any]


def progress(rows: Sequence[Row], seconds: float) -> str:
    """Return a line on a case in a mode that has been measured."""
    words = [
        f"{row['name']} {ms(row['step_s']) + ' ms' if 'step_s' in row else row['failed']}"
        for row in rows
    ]
    return f"{rows[0]['case']} {rows[0]['mode']} ({seconds:.0f} s): {', '.join(words)}"


def zoo(rows: Sequence[Row], markdown: bool = False) -> str:
    """Return the table of all cases and modes, the slowest of nnmpi's first; then what is wrong.

    Args:
        rows: of `measure`, each with the number of its measurement, "part".
        markdown: otherwise the table is text.
    """
    compared = compare(rows)
    columns: Columns = (
        ("model (batch)", lambda row: f"{row['case']} ({row['batch']})"),
        ("mode", "mode"),
        *(
            (f"{name}, ms", lambda row, name=name: _of(row, name, "step_s", ms))
            for name in (*OURS, *PEERS)
        ),
        (
            "fastest peer / nnmpi.compile",
            lambda row: (
                MISSING
                if row["ratio"] is None
                else f"**{spread(row['ratio'], row['ratio_quartiles'])}**"
            ),
        ),
        (
            "MB: nnmpi, compile, PyTorch",
            lambda row: _list(row, "peak_bytes", lambda value: number(value / 1e6, ".0f")),
        ),
        (
            "first steps, s: nnmpi, compile, PyTorch",
            lambda row: _list(row, "first_s", lambda value: number(value, ".1f")),
        ),
        ("losses", lambda row: "see below" if row["notes"] else "agree"),
    )
    notes = [f"{row['case']} in {row['mode']}: {note}" for row in compared for note in row["notes"]]
    return "\n\n".join([render(columns, compared, markdown), *notes])


def verdict(rows: Sequence[Row]) -> str:
    """Return a line with the worst row, how many are ahead, and what failed or is wrong."""
    compared = compare(rows)
    ratios = [row for row in compared if row["ratio"] is not None]
    noted = [f"{row['case']} in {row['mode']}" for row in compared if row["notes"]]
    words = ["Nothing was compared"]
    if ratios:
        worst = ratios[0]
        ours, peer = (worst["by_name"][name]["step_s"] for name in (COMPILED, worst["peer"]))
        words = [
            f"Worst: {worst['case']} in {worst['mode']}, {number(worst['ratio'])} of the speed of"
            f" {worst['peer']} ({ms(ours)} and {ms(peer)} ms)",
            f"Ahead in {sum(row['ratio'] >= 1 for row in ratios)} of {len(ratios)} rows",
        ]
    return ". ".join([*words, f"Failed or wrong: {', '.join(noted) or 'none'}."])


def machine(facts: Mapping[str, Any]) -> str:
    """Return a sentence on the card and the versions."""
    smi = facts.get("nvidia_smi")
    card = smi["name"] if isinstance(smi, Mapping) else facts["device"]
    return (
        f"Taken on {facts['date']}: {card}, CuPy {facts.get('cupy')}, PyTorch {facts.get('torch')}"
        f" with cuDNN {facts.get('torch_cudnn')}, Python {facts['python']}."
    )


def _of(row: Row, name: str, key: str, text: Any) -> str:
    value = row["by_name"].get(name, {}).get(key)
    return MISSING if value is None else text(value)


def _list(row: Row, key: str, text: Any) -> str:
    return ", ".join(_of(row, name, key, text) for name in (EAGER, COMPILED, TORCH))
