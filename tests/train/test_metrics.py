"""metrics.jsonl: whole lines, a cut last line is dropped, and no step stands twice after a resume."""

from pathlib import Path
from typing import Any

import pytest

from nnmpi.train.metrics import MetricsFile, cut_metrics, read_metrics


def train(step: int) -> dict[str, Any]:
    return {"kind": "train", "global_step": step, "loss": 1 / step}


def write(file: Path, *records: dict[str, Any]) -> None:
    metrics = MetricsFile(file)
    for record in records:
        metrics.write(record)
    metrics.sync()
    metrics.close()


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "m"
    metrics = MetricsFile(file)
    metrics.write(train(1))
    assert read_metrics(file) == [train(1)]
    metrics.close()


def test_an_existing_file_is_continued(tmp_path: Path) -> None:
    write(tmp_path / "m", train(1))
    write(tmp_path / "m", train(2))
    assert read_metrics(tmp_path / "m") == [train(1), train(2)]


def test_values_that_are_not_finite_become_null(tmp_path: Path) -> None:
    write(tmp_path / "m", {"loss": float("nan"), "x": float("inf"), "y": 1.0})
    assert read_metrics(tmp_path / "m") == [{"loss": None, "x": None, "y": 1.0}]


@pytest.mark.parametrize("rest", ['{"kind": "tra', '{"kind": "train", "global_step": 3, "loss": 0.3', "\x00\x00"])
def test_a_cut_last_line_is_dropped(tmp_path: Path, rest: str) -> None:
    file = tmp_path / "m"
    write(file, train(1), train(2))
    with file.open("a") as stream:
        stream.write(rest)
    assert read_metrics(file) == [train(1), train(2)]
    cut_metrics(file, 2)
    write(file, train(3))
    assert read_metrics(file) == [train(1), train(2), train(3)]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"a": 1}\n{"a"\n{"a": 2}\n')
    with pytest.raises(ValueError, match="Expecting"):
        read_metrics(tmp_path / "m")


def test_lines_after_the_checkpoint_and_the_final_test_go(tmp_path: Path) -> None:
    file = tmp_path / "m"
    evaluation = {"kind": "eval", "global_step": 2}
    write(file, train(1), train(2), evaluation, {"kind": "test", "global_step": 2}, train(3))
    assert cut_metrics(file, 2) == 2
    assert read_metrics(file) == [train(1), train(2), evaluation]
    assert cut_metrics(tmp_path / "absent", 2) == 0
