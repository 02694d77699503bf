"""Plots and event files are made from metrics records."""

import json
from pathlib import Path
from typing import Any

import pytest

from nnmpi.train.curves import draw
from nnmpi.train.events import Events


def records() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in (10, 20):
        numbers = {"loss": 1 / step, "accuracy": 0.5, "learning_rate": 0.1, "samples_per_second": 9.0}
        lines.append({"kind": "train", "global_step": step, **numbers, "compute_s": 1.0, "sync_s": 0.1, "input_s": 0.1})
        lines.append({"kind": "eval", "global_step": step, "loss": None, "accuracy": 0.6})
    return lines


def test_curves_are_png_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records()))
    files = draw(metrics, tmp_path / "curves")
    names = {"loss.png", "accuracy.png", "learning_rate.png", "samples_per_second.png", "step_time.png"}
    assert {file.name for file in files} == names
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_steps_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text("")
    assert len(draw(tmp_path / "metrics.jsonl", tmp_path / "curves")) == 5


def test_event_files_hold_the_records(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    events = Events(tmp_path, first_step=0)
    for record in records():
        events.write(record)
    events.close()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert b"train/loss" in content
    assert b"eval/accuracy" in content
    assert b"eval/loss" not in content  # null: not finite
