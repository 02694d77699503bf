"""The train command, as a user calls it, beside the usual loop on a batch that stays on the device.

The command reads batches from the host, counts right answers and the gradient's norm, checks that
they are finite, and writes metrics; the loop does none of that.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.cases import CASES, COMPILED, FLOAT32, TORCH
from benchmarks.gpu.measure import Row, Timing, compare, makers, measure
from benchmarks.harness.launch import environment
from benchmarks.harness.tables import MISSING, ms, number, render
from nnmpi.backend.backend import Backend
from nnmpi.base.errors import LaunchError
from nnmpi.data.dataset import Dataset

CASE = CASES["mnist-cnn"]
LEAST_STEPS = 20  # the command writes a line for every tenth


def synthetic() -> tuple[Dataset, Dataset]:
    """Return training and test data of MNIST's shapes, without a download."""
    draw = np.random.default_rng(0)
    return tuple(  # type: ignore[return-value]
        Dataset(
            "random images",
            draw.integers(0, 256, (rows, *CASE.shape[1:]), np.uint8),
            draw.integers(0, 10, rows),
            classes=10,
            scale=1 / 255,
        )
        for rows in (16384, 256)
    )


def measure_train(
    steps: int,
    data_dir: Path | None,
    timing: Timing,
    backend: Backend,
    torch_device: str | None,
) -> list[Row]:
    """Return the rows of nnmpi.compile and PyTorch, in float32, and of the command, "nnmpi train".

    Args:
        steps: of the command; the second half counts.
        data_dir: of MNIST's files; None: random images.
        timing: of the loops.
        backend: nnmpi's device.
        torch_device: PyTorch's; None: without it.
    """
    made = makers(CASE, FLOAT32, (COMPILED, TORCH), backend, torch_device)
    rows = measure(CASE, FLOAT32, made, timing)
    data = ["mnist", "--data-dir", str(data_dir)] if data_dir else [f"{__name__}:synthetic"]
    row: Row = {"case": CASE.name, "mode": FLOAT32, "batch": CASE.shape[0], "name": "nnmpi train"}
    begin = time.perf_counter()
    try:
        row["step_s"] = _command(["--dataset", *data], steps)
    except LaunchError as error:
        row["failed"] = str(error)
    row |= {"command_s": time.perf_counter() - begin, "steps": steps}
    return [*rows, row]


def _command(data: Sequence[str], steps: int) -> float:
    """Return the seconds of a step in the second half of a run of the command."""
    with tempfile.TemporaryDirectory(prefix="nnmpi-") as folder:
        words = [sys.executable, "-P", "-m", "nnmpi.train", "--backend", "cupy", *data]
        words += ["--model", "cnn", "--batch-size", str(CASE.shape[0]), "--epochs", str(steps)]
        words += ["--max-steps", str(steps), "--eval-every", "0", "--save-every", "0"]
        run = Path(folder, "run")
        done = subprocess.run(
            [*words, "--out", str(run)],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise LaunchError(
                f"nnmpi train ended with status {done.returncode}: {done.stderr[-1000:].strip()}"
            )
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        records = [record for record in lines if record["kind"] == "train"]
    middle, last = records[len(records) // 2 - 1], records[-1]
    passed = last["global_step"] - middle["global_step"]
    return float((last["elapsed_s"] - middle["elapsed_s"]) / passed)


def train_table(rows: Sequence[Row], markdown: bool = False) -> str:
    """Return the table of `measure_train`'s rows, and what failed."""
    if not rows:
        return "nothing was measured"
    loops, command = compare([{"part": 0, **row} for row in rows[:-1]])[0], rows[-1]
    step: dict[str, Any] = {name: row.get("step_s") for name, row in loops["by_name"].items()}
    mine, loop = command.get("step_s"), step.get(COMPILED)
    columns = (
        ("nnmpi train, ms a step", lambda row: ms(mine) if mine else MISSING),
        ("nnmpi.compile, ms", lambda row: ms(loop) if loop else MISSING),
        ("PyTorch, ms", lambda row: ms(step[TORCH]) if step.get(TORCH) else MISSING),
        ("loop / command", lambda row: number(loop / mine if loop and mine else None)),
        ("the command, s", lambda row: f"{command['command_s']:.1f} ({command['steps']} steps)"),
    )
    notes = [*loops["notes"], *([command["failed"]] if "failed" in command else [])]
    return "\n\n".join([render(columns, [command], markdown), *notes])
