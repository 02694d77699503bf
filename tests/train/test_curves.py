"""Plots and event files are made from metrics records."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nnmpi.train.curves import bars, draw, draw_staleness

from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.report import gather
from nnmpi.train.cli import main
from nnmpi.train.metrics import EventFile, sum_staleness

NAMES = {"loss", "accuracy", "learning_rate", "samples_per_second", "step_time", "overview"}
NAMES |= {"loss_over_time", "accuracy_over_time"}


def records() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in (10, 20):
        numbers = {"loss": 1 / step, "accuracy": 0.5, "learning_rate": 0.1, "samples_per_second": 9.0}
        lines.append({"kind": "train", "global_step": step, **numbers, "compute_s": 1.0, "sync_s": 0.1, "input_s": 0.1})
        lines.append({"kind": "eval", "global_step": step, "loss": None, "accuracy": 0.6})
    return lines


def staleness(*workers: list[list[int]]) -> dict[str, Any]:
    """Return a segment's record with these histograms."""
    told = [{"worker": worker, "histogram": histogram} for worker, histogram in enumerate(workers)]
    return {"kind": "staleness", "global_step": 20, "epoch": 1.0, "disagreement": 0.5, "workers": told}


def test_curves_are_png_files(tmp_path: Path) -> None:
    """Those of perplexity and of staleness where there are any."""
    pytest.importorskip("matplotlib")
    more = [{"kind": "eval", "global_step": 20, "perplexity": 3.0}, staleness([[0, 2], [3, 1]], [[1, 3]])]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in [*records(), *more]))
    files = draw(metrics, tmp_path / "curves")
    assert {file.stem for file in files} == NAMES | {"perplexity", "staleness"}
    assert all(file.suffix == ".png" and file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_a_run_without_steps_can_be_drawn(tmp_path: Path) -> None:
    """And gossip's, which has records of staleness but nothing to count in them."""
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(staleness()) + "\n")
    assert {file.stem for file in draw(tmp_path / "metrics.jsonl", tmp_path / "curves")} == NAMES


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "--pp 2 --pipeline gpipe --microbatches 4"),
        (4, "--sync ssp --slow ms=1;rank=2,factor=3"),
        (3, "--sync asp"),
        (3, "--sync local --local-steps 4"),
    ],
)
def test_what_is_drawn_of_a_step_is_what_is_printed_of_it(
    ranks: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the page and in the picture; no part is left out, and together they are the step, but for the end."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    drawn: dict[str, float] = {}

    def stack(self: Any, steps: list[int], *heights: list[float], labels: list[str]) -> None:
        drawn.update((name, sum(each) / len(each)) for name, each in zip(labels, heights, strict=True))

    common = "--model mlp --dataset digits --hidden 16 --epochs 1 --log-every 9 --backend numpy"
    simulate(partial(main, [*common.split(), *words.split(), "--out", str(tmp_path / "run")]), ranks)
    (line,) = re.findall(r"^  step (\S+) ms = (.*)$", capsys.readouterr().out, re.MULTILINE)
    words_of_parts = (part.partition(" ms ")[0].rpartition(" ") for part in line[1].split(" + "))
    printed = {name: float(ms) for name, _, ms in words_of_parts}
    step_ms, other_ms = float(line[0]), printed.pop("other")
    monkeypatch.setattr(axes, "stackplot", stack)
    monkeypatch.setattr(axes, "legend", lambda self: None)
    draw(tmp_path / "run" / "metrics.jsonl", tmp_path / "curves")
    page = {name: 1e3 * seconds for name, seconds in gather(tmp_path / "run")["times"].items()}
    assert drawn == pytest.approx(page)
    assert list(drawn) == list(printed)
    assert -0.01 * step_ms <= other_ms and sum(drawn.values()) <= 1.01 * step_ms
    assert sum(drawn.values()) == pytest.approx(step_ms, rel=0.2)
    if "--pp" not in words:  # printed are means over the ranks, whose stages differ; drawn is rank 0's
        assert drawn == pytest.approx(printed, abs=0.15 * step_ms)


@pytest.mark.parametrize("workers", [1, 10, 11, 64])
def test_staleness_of_few_and_many_can_be_drawn(tmp_path: Path, workers: int) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    stale = sum_staleness([staleness(*([[worker % 3, 5], [7 * worker, 1]] for worker in range(workers)))])
    file = draw_staleness(figure.Figure, stale, tmp_path / "staleness.png")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_staleness_is_summed_over_the_run() -> None:
    """A resumed run may have other numbers of workers."""
    total = sum_staleness([*records(), staleness([[0, 2], [3, 1]]), staleness([[3, 4]], [[1, 1]]), staleness()])
    assert [dict(each) for each in total.histograms] == [{0: 2, 3: 5}, {1: 1}]
    assert sum_staleness(records()).count() == 0


@pytest.mark.parametrize("largest", [0, 1, 58, 59, 60, 61, 119, 120, 1000])
def test_bars_hold_every_gradient_once(largest: int) -> None:
    """As many bars as can be told apart, and not more values in one than necessary."""
    total = sum_staleness([staleness([[value, 1 + value] for value in range(largest + 1)], [[largest, 1]])])
    width, (first, second) = bars(total)
    assert len(first) == len(second) == largest // width + 1 <= 60
    assert width == 1 or (largest + 1) / (width - 1) > 60
    assert first == [
        sum(1 + value for value in range(start, min(start + width, largest + 1)))
        for start in range(0, largest + 1, width)
    ]
    assert second == [0] * (len(second) - 1) + [1]


def test_event_files_hold_the_records(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    events = EventFile(tmp_path, first_step=0)
    for record in records():
        events.write(record)
    events.close()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert b"train/loss" in content
    assert b"eval/accuracy" in content
    assert b"eval/loss" not in content  # null: not finite
