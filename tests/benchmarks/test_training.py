"""The training benchmark: its field, its judge, its turns, its arithmetic; and a reduced run as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.turns import WrongResultError, quartiles
from benchmarks.training import command, sizes, start, tables
from benchmarks.training.cases import CASES, GPT, SHALLOWSPEED, Case, find
from benchmarks.training.command import main, parse
from benchmarks.training.contestants import (
    EAGER,
    GROUPS,
    LLMC,
    NNMPI,
    PURE,
    STOCK,
    Contestant,
    nnmpi_field,
    reference,
    torch_field,
)
from benchmarks.training.environment import clean
from benchmarks.training.judge import PROBE_LR, TOLERANCE, CaseFiles, Judge, error
from benchmarks.training.layouts import from_torch, split, to_torch
from benchmarks.training.measure import time_blocks
from benchmarks.training.rows import best, ratios, speedups
from benchmarks.training.team import Teams
from benchmarks.training.trainer_llmc import ends, views
from benchmarks.training.trainer_nnmpi import build
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.errors import LaunchError
from tests.harness.slow import BENCHMARK

ROOT = Path(__file__).parents[2]
EVERY = [*CASES.values(), SHALLOWSPEED]
IRIS = find("iris")


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_ranks_share_the_batch(case: Case) -> None:
    x, y = case.data()
    assert x.shape == (case.batch, *case.sample) and len(y) == case.batch
    shares = [x[case.share(rank, 2)] for rank in range(2)]
    assert np.array_equal(np.concatenate(shares), x)
    again, _ = case.data()
    assert np.array_equal(again, x)


def test_images_have_a_background() -> None:
    x, _ = find("cnn").data()
    assert (x[:, :4] == 0).all() and (x[:, :, -4:] == 0).all() and (x[:, 4:-4, 4:-4] > 0).all()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_contestants_have_names_of_their_own(case: Case, ranks: int) -> None:
    field = [*nnmpi_field(case, ranks, True, True), *torch_field(case, ranks)]
    assert len({each.name for each in field}) == len(field)
    assert {each.group for each in field} == set(GROUPS[:4])
    assert all(each.ranks == ranks and each.case == case.name for each in field)
    assert len(torch_field(case, ranks, reduced=True)) == 1
    assert reference(case, True).name not in {each.name for each in field}


@pytest.mark.parametrize("name", ["cnn", "mlp-small", "lstm"])
def test_parameters_find_their_way_back_from_pytorch(name: str, tmp_path: Path) -> None:
    files = CaseFiles(find(name), tmp_path)
    theirs = to_torch(files.case, files.weights)
    flat = np.concatenate([array.reshape(-1) for array in theirs])
    for ours, back in zip(files.weights, from_torch(files.case, flat, files.weights), strict=True):
        assert np.array_equal(ours, back)
    assert [array.shape for array in split(flat, files.weights)] == [array.shape for array in files.weights]


def test_llmc_has_pytorchs_parameters_in_pytorchs_order(tmp_path: Path) -> None:
    case = Case("tiny", GPT, 2, (3, 8, 2, 2, 5, 9))
    weights = [np.array(parameter.data) for parameter in build(case).initialize(seed=0).parameters()]
    flat = np.zeros(ends(case, 128)[-1], np.float32)
    for view, array in zip(views(flat, case, 128), to_torch(case, weights), strict=True):
        assert view.shape == array.shape and not view.any()  # none lies on another
        view[...] = 1
    assert flat.sum() == sum(array.size for array in weights)
    assert Contestant(LLMC, "gpt2", 2).processes == 1 and Contestant(NNMPI, "gpt2", 2).processes == 2


def test_images_are_flattened_in_pytorchs_order(tmp_path: Path) -> None:
    weights = CaseFiles(find("cnn"), tmp_path).weights
    ours = next(array for array in weights if array.ndim == 2)
    theirs = next(array for array in to_torch(find("cnn"), weights) if array.ndim == 2)
    image = np.random.default_rng(0).standard_normal((7, 7, 64))
    assert np.allclose(image.reshape(-1) @ ours, theirs @ image.transpose(2, 0, 1).reshape(-1))


def test_pins_and_settings_of_malloc_are_removed() -> None:
    environ = {"OPENBLAS_CORETYPE": "Haswell", "MALLOC_TRIM_THRESHOLD_": "1", "OMP_NUM_THREADS": "8", "HOME": "/"}
    assert clean(environ) == {"OPENBLAS_CORETYPE": "Haswell"}
    assert environ == {"HOME": "/", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def test_an_error_is_a_share_of_the_largest() -> None:
    right = [np.array([1.0, -4.0]), np.array([2.0])]
    assert error([np.array([1.0, -4.0]), np.array([2.5])], right) == 0.125
    assert np.isnan(error([np.array([nan, -4.0]), np.array([2.0])], right))
    assert error([np.zeros(1)], [np.zeros(1)]) == 0 and error([np.ones(1)], [np.zeros(1)]) == float("inf")


class Cheat:
    """A team of one process that leaves what the judge expects, but for one thing."""

    def __init__(self, judge: Judge, wrong: str) -> None:
        self.contestant, self._judge, self._wrong = Contestant(NNMPI, "iris"), judge, wrong

    def ask(self, what: str, lr: float, steps: int = 0) -> list[dict[str, Any]]:
        judge = self._judge
        weights = [np.array(array) for array in judge._weights]
        if what == "probe":
            pairs = zip(judge.files.weights, judge._gradients, strict=True)
            weights = [before - PROBE_LR * gradient for before, gradient in pairs]
        if self._wrong == {"probe": "gradient", "train": "weights"}[what]:
            largest = max(abs(array).max() for array in weights)
            weights[1][0] += 2 * TOLERANCE * largest
        file = judge.files.folder / "left"
        with open(file, "wb") as values:
            for array in weights:
                array.astype(np.float32).tofile(values)
        return [{"file": str(file), "loss": judge._loss * (1 + 2 * TOLERANCE * (self._wrong == "loss"))}]


def test_the_judge_notices_what_is_wrong(tmp_path: Path) -> None:
    judge = Judge(CaseFiles(IRIS, tmp_path), torch=False)
    found = judge.examine(Cheat(judge, ""))  # type: ignore[arg-type]
    assert found.loss == 0 and found.gradient < 1e-7 and found.weights < 1e-7
    for wrong in ("loss", "gradient", "weights"):
        with pytest.raises(WrongResultError, match=f"case iris: its {wrong} is off by"):
            judge.examine(Cheat(judge, wrong))  # type: ignore[arg-type]


def test_a_contestant_that_ends_is_quoted(tmp_path: Path) -> None:
    teams = Teams([Contestant(NNMPI, "iris")], tmp_path)  # without the files of a files
    with pytest.raises(LaunchError, match=r"(?s)nnmpi on 1 ranks did not start; it said: .*No such file or directory"):
        teams.__enter__()


class Machine:
    """A team whose steps take as long as it was told."""

    def __init__(self, name: str, step_s: float, log: list[str]) -> None:
        self.contestant, self._step_s, self._log = SimpleNamespace(name=name), step_s, log

    def ask(self, what: str, lr: float, steps: int) -> list[dict[str, float]]:
        self._log.append(self.contestant.name)
        clocks = dict.fromkeys(("cpu_s", "process_s", "wall_s"), steps * self._step_s)
        return [{**clocks, "loss": 1.0}, {**clocks, "wall_s": 2 * steps * self._step_s, "loss": 1.0}]


def test_contestants_take_turns() -> None:
    log: list[str] = []
    machines = [Machine(name, step_s, log) for name, step_s in (("a", 0.001), ("b", 0.002), ("c", 0.004))]
    steps, seconds = time_blocks(machines, 5, block_s=0.1)  # type: ignore[arg-type]
    assert steps == 25  # of 2 x 2 ms
    assert seconds["a"]["cpu_s"] == pytest.approx([0.001] * 5) and seconds["c"]["wall_s"] == pytest.approx([0.008] * 5)
    turns = [log[i : i + 3] for i in range(6, len(log), 3)]
    assert len(turns) == 6 and all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1


def _row(group: str, ranks: int, blocks: list[float], name: str = "") -> dict[str, Any]:
    middle = sorted(blocks)[len(blocks) // 2]
    row = {
        "case": "iris",
        "ranks": ranks,
        "group": group,
        "name": name or group,
        "compiled": name == "",
        "step_s": middle,
        "blocks_s": blocks,
    }
    row |= {
        "step_quartiles_s": quartiles(blocks),
        "peak_bytes": 2**20 * (1 + (group == STOCK)),
        "imported_bytes": 2**19,
    }
    row |= {"median_process_s": middle, "median_wall_s": middle}
    return row | {"errors": {"loss": 0.0, "gradient": 1e-7, "parameter": 2e-7, "weights": nan}}


def test_ratios_are_those_of_rounds_and_of_the_fastest() -> None:
    rows = [_row(PURE, 1, [1.0, 2.0, 4.0]), _row(PURE, 1, [9.0] * 3, "slow"), _row(STOCK, 1, [3.0, 8.0, 8.0])]
    rows += [_row(PURE, 2, [1.0, 1.0, 1.0]), _row(STOCK, 2, [16.0, 16.0, 16.0])]
    assert best(rows, "iris", 1)[PURE]["name"] == PURE
    eager, first, second = ratios(rows)
    assert (eager["over"], eager["ratio"]) == (EAGER, 8 / 9)
    assert (first["of"], first["over"], first["ratio"], first["memory_ratio"]) == (STOCK, PURE, 3.0, 2.0)
    assert first["ratio_quartiles"] == [2.5, 3.5] and second["ratio"] == 16.0
    assert {each["group"]: each["speedup"] for each in speedups(rows)} == {PURE: 2.0, STOCK: 0.5}
    text = tables.speeds(rows, markdown=True)
    assert "| iris | 1 | 2000 | - | 8000 | - | 3.00 (2.50 to 3.50) | - | 0.89 (0.61 to 0.89) | - | - |" in text
    assert "| iris | 2 | 1 | - | 2 | 0.50 | - |" in tables.memory(rows, markdown=True)
    assert "iris  1 to 2  2.00   0.50" in tables.several(rows, markdown=False)
    assert "1e-07, 2e-07, nan" in tables.contestants(rows, markdown=False)
    rows += [_row(LLMC, 1, [4.0, 4.0, 4.0])]
    assert "| iris | 1 | 4000 | 2000 | - | 2.00 (1.50 to 3.00) | - |" in tables.llmc(rows, markdown=True)
    assert "iris | 2" not in tables.llmc(rows, markdown=True)


def test_the_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number within its frame."""
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    save = tables.save
    monkeypatch.setattr(tables, "save", lambda figure, file: (figures.append(figure), save(figure, file)))
    rows = [_row(group, ranks, [1.0, 2.0, 4.0]) for group in (PURE, STOCK) for ranks in (1, 2)]
    tables.draw_speeds(tmp_path / "a.png", rows)
    assert (tmp_path / "a.png").stat().st_size > 5000
    texts = [(text, axes) for axes in figures[0].axes for text in axes.texts]
    assert len(texts) == 2
    for text, axes in texts:
        assert text.get_window_extent().x1 < axes.get_window_extent().x1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--cases", "x"],
            "argument --cases: 'x' is unknown; the names are mlp-small, mlp-large, cnn, gpt-block, gpt-small, gpt2, "
            "lstm, iris, none",
        ),
        (["--ranks", "0"], "argument --ranks: '0' is not a whole number above 0"),
        (["--ranks", "3", "--cases", "cnn"], "--ranks 3 does not divide the batch of cnn, 64"),
        (["--plot", "a.txt"], "argument --plot: a.txt: the name must end in .png, .svg, .pdf"),
        (
            ["--json", "/no/a.json"],
            "--json /no/a.json cannot be written: No such file or directory; give a path that can",
        ),
        (["--block-s", "nan"], "argument --block-s: 'nan' is not a number of seconds above 0"),
        (["--llmc", "/no"], "there is no train_gpt2.c in /no; give --llmc the folder of llm.c's sources"),
        (["--fast"], "unrecognized arguments: --fast (see python benchmarks/training --help)"),
    ],
)
def test_wrong_words_are_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words, {}) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python benchmarks/training: {sentence}") and said.count("\n") == 1


def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert main(["--cases", "none"], {"OPENBLAS_CORETYPE": "Haswell"}) == 0
    said = capsys.readouterr().out
    assert said.startswith(command.WITHOUT)
    assert "removed:      OPENBLAS_CORETYPE=Haswell, which would have made" in said
    assert main(["--cases", "none", "--without-torch"], {}) == 0
    assert command.WITHOUT not in capsys.readouterr().out


def test_a_reduced_run_has_everything() -> None:
    options = parse(["--check"])
    assert options.cases == ("cnn", "gpt-block", "iris", SHALLOWSPEED.name) and options.ranks == (1, 2)
    assert parse(["--check", "--cases", "mlp-large"]).cases == ("mlp-large", SHALLOWSPEED.name)
    assert parse([]).cases == tuple(CASES)
    assert options.growth_steps and options.start_repeats and options.rounds == 2


def test_the_readme_has_a_place_for_every_table() -> None:
    text = (ROOT / "benchmarks" / "training" / "README.md").read_text()
    names = ("machine", "speeds", "memory", "several", "shallowspeed", "llmc", "growth", "start")
    assert all(f"<!-- {name} -->" in text for name in names)


def test_curves_have_what_was_measured_and_their_slopes(tmp_path: Path) -> None:
    """Of many ranks each has a share of the batch, and the sum of gradients beside it."""
    curves = {"width": (8, 16), "depth": (1, 3), "batch": (4, 8, 16)}
    [rows] = simulate(lambda group: sizes.measure(curves, group, rounds=1, block_s=0.001), 1)
    found = {(row["curve"], row["value"]): row for row in rows}
    assert list(found) == [(name, value) for name in curves for value in curves[name]] + [
        ("ranks", n) for n in (1, 2, 4)
    ]
    for ranks, batch in ((1, 16), (2, 8), (4, 4)):
        share, many = found["batch", batch], found["ranks", ranks]
        assert many["memory_bytes"] == share["memory_bytes"]
        assert many["step_s"] == share["step_s"] + many["sum_s"] and (many["sum_s"] > 0) == (ranks > 1)
    three = [{"value": value, "step_s": 5 * value**2.5} for value in (1, 100, 400)]
    assert sizes.slope(three, "step_s") == pytest.approx(2.5)
    depths = [found["depth", depth]["memory_bytes"] for depth in (1, 3)]
    weights = 2 * (256 * 256 + 256) * 4 * 4  # two more layers, each with gradient and Adam's two numbers, in bytes
    assert depths[1] - depths[0] > weights
    pytest.importorskip("matplotlib")
    sizes.draw(tmp_path / "a.png", rows)
    assert (tmp_path / "a.png").stat().st_size > 5000
    assert sizes.table(rows, markdown=True).count("\n") == 5


@pytest.mark.slow(BENCHMARK)
def test_a_reduced_run_is_right(tmp_path: Path) -> None:
    words = ["--check", "--without-torch", "--cases", "none", "--json", str(tmp_path / "a.json")]
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "training"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    content = json.loads((tmp_path / "a.json").read_text())
    assert {(row["case"], row["ranks"]) for row in content["rows"]} == {("shallowspeed", 1), ("shallowspeed", 2)}
    assert all(row["errors"]["gradient"] < TOLERANCE for row in content["rows"])
    assert {each["group"] for each in content["speedups"]} >= {PURE, "naive"}
    assert content["growth"] and len(content["start"]) == 2
    assert "SkylakeX" in ran.stdout or "openblas" in ran.stdout


@pytest.mark.parametrize("way", [start.HERE, start.TORCHRUN])
def test_a_start_without_steps_is_no_start(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it ended: torchrun's status alone is not believed, as PyTorch may abort after its steps."""
    monkeypatch.setattr(start, "_run", lambda *_: "")
    with pytest.raises(LaunchError, match="reported 0 steps on 2 ranks"):
        start._once(way, 2)
    monkeypatch.setattr(start, "_run", lambda *_: "it broke")
    with pytest.raises(LaunchError, match="it broke"):
        start._once(way, 2)


def test_an_abort_after_all_steps_counts_for_torchrun_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(words: list[str], _: object) -> str:
        for rank in range(2):
            Path(words[-1], str(rank)).write_text("1e12")
        return "it broke"

    monkeypatch.setattr(start, "_run", ran)
    assert start._once(start.TORCHRUN, 2) > 0
    with pytest.raises(LaunchError, match="it broke"):
        start._once(start.HERE, 2)
