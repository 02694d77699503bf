"""Training with compressed gradients over the lab's links, beside plain sums.

    mpirun -n 4 nnmpi train --model mlp --dataset mnist --allreduce ring     a host for each rank
    mpirun -n 4 nnmpi train --model mlp --dataset mnist --compress topk:0.01

Each way trains MNIST to the end. A row has its test accuracy, the seconds until the test accuracy
reaches a target, the seconds of a step, and the bytes of a step: those that the run reports, beside
the formula of `parallel.compressed`, and those that the hosts' links have counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import nan, prod
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.machine import machine_facts
from benchmarks.harness.tables import Columns, render, rewrite
from benchmarks.netlab.lab import Lab, Speed, lab_of
from benchmarks.netlab.launch import mpi_name, parse_settings, run_ranks
from benchmarks.netlab.steps import SETTINGS
from nnmpi.models import mlp
from nnmpi.parallel.compressed import messages_of
from nnmpi.parallel.data import NUMBERS_BYTES
from nnmpi.train.folder import RunFolder

FOLDER = Path(__file__).resolve().parent
LIMIT_S = 600.0
PLAIN = "plain"  # sums by a ring
WAYS = (PLAIN, "fp16", "bf16", "powersgd:4", "topk:0.01", "topk:0.1")
HIDDEN, EPOCHS, TARGET = 128, 6, 0.97
MODEL = ("--model", "mlp", "--hidden", str(HIDDEN), "--dataset", "mnist")
OPTIONS = (
    *("--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.1", "--batch-size", "256"),
    *("--epochs", str(EPOCHS), "--save-every", "0", "--log-every", "20", "--quiet"),
)


@dataclass(frozen=True)
class CompressedRun:
    """A training to the end.

    Attributes:
        rate, way, hosts: the links', the value of --compress or PLAIN, how many.
        accuracy: of the test, at the end.
        target_s: seconds until an evaluation reaches TARGET; NaN if none does.
        step_s: median of the windows' seconds of a step.
        reported_bytes, formula_bytes: that a rank gives in a step.
        crossed_bytes: that all links counted in a step, with what the evaluations sent.
    """

    rate: str
    way: str
    hosts: int
    accuracy: float
    target_s: float
    step_s: float
    reported_bytes: float
    formula_bytes: float
    crossed_bytes: float


def formula_bytes(way: str) -> float:
    """Return the bytes that a rank gives in a step, by formula."""
    shapes = [parameter.shape for parameter in mlp((28, 28, 1), 10, (HIDDEN,)).parameters()]
    if way == PLAIN:
        return 4 * sum(map(prod, shapes)) + NUMBERS_BYTES
    return sum(nbytes for _, nbytes in messages_of(way, shapes, 4)) + NUMBERS_BYTES


def compress(options: argparse.Namespace) -> None:
    """Train each way at each rate; print the table, and write it.

    Raises:
        LabError: if the lab cannot be made, or a run fails.
    """
    mpi, rows = mpi_name(), list[CompressedRun]()
    settings = (SETTINGS if mpi.startswith("Open MPI") else {}) | parse_settings(options.set)
    with lab_of(options.hosts, options.rate[0]) as lab:
        for speed in options.rate:
            lab.set_speed(speed)
            for way in options.ways:
                train = partial(_train, lab, mpi, settings, options)
                rows.append(train(speed, way))
                print(render(COLUMNS, rows[-1:]).splitlines()[-1], flush=True)
    print(render(COLUMNS, rows))
    facts = {"machine": machine_facts(), "mpi": mpi, "settings": dict(settings)}
    results.write(options.json, {**facts, "rows": [vars(row) for row in rows]})
    if options.json is not None and options.json.resolve().parent == FOLDER / "results":
        rewrite(FOLDER / "README.md", {"compress": render(COLUMNS, rows)})


def _train(
    lab: Lab, mpi: str, settings: Any, options: argparse.Namespace, speed: Speed, way: str
) -> CompressedRun:
    summing = ("--allreduce", "ring") if way == PLAIN else ("--compress", way)
    before = lab.sent_bytes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        data = () if options.data_dir is None else ("--data-dir", str(options.data_dir))
        words = ("-m", "nnmpi.train", *MODEL, *OPTIONS, *data, *summing, "--out", str(folder))
        for _ in run_ranks(lab, mpi, options.hosts, settings, words, LIMIT_S):
            pass
        lines = RunFolder(folder).metrics.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    evaluations = [item for item in records if item["kind"] == "eval"]
    windows = [item for item in records if item["kind"] == "train"]
    return CompressedRun(
        speed.rate,
        way,
        options.hosts,
        evaluations[-1]["accuracy"],
        next((item["elapsed_s"] for item in evaluations if item["accuracy"] >= TARGET), nan),
        median(item["step_s"] for item in windows),
        median(item["comm_bytes"] for item in windows),
        formula_bytes(way),
        (lab.sent_bytes() - before) / evaluations[-1]["global_step"],
    )


def kilobytes(nbytes: float) -> str:
    """Return bytes in kB."""
    return f"{nbytes / 1e3:.1f}"


COLUMNS: Columns = (
    ("rate", lambda row: row.rate),
    ("gradients", lambda row: row.way),
    ("test accuracy, %", lambda row: f"{100 * row.accuracy:.2f}"),
    (f"seconds to {TARGET:.0%}", lambda row: f"{row.target_s:.1f}"),
    ("a step, ms", lambda row: f"{1e3 * row.step_s:.1f}"),
    ("a rank gives, kB", lambda row: kilobytes(row.reported_bytes)),
    ("by formula, kB", lambda row: kilobytes(row.formula_bytes)),
    ("crossed the links, kB", lambda row: kilobytes(row.crossed_bytes)),
)


def check() -> None:
    """Print the stored table, and compare its bytes with the formula of today.

    Raises:
        AssertionError: where they differ.
    """
    stored = json.loads((FOLDER / "results" / "compress-openmpi.json").read_text())
    rows: Sequence[CompressedRun] = [CompressedRun(**row) for row in stored["rows"]]
    print(render(COLUMNS, rows))
    for row in rows:
        assert row.reported_bytes == formula_bytes(row.way), row
