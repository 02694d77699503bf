"""--metric and --best-by: printed, recorded, kept, drawn and evaluated, the same numbers."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import nnmpi
from nnmpi.base.errors import UsageError
from nnmpi.base.files import read_json
from nnmpi.commands.evaluate import main as evaluate
from nnmpi.lab.report import main as report
from nnmpi.train.cli import main as train
from nnmpi.train.metrics import read_metrics
from tests.harness.commands import on_ranks, over
from tests.harness.refusals import refuses, usage_error

OWN = """
import numpy as np
from nnmpi.metrics import Metric


def relative(outputs, labels):
    return abs(outputs - labels) / abs(labels)


def right(outputs, labels):
    return outputs.argmax(axis=1) == labels


def step(outputs, labels):
    return labels * 1.0


def constant(outputs, labels):
    return np.ones(len(labels))


rare = Metric(
    "rare",
    lambda outputs, labels: [(outputs[labels == 2].argmax(1) == 2).sum(), (labels == 2).sum()],
    lambda state: state[0] / state[1] if state[1] else float("nan"),
    is_share=True,
)
"""
X = np.random.default_rng(0).normal(size=(90, 5)).astype(np.float32)
SHORT = "--model mlp --hidden 6 --dtype float64 --batch-size 12 --lr 0.02 --eval-every 2steps"


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """A data set of classes, of which one is rare, one of numbers, and a user's file."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    shifted = X[:, 0] + 0.3 * np.cos(np.arange(90))
    np.savez("classes.npz", x=X, y=(shifted > 0).astype(int) + (shifted > 1.2))
    np.savez("numbers.npz", x=X, y=X[:, 0] * 3 + shifted**2 + 100)


def run(words, ranks=1, out="run"):
    """Return the evaluations that a run records."""
    on_ranks(train, [*over(SHORT, words).split(), "--out", out], ranks)
    records = read_metrics(Path(out) / "metrics.jsonl")
    return [record for record in records if record["kind"] in ("eval", "test")]


def evaluated(words, ranks=1):
    """Return what evaluate prints as JSON."""
    on_ranks(evaluate, ["run", "--json", "--backend", "numpy", *words.split()], ranks)
    return read_json(Path("run/evaluation.json"))


@pytest.mark.parametrize("ranks, layout", [(1, ""), (3, ""), (3, "--sync local"), (2, "--tp 2")])
def test_they_are_printed_recorded_drawn_and_evaluated(capfd, ranks, layout):
    """By each way to train, and again by evaluate on other ranks."""
    names = "f1,recall:2,own.py:right own.py:rare"
    records = run(f"--dataset classes.npz --epochs 2 --lr 0.3 --metric {names} {layout}", ranks)
    said, last = capfd.readouterr().out, records[-1]
    keys = ("accuracy", "f1", "recall:2", "right", "rare")
    assert [*last][4 : 4 + len(keys)] == [*keys]
    assert last["right"] == pytest.approx(last["accuracy"], rel=1e-12)
    assert last["rare"] == pytest.approx(last["recall:2"], rel=1e-12)
    line = (
        f"F1 {last['f1']:.4g}, recall:2 {last['recall:2']:.4g}, right {last['right']:.4g},"
        f" rare {100 * last['rare']:.2f} %"
    )
    lines = re.findall(r"test F1 [\d.]+, recall:2 [\d.]+, right [\d.]+, rare [\d.]+ %", said)
    assert len(lines) == len(records) and lines[-1] == f"test {line}"
    assert f"test accuracy {100 * last['accuracy']:.2f} % (loss" in said
    finished = read_json(Path("run/finished.json"))
    for words, on in (("", 1), ("", 4), ("--tp 2", 2), ("--pp 2 --metric precision", 2)):
        found = evaluated(f"--trust {words}", on)
        for key in keys:
            assert found[key] == pytest.approx(last[key], rel=1e-12), (words, key)
        assert finished[key] == last[key]
        assert ("precision" in found) == ("precision" in words)
    report(["run"])
    page = Path("run/report.html").read_text()
    assert "F1, mean over the classes" in page
    assert '"title":"right"' in page
    assert "recall:2 " in page


def test_numbers_are_in_the_units_of_the_data():
    """Also those of a metric of one's own, although the model learns normalized targets."""
    records = run("--dataset numbers.npz --loss mse --epochs 2 --metric mae,own.py:relative")
    model = nnmpi.load("run", trust=True)
    found = evaluated("--trust --part train")
    arrays = np.load("numbers.npz")
    outputs = model.predict(arrays["x"]).astype("float64")
    assert {"rmse", "r2", "mae", "relative"} <= records[-1].keys()
    sizes = found["samples"], 90 - found["samples"]
    every = (found["mae"] * sizes[0] + records[-1]["mae"] * sizes[1]) / 90
    assert every == pytest.approx(abs(outputs - arrays["y"]).mean(), rel=1e-6)
    every = (found["relative"] * sizes[0] + records[-1]["relative"] * sizes[1]) / 90
    assert every == pytest.approx((abs(outputs - arrays["y"]) / arrays["y"]).mean(), rel=1e-6)


@pytest.mark.parametrize(
    "by, highest", [("f1", True), ("recall:2", True), ("loss", False), ("perplexity", False)]
)
def test_the_best_evaluation_is_the_best_by_it(by, highest):
    """It is kept and found again; a resumed run compares with it, and cannot change its mind."""
    words = f"--dataset classes.npz --epochs 3 --lr 0.3 --best-by {by} --keep-best"
    records = run(f"{words} --stop-after 8")
    records = run("--resume run --trust", out="run")[:-1]
    values = [record[by] for record in records]
    best = values.index(max(values) if highest else min(values))
    state = read_json(max(Path("run/checkpoints").iterdir(), key=lambda f: f.name) / "state.json")
    assert (state["best_step"], state["best"]) == (records[best]["global_step"], values[best])
    assert evaluated("--best")[by] == pytest.approx(values[best], rel=1e-9)
    usage_error("the run has --best-by", run, "--resume run --best-by accuracy")


def test_the_best_may_be_by_a_metric_of_ones_own_that_is_reported():
    """A file gives another function each time it is read; a metric's name stands for one."""
    for name in ("own.py:right", "own.py:rare"):
        words = f"--dataset classes.npz --epochs 1 --metric {name},{name} --best-by {name}"
        last = run(words, out=name[-4:])[-1]
        assert sum(key == name[7:] for key in last) == 1


def test_patience_is_of_the_metric():
    """By one that never changes it ends after the second evaluation that gains nothing."""
    words = "--dataset classes.npz --epochs 9 --early-stopping 2 --best-by own.py:constant"
    records = run(words)
    assert [record["global_step"] for record in records] == [2, 4, 6, 6]
    assert "no evaluation was better" in read_json(Path("run/finished.json"))["stopped"]


def test_what_is_refused_comes_before_the_training():
    """And leaves no folder behind."""
    for words, sentence in (
        ("--metric auc", "auc is not for a model that predicts 3 classes; give accuracy"),
        ("--best-by rmse", "rmse is not for"),
        ("--metric f2", "--metric f2 is unknown; give one of accuracy"),
        ("--metric own.py:missing", "has no function 'missing'"),
        ("--metric own.py:step", "a metric is called step, which a run's files have"),
        ("--metric recall:elm", "recall:elm is of no class; give its number of 0 to 2"),
        ("--best-by f1:3", "--best-by f1:3 is of no class; give its number of 0 to 2"),
        ("--metric f1,", "--metric is f1,; it must be a list of names"),
    ):
        usage_error(re.escape(sentence), run, f"--dataset classes.npz {words}")
        assert not Path("run").exists()


def test_code_in_a_list_is_executed_with_trust_alone():
    """Wherever it stands between other names."""
    run("--dataset classes.npz --epochs 1 --metric f1,own.py:right,precision")
    for call in (lambda: run("--resume run --epochs 2"), lambda: evaluated("")):
        refuses(UsageError, "names code outside of nnmpi, --metric own.py:right,", call)
    assert evaluated("--trust")["right"] >= 0
    assert json.loads(Path("run/config.json").read_text())["metric"][1] == "own.py:right"
