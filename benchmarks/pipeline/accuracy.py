"""Trains the same network by the train command under several layouts, and compares what they have learnt."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pipeline.launch import run_ranks
from nnmpi.errors import LaunchError

LAYOUTS = ((1, 1, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2))  # dp, pp, tp; the first is the serial run
LIMIT_S = 7200.0


def measure(options: Sequence[str], layouts: Sequence[Sequence[int]] = LAYOUTS) -> list[dict[str, Any]]:
    """Return a row for each layout.

    Args:
        options: of the train command; the same for all.
    """
    return [_train(options, *degrees) for degrees in layouts]


def _train(options: Sequence[str], dp: int, pp: int, tp: int) -> dict[str, Any]:
    degrees = ["--dp", str(dp), "--pp", str(pp), "--tp", str(tp)]
    with tempfile.TemporaryDirectory(prefix="nnmpi-") as folder:
        out = Path(folder) / "run"
        words = [sys.executable, "-m", "nnmpi.train", *options, *degrees, "--out", str(out)]
        begin = time.perf_counter()
        status, output = run_ranks(dp * pp * tp, words, LIMIT_S)
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
