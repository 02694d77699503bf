"""The parts of the benchmark: what each measures, in full and reduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.pipeline import accuracy, order
from benchmarks.pipeline.formulas import COPIES, ITEM_BYTES
from benchmarks.pipeline.launch import run_job
from benchmarks.pipeline.subject import Subject

Found = dict[str, Any]

# Wide enough that products take nearly all of the time: 15 ms for a stage's backward of one microbatch.
_TIMES = {"subject": {"width": 512, "layers": 16, "rows": 128}, "microbatches": [8, 16], "rounds": 15}
_TIMES_CHECK = {"subject": {"width": 64, "layers": 4, "rows": 16}, "microbatches": [4], "rounds": 2}
# Many layers: a message more or less on its way, which hangs on the moment, is then a small part of all.
_MEMORY = {"width": 256, "layers": 48, "rows": 256, "microbatches": 8, "inputs": 256}
_MEMORY_CHECK = {"width": 256, "layers": 24, "rows": 256, "microbatches": 4, "inputs": 256}
_LIMIT = {"width": 1024, "layers": 8, "rows": 32, "microbatches": 4, "inputs": 1024}
_LIMIT_SHARE = 0.75  # of what the whole model needs
_TRAIN = ("--model", "cnn", "--batch-size", "128", "--lr", "0.001", "--seed", "0")


def times(check: bool, data_dir: Path | None) -> Found:
    """Measure steps on two ranks and on one."""
    settings = _TIMES_CHECK if check else _TIMES
    return _job("times", 2, settings)


def memory(check: bool, data_dir: Path | None) -> Found:
    """Measure the memory of 1, 2 and 4 stages."""
    settings: dict[str, Any] = {"subject": _MEMORY_CHECK if check else _MEMORY}
    every = [(schedule, recompute) for schedule in ("gpipe", "1f1b") for recompute in ("never", "always")]
    found: Found = {}
    for pp in (1, 2) if check else (1, 2, 4):
        part = _job("memory", pp, {**settings, "cases": every if pp > 1 else [("1f1b", "never")]})
        found = {**part, "settings": settings, "rows": [*found.get("rows", []), *part["rows"]]}
    return found


def simulated(check: bool, data_dir: Path | None) -> Found:
    """Simulate the schedules."""
    counts = [8] if check else [8, 16, 32]
    return {"settings": {"microbatches": counts}, "rows": order.rows(counts)}


def limit(check: bool, data_dir: Path | None) -> Found:
    """Train under a limit of memory, each run in processes of its own."""
    subject = Subject(**_LIMIT)
    whole = sum(each.size for each in subject.build().parameters()) * ITEM_BYTES * COPIES
    settings = {"subject": _LIMIT, "limit_bytes": int(_LIMIT_SHARE * whole), "steps": 3 if check else 10}
    cases = (((2, 1, 1), True, False), ((2, 1, 1), False, True), ((1, 2, 1), True, True), ((1, 1, 2), True, True))
    found: Found = {}
    for degrees, told, enforced in cases:
        part = _job("limit", 2, {**settings, "degrees": degrees, "told": told, "enforced": enforced})
        found = {**part, "rows": [*found.get("rows", []), part["rows"]]}
    return {**found, "settings": {**settings, "whole_bytes": whole}}


def accuracies(check: bool, data_dir: Path | None) -> Found:
    """Train by the train command."""
    options = [*_TRAIN, "--dataset", "digits" if check else "mnist", "--epochs", "3" if check else "2"]
    place = ["--data-dir", str(data_dir)] if data_dir is not None and not check else []
    rows = accuracy.measure([*options, *place], accuracy.LAYOUTS[:2] if check else accuracy.LAYOUTS)
    asked = run_job("benchmarks.pipeline.nothing", 1, {})  # which MPI and BLAS these are
    return {**asked, "settings": {"options": options}, "rows": rows}


def _job(name: str, ranks: int, settings: Mapping[str, Any]) -> Found:
    return {**run_job(f"benchmarks.pipeline.{name}", ranks, settings), "settings": dict(settings)}


PARTS: Mapping[str, Callable[[bool, Path | None], Found]] = MappingProxyType(
    {"times": times, "memory": memory, "order": simulated, "limit": limit, "accuracy": accuracies}
)
