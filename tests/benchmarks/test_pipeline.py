"""The pipeline's benchmark: its formulas, its judgement, its files; and a reduced run of it as a user starts it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.parts import Suite
from benchmarks.pipeline import parts, tables
from benchmarks.pipeline.formulas import activation_bytes, live_microbatches, parameter_bytes
from benchmarks.pipeline.network import EvenMlp
from benchmarks.pipeline.order import bubble, is_in_order, rows, simulated
from benchmarks.pipeline.parts import PIPELINE
from nnmpi.errors import UsageError
from nnmpi.nn.chain import open_chain
from tests.harness.slow import BENCHMARK

ROOT = Path(__file__).parents[2]
NETWORK = EvenMlp(width=64, layers=8, rows=32, microbatches=6)


def test_stages_are_even_and_made_of_all_layers() -> None:
    layers = open_chain(NETWORK.build())
    for stages in (1, 2, 4):
        cut = NETWORK.cut(stages)
        assert sum(cut) == len(layers) and len(cut) == stages
    with pytest.raises(UsageError, match="8 layers cannot be divided evenly among 3 stages"):
        NETWORK.cut(3)


def test_two_replicas_share_the_batch() -> None:
    whole, parts = NETWORK.batch(), [NETWORK.batch(replica, 2) for replica in range(2)]
    assert sum(len(part.y) for part in parts) == len(whole.y) == whole.global_rows == 32 * 6
    assert (parts[1].x[:16] == whole.x[16:32]).all()  # the second half of the first microbatch


def test_parameters_are_those_of_the_model() -> None:
    elements = sum(parameter.size for parameter in NETWORK.build().parameters())
    scratch = parameter_bytes(NETWORK, 0, 1) - 16 * elements
    for stages in (2, 4):
        assert sum(parameter_bytes(NETWORK, s, stages) - scratch for s in range(stages)) == 16 * elements


def test_live_microbatches_are_those_of_the_schedules() -> None:
    for name in ("gpipe", "1f1b"):
        _, simulation = simulated(name, 6, ranks=4)
        assert simulation.peak_activations == tuple(live_microbatches(NETWORK, s, 4, name) for s in range(4))


def test_recomputation_keeps_less_and_gpipe_more() -> None:
    for stage in range(4):
        gpipe, one = (activation_bytes(NETWORK, stage, 4, name, "never") for name in ("gpipe", "1f1b"))
        again = activation_bytes(NETWORK, stage, 4, "gpipe", "always")
        assert again < gpipe and one < gpipe


def test_simulated_bubbles_are_those_of_the_papers() -> None:
    found = rows([8, 16, 24])
    checked = [row for row in found if row["formula"] is not None]
    assert {row["name"] for row in checked} == {"naive", "gpipe", "1f1b", "interleaved", "zero-bubble"}
    assert all(row["bubble"] == pytest.approx(row["formula"]) for row in checked)
    assert bubble("interleaved", 12, 8) is None
    assert is_in_order(found)


def test_another_order_is_noticed() -> None:
    found = rows([8])
    for row in found:
        if row["name"] == "1f1b":
            row["bubble"] += 0.1
    assert not is_in_order(found)
    assert parts.missed_order({"rows": found}) == ["the schedules' bubbles are in another order"]


def _times(**changes: Any) -> dict[str, Any]:
    row = {"name": "1f1b", "microbatches": 8, "step_s": 0.1, "step_quartiles_s": [0.09, 0.11], "simulated_s": 0.1}
    row |= {"measured_over_simulated": 1.0, "speed": 1.7, "speed_quartiles": [1.6, 1.8], "bubble": 0.1}
    return {"rows": [row | changes]}


def test_times_are_judged() -> None:
    assert parts.missed_times(_times()) == []
    (slow,) = parts.missed_times(_times(speed=1.4))
    assert slow == "1f1b, 8 microbatches: 1.40 times as fast as one rank, not 1.5"
    (off,) = parts.missed_times(_times(measured_over_simulated=1.2))
    assert off == "1f1b, 8 microbatches: measured / simulated 1.20 is not within 15%"
    assert parts.missed_times(_times(name="naive", speed=0.9)) == []
    assert "| 8 | 1f1b | 100.0 (90.0 to 110.0) | 100.0 | 1.00 | 1.70 (1.60 to 1.80) | 10.0 % |" in tables.times(
        _times()
    )


def test_limits_and_accuracies_are_judged() -> None:
    ends = [("dp 2 x pp 1 x tp 1", "refused"), ("dp 1 x pp 2 x tp 1", "trained")]
    assert parts.missed_limit({"rows": [{"layout": a, "outcome": b, "words": ""} for a, b in ends]}) == []
    ends = [("dp 2 x pp 1 x tp 1", "trained"), ("dp 1 x pp 2 x tp 1", "out of memory")]
    assert len(parts.missed_limit({"rows": [{"layout": a, "outcome": b, "words": ""} for a, b in ends]})) == 2
    learnt = [{"layout": "serial", "accuracy": 0.98}, {"layout": "a", "accuracy": 0.979}]
    assert parts.missed_accuracy({"rows": learnt}) == []
    assert parts.missed_accuracy({"rows": [*learnt, {"layout": "b", "accuracy": 0.97}]}) == [
        "b: 97.00%, the serial run 98.00%"
    ]


def test_the_readme_has_a_place_for_every_table() -> None:
    text = (ROOT / "benchmarks" / "pipeline" / "README.md").read_text()
    assert all(f"<!-- {name} -->" in text for name in PIPELINE.parts)


def test_results_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert PIPELINE.main(["--check", "--parts", "order", "--results", str(tmp_path / "results")]) == 0
    shown = capsys.readouterr().out
    assert "all marks are met" in shown
    assert "| 8 | gpipe | 45 | 46.7 % | 46.7 % | 8 |" in shown
    assert json.loads((tmp_path / "results" / "order.json").read_text())["rows"]
    assert (tmp_path / "results" / "order.png").read_bytes().startswith(b"\x89PNG")


def test_a_reduced_run_that_misses_a_mark_fails(capsys: pytest.CaptureFixture[str]) -> None:
    slow = replace(PIPELINE.parts["order"], missed=lambda content: ["it is slow"])
    bad = Suite(PIPELINE.folder, PIPELINE.description, {"order": slow})
    assert bad.main(["--check", "--parts", "order"]) == 1
    assert "missed: it is slow" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--parts", "times,x"],
            "argument --parts: 'x' is unknown; the names are times, memory, order, limit, accuracy (see ",
        ),
        (["--fast"], "unrecognized arguments: --fast (see python benchmarks/pipeline --help)"),
    ],
)
def test_wrong_words_are_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert PIPELINE.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python benchmarks/pipeline: {sentence}") and said.count("\n") == 1


@pytest.mark.slow(BENCHMARK)
@pytest.mark.parametrize(
    ("benchmark", "part", "word"),
    [
        ("pipeline", "times", "measured / simulated"),
        ("pipeline", "memory", "all marks are met"),
        ("tensor", "memory", "all marks are met"),
    ],
)
def test_reduced_parts_run(benchmark: str, part: str, word: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / benchmark), "--check", "--parts", part],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert word in ran.stdout
