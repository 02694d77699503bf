"""What a run prints, recomputed from the raw data by NumPy: a linear model's training by hand."""

import csv
import gzip
import re

import numpy as np

from nnmpi.commands.evaluate import main as evaluate
from nnmpi.data import load
from nnmpi.data.catalogue import BUNDLED
from nnmpi.data.sampler import order
from nnmpi.models import mlp
from nnmpi.train.cli import main
from nnmpi.train.metrics import read_metrics
from tests.harness.commands import on_ranks
from tests.train.jobs import unfolded

EPOCHS, ROWS, RATE, CLIP = 3, 50, 0.5, 0.5
WORDS = (
    f"--dataset iris --model mlp --hidden --epochs {EPOCHS} --batch-size {ROWS} --optimizer sgd"
    f" --lr {RATE} --clip {CLIP} --dtype float64 --log-every 1 --verbose"
)
NAMES = "setosa", "versicolor", "virginica"


def iris():
    """Return normalized samples and labels of the training and of the test part."""
    with gzip.open(BUNDLED["iris"], "rt") as stream:
        _, *rows = csv.reader(stream)
    x = np.array([row[:-1] for row in rows], "float32").astype("float64")
    y = np.array([NAMES.index(row[-1]) for row in rows])
    train, test = (part.places for part in load("iris"))
    return [((x[part] - x[train].mean(0)) / x[train].std(0), y[part]) for part in (train, test)]


def by_hand():
    """Return each step's loss, share of right answers, norm, rate and rows; the test's logits."""
    (x, y), (test, _) = iris()
    layer = mlp((4,), 3, []).initialize(seed=0, dtype="float64")[-1]
    weight, bias = layer.weight.numpy().copy(), layer.bias.numpy().copy()
    steps, logits = [], []
    for epoch in range(EPOCHS):
        for rows in np.split(order(len(x), 0, epoch), range(ROWS, len(x), ROWS)):
            outputs, labels = x[rows] @ weight + bias, y[rows]
            p = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
            slopes = (p - np.eye(3)[labels]) / len(rows)
            grads = x[rows].T @ slopes, slopes.sum(axis=0)
            norm = np.sqrt(sum((grad**2).sum() for grad in grads))
            rate = RATE * (1 + np.cos(np.pi * len(steps) / 9)) / 2
            for value, grad in zip((weight, bias), grads, strict=True):
                value -= rate * min(1.0, CLIP / (norm + 1e-6)) * grad
            right = (outputs.argmax(axis=1) == labels).mean()
            loss = -np.log(p[np.arange(len(rows)), labels]).mean()
            steps.append((loss, right, norm, rate, len(rows)))
        logits.append(test @ weight + bias)
    return np.array(steps), logits


def measured(logits, y):
    """Return loss, accuracy and mean F1, and of each class precision, recall, F1 and support."""
    loss = (np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y]).mean()
    found = logits.argmax(axis=1)
    rows = []
    for number in range(3):
        right = ((found == number) & (y == number)).sum()
        predicted, there = (found == number).sum(), (y == number).sum()
        rows.append((right / predicted, right / there, 2 * right / (predicted + there), there))
    return loss, (found == y).mean(), np.mean([row[2] for row in rows]), rows


def test_a_runs_lines_are_what_its_data_say(tmp_path, capsys):
    run = tmp_path / "run"
    on_ranks(main, f"{WORDS} --metric f1 --out {run}", 2)
    text = unfolded(capsys.readouterr().out)
    steps, logits = by_hand()
    y = iris()[1][1]
    records = read_metrics(run / "metrics.jsonl")
    trained = [record for record in records if record["kind"] == "train"]
    names = "loss", "accuracy", "grad_norm", "learning_rate"
    found = [[record[name] for name in names] for record in trained]
    np.testing.assert_allclose(found, steps[:, :4], rtol=1e-9)
    for (_, _, _, _, rows), record in zip(steps, trained, strict=True):
        np.testing.assert_allclose(record["samples_per_second"] * record["step_s"], rows)
    assert "120 training and 30 test samples of 4, 3 classes" in text
    assert "batches: 3 of 50 in each of 3 epochs, 9 steps in all" in text
    assert f"model: mlp, {4 * 3 + 3} parameters" in text
    for epoch, of_test in enumerate(logits):
        of_epoch = steps[3 * epoch : 3 * epoch + 3]
        loss, right = (np.average(of_epoch[:, i], weights=of_epoch[:, 4]) for i in (0, 1))
        test_loss, accuracy, f1, _ = measured(of_test, y)
        line = f"epoch {epoch + 1}/3: loss {loss:.4f}, accuracy {right:.2%}; test {test_loss:.4f},"
        assert f"{line} {accuracy:.2%}; ".replace("%", " %") in text
        assert f"test F1 {f1:.4g}" in text
    for speed, step_ms in re.findall(r"(\d+) samples/s .*? step (\S+) ms", text):
        assert abs(int(speed) * 3 * float(step_ms) / 1000 - 120) < 1.2  # of 3 steps of an epoch
    parts = re.findall(r"step (\S+) ms = (.*?); mean over 2 ranks", text)
    for whole, rest in parts:
        times = [float(number) for number in re.findall(r"(\S+) ms \(", rest)]
        shares = [int(number) for number in re.findall(r"\((\d+) %\)", rest)]
        assert abs(sum(times) - float(whole)) < 0.03 and abs(sum(shares) - 100) <= 2
    best = max(range(EPOCHS), key=lambda epoch: (measured(logits[epoch], y)[1], -epoch))
    accuracy = f"{measured(logits[best], y)[1]:.2%}".replace("%", " %")
    assert f"best epoch {best + 1} with accuracy {accuracy}" in text
    held = dict(re.findall(r"(gradients|activations|batches|parameters) (\S+ \w+)", text))
    assert held["batches"] == f"{25 * (4 + 1) * 8} B"  # half of a batch: samples and labels
    told = re.search(r"memory at the peak .*?([\d.]+) KiB on rank 0", text)
    scale = {"B": 1, "KiB": 1024}
    whole = sum(float(size) * scale[unit] for size, unit in map(str.split, held.values()))
    assert abs(float(told[1]) * 1024 - whole) < 1

    on_ranks(evaluate, f"{run} --metric f1")
    text = capsys.readouterr().out
    loss, accuracy, f1, by_class = measured(logits[-1], y)
    for name, row in zip(NAMES, by_class, strict=True):
        numbers = " ".join([*(f"{value:.4f}" for value in row[:3]), str(row[3])])
        assert f"{name} {numbers}" in unfolded(text)
    counts = np.zeros((3, 3), int)
    np.add.at(counts, (y, logits[-1].argmax(axis=1)), 1)
    table = re.findall(r"^(?:setosa|versicolor|virginica)( +\d+)( +\d+)( +\d+)$", text, re.M)
    assert np.array_equal(np.array(table, int), counts)
    assert f"{counts.trace()} of 30 right" in text and f"(loss {loss:.4f})" in text
    assert f"test F1 {f1:.4g}" in text and f"accuracy {accuracy:.2%}".replace("%", " %") in text
