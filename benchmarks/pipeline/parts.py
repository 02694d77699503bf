"""The parts of the benchmark: what each measures, in full and reduced, and what was to be reached."""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.launch import run_job, run_ranks
from benchmarks.harness.parts import Content, Part, Suite
from benchmarks.pipeline import order, tables
from benchmarks.pipeline.formulas import COPIES, ITEM_BYTES
from benchmarks.pipeline.network import EvenMlp
from nnmpi.errors import LaunchError

# Wide enough that products take nearly all of the time: 15 ms for a stage's backward of one microbatch.
_TIMES = {"network": {"width": 512, "layers": 16, "rows": 128}, "microbatches": [8, 16], "rounds": 15}
_TIMES_CHECK = {"network": {"width": 64, "layers": 4, "rows": 16}, "microbatches": [4], "rounds": 2}
# Many layers: a message more or less on its way, which depends on the moment, is then a small part of all.
_MEMORY = {"width": 256, "layers": 48, "rows": 256, "microbatches": 8, "inputs": 256}
_MEMORY_CHECK = {"width": 256, "layers": 24, "rows": 256, "microbatches": 4, "inputs": 256}
_LIMIT = {"width": 1024, "layers": 8, "rows": 32, "microbatches": 4, "inputs": 1024}
_LIMIT_SHARE = 0.75  # of what the whole model needs
_TRAIN = ("--model", "cnn", "--batch-size", "128", "--lr", "0.001", "--seed", "0")
_LAYOUTS = ((1, 1, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2))  # dp, pp, tp; the first is the serial run
_TRAIN_LIMIT_S = 7200.0
_PICTURE_MICROBATCHES = 16

OFF, SPEED = 0.15, 1.5  # of measured from simulated time; against one rank
POINTS = 0.002  # of accuracy, by which a layout may be behind the serial run: two standard errors for 10,000 images


def times(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Measure steps on two ranks and on one."""
    return _job("times", 2, _TIMES_CHECK if check else _TIMES)


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


def memory(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Measure the memory of 1, 2 and 4 stages."""
    settings: dict[str, Any] = {"network": _MEMORY_CHECK if check else _MEMORY}
    every = [(schedule, recompute) for schedule in ("gpipe", "1f1b") for recompute in ("never", "always")]
    found: dict[str, Any] = {}
    for pp in (1, 2) if check else (1, 2, 4):
        part = _job("memory", pp, {**settings, "cases": every if pp > 1 else [("1f1b", "never")]})
        found = {**part, "settings": settings, "rows": [*found.get("rows", []), *part["rows"]]}
    return found


def simulated(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Simulate the schedules."""
    counts = [8] if check else [8, 16, 32]
    return {"settings": {"microbatches": counts}, "rows": order.rows(counts)}


def missed_order(content: Content) -> list[str]:
    """Return in words when the schedules are not in the order that they should be in."""
    return [] if order.is_in_order(content["rows"]) else ["the schedules' bubbles are in another order"]


def limit(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Train under a limit of memory, each run in processes of its own."""
    network = EvenMlp(**_LIMIT)
    whole = sum(each.size for each in network.build().parameters()) * ITEM_BYTES * COPIES
    settings = {"network": _LIMIT, "limit_bytes": int(_LIMIT_SHARE * whole), "steps": 3 if check else 10}
    cases = (((2, 1, 1), True, False), ((2, 1, 1), False, True), ((1, 2, 1), True, True), ((1, 1, 2), True, True))
    found: dict[str, Any] = {}
    for degrees, known, enforced in cases:
        part = _job("limit", 2, {**settings, "degrees": degrees, "known": known, "enforced": enforced})
        found = {**part, "rows": [*found.get("rows", []), part["rows"]]}
    return {**found, "settings": {**settings, "whole_bytes": whole}}


def missed_limit(content: Content) -> list[str]:
    """Return in words which layout did not end as it should: only one that shares the model fits into the limit."""
    found = []
    for row in content["rows"]:
        shares_model = row["layout"].split("dp ")[1].startswith("1 ")
        if (row["outcome"] == "trained") != shares_model:
            found.append(f"{row['layout']}: {row['outcome']} {row['words']}".strip())
    return found


def accuracy(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Train the same network by the train command under several layouts."""
    options = [*_TRAIN, "--dataset", "digits" if check else "mnist", "--epochs", "3" if check else "2"]
    place = ["--data-dir", str(data_dir)] if data_dir is not None and not check else []
    rows = [_train([*options, *place], *degrees) for degrees in (_LAYOUTS[:2] if check else _LAYOUTS)]
    return {**run_job(None, 1, {}), "settings": {"options": options}, "rows": rows}


def missed_accuracy(content: Content) -> list[str]:
    """Return in words which layout learnt less than the serial run."""
    serial, *others = content["rows"]
    return [
        f"{row['layout']}: {row['accuracy']:.2%}, the serial run {serial['accuracy']:.2%}"
        for row in others
        if row["accuracy"] < serial["accuracy"] - POINTS
    ]


def _train(options: Sequence[str], dp: int, pp: int, tp: int) -> dict[str, Any]:
    """Return the row of one run of the train command with these options and degrees."""
    degrees = ["--dp", str(dp), "--pp", str(pp), "--tp", str(tp)]
    with tempfile.TemporaryDirectory(prefix="nnmpi-") as folder:
        out = Path(folder) / "run"
        words = [sys.executable, "-m", "nnmpi.train", *options, *degrees, "--out", str(out)]
        begin = time.perf_counter()
        status, output = run_ranks(dp * pp * tp, words, _TRAIN_LIMIT_S)
        seconds = time.perf_counter() - begin
        if status != 0:
            raise LaunchError(f"{' '.join(words[1:])} ended with status {status}; it said: {output[-2000:].strip()}")
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    tests = [line for line in lines if line["kind"] == "test"]
    return {
        "layout": f"dp {dp} x pp {pp} x tp {tp}",
        "ranks": dp * pp * tp,
        "accuracy": tests[-1]["accuracy"],
        "loss": tests[-1]["loss"],
        "epochs": [line["accuracy"] for line in lines if line["kind"] == "eval"],
        "seconds": seconds,
    }


def _job(name: str, ranks: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**run_job(f"benchmarks.pipeline.{name}", ranks, settings), "settings": dict(settings)}


PIPELINE = Suite(
    Path(__file__).parent,
    "Pipelines measured beside their simulation, their memory beside formulas, and their accuracy beside one rank's.",
    {
        "times": Part(times, tables.times, missed_times, timed=True),
        "memory": Part(memory, tables.memory, tables.missed_memory),
        "order": Part(
            simulated,
            tables.order,
            missed_order,
            draw=lambda folder, content: order.draw(folder / "order.png", _PICTURE_MICROBATCHES),
        ),
        "limit": Part(limit, tables.limit, missed_limit),
        "accuracy": Part(accuracy, tables.accuracy, missed_accuracy),
    },
)
