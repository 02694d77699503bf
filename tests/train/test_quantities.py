"""Numbers that are predicted, and yes or no: trained, evaluated and used."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import nnmpi
from nnmpi import NnmpiError, Tensor, simulate
from nnmpi.base.errors import ShapeError
from nnmpi.commands.evaluate import main as evaluate
from nnmpi.commands.export import main as export
from nnmpi.commands.predict import main as predict
from nnmpi.compose.losses import ERRORS, SumError
from nnmpi.data import Batch
from nnmpi.train.cli import main as train
from nnmpi.train.metrics import read_metrics
from tests.device.here import here
from tests.harness.commands import on_ranks, over
from tests.harness.refusals import refuses, usage_error
from tests.worker_options import work

X = np.random.default_rng(0).normal(size=(50, 5)).astype(np.float32)
SUMS = X @ np.arange(5.0) + 1
FILES = {
    "one": SUMS,
    "shaped": np.stack([SUMS * i for i in range(6)], 1).reshape(50, 2, 3),
    "signs": np.stack([SUMS > 0, X[:, 0] > 0], 1).astype(np.int64),
    "three": np.arange(50) % 3,
    "single": np.zeros(50, np.int64),
}
PLAIN = "--dtype float64 --batch-size 12 --epochs 2 --log-every 1 --lr 0.02"


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """All files, in the folder where the test runs."""
    monkeypatch.chdir(tmp_path)
    for name, y in FILES.items():
        np.savez(f"{name}.npz", x=X, y=y)
    rows = [[f"{SUMS[i]:.6f}", *map(str, X[i]), "no" if i % 2 else "yes"] for i in range(50)]
    table = [["price", "a", "b", "c", "d", "e", "sold"], *rows]
    Path("houses.csv").write_text("\n".join(",".join(row[:-1]) for row in table) + "\n")
    Path("sold.csv").write_text("\n".join(",".join(row[1:]) for row in table) + "\n")


def run(words, ranks=1, out="run"):
    """Return what a run records."""
    model = "" if "--model" in words else "--model mlp --hidden 6 4"
    on_ranks(train, [*over(f"{PLAIN} {model}", words).split(), "--out", out], ranks)
    return read_metrics(Path(out) / "metrics.jsonl")


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 2, 3)])
def test_the_sum_over_samples_is_a_mean_over_elements(name, shape):
    """Divided by the samples, it is the loss and the gradient of all elements' mean, whatever the
    outputs' shape.
    """
    draw = np.random.default_rng(1)
    outputs, targets = draw.normal(size=(7, int(np.prod(shape[1:])))), draw.uniform(size=shape)
    ours, theirs = (Tensor(here(outputs), requires_grad=True) for _ in range(2))
    loss = SumError(name)(ours, here(targets)) / 7
    expected = ERRORS[name](theirs, here(targets.reshape(outputs.shape)))
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    np.testing.assert_allclose(Tensor(ours.grad).numpy(), Tensor(theirs.grad).numpy(), rtol=1e-13)
    flat = targets.reshape(outputs.shape)
    score = (
        np.mean((outputs > 0) == (flat > 0.5)) if name == "bce" else -np.mean((outputs - flat) ** 2)
    )
    batch = Batch(here(outputs), here(targets), np.arange(7), (), 7, 0, 0)
    assert float(SumError(name).score(ours.data, batch.y)) / 7 == pytest.approx(score, rel=1e-12)
    refuses(
        ShapeError,
        "for each sample",
        lambda: SumError(name)(Tensor(here(np.ones((7, 5)))), here(targets)),
    )


def test_keys_and_the_place_of_the_accuracy():
    """RMSE and R2 stand where the accuracy stands, are right, and decide with the loss which
    weights are the best.
    """
    records = run("--dataset houses.csv --target price --loss mse --epochs 4 --keep-best")
    for item in records:
        assert list(item)[3:6] == ["loss", "rmse", "r2"] and "accuracy" not in item
    last, file = records[-1], json.loads(Path("run/finished.json").read_text())
    assert file["rmse"] == last["rmse"] == pytest.approx(last["loss"] ** 0.5)
    best = min(
        (record for record in records if record["kind"] == "eval"), key=lambda item: item["loss"]
    )
    newest = Path("run/checkpoints/latest").read_text().strip()
    state = json.loads(Path(f"run/checkpoints/{newest}/state.json").read_text())
    assert state["best_step"] == best["global_step"]


def test_what_was_trained_is_used(capfd):
    """Evaluated on ranks as training printed it, loaded, and asked for values in CSV and JSON."""
    for words, name in (
        ("--dataset houses.csv --target price --loss mse", "houses.csv"),
        ("--dataset shaped.npz --loss huber", "shaped.npz"),
        ("--dataset sold.csv --loss bce", "sold.csv"),
        ("--dataset signs.npz --loss bce", "signs.npz"),
    ):
        out = name.partition(".")[0]
        run(words, 1, out)
        printed = re.findall(r"^test (.*) with the final", capfd.readouterr().out, re.MULTILINE)[0]
        for ranks, layout in ((1, ""), (3, ""), (2, "--pp 2")):
            on_ranks(evaluate, f"{out} {layout}", ranks)
            assert f"test {printed}," in capfd.readouterr().out
        model = nnmpi.load(out)
        result = model.predict(X)
        on_ranks(predict, f"{out} {name}", 2)
        lines = capfd.readouterr().out.splitlines()
        on_ranks(predict, f"{out} {name} --format json")
        values = json.loads(capfd.readouterr().out)["samples"]
        if name == "sold.csv":
            assert lines[0] == "class,no,yes" and result.shape == (50, 2)
            assert np.allclose(result.sum(1), 1)
            assert [value["class"] for value in values] == [
                ("no", "yes")[i] for i in result.argmax(1)
            ]
            continue
        assert result.shape == (50, *model.signature.target_shape)
        assert np.allclose([value["values"] for value in values], result, rtol=1e-6)
        assert lines[0] == (
            "value"
            if result.ndim == 1
            else ",".join(f"value_{i + 1}" for i in range(result[0].size))
        )
        table = np.array([list(map(float, line.split(","))) for line in lines[1:]])
        assert np.allclose(table, result.reshape(50, -1), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--dataset three.npz", None),
        (
            "--dataset iris --loss mse",
            "iris has classes, but --loss mse predicts numbers; give --loss cross-entropy",
        ),
        ("--dataset sold.csv --loss mse", "line 2: the target 'yes' is not a finite number"),
        ("--dataset one.npz", "y is float64; .*; to predict numbers, give --loss mse"),
        (
            "--dataset houses.csv --target price",
            "is not a whole number; to predict numbers, give --loss mse",
        ),
        (
            "--dataset houses.csv --target cost --loss mse",
            "has no column 'cost'; its first line is price, a, b",
        ),
        ("--dataset iris --target 3", "is no table with columns to choose; leave target out"),
        ("--dataset three.npz --loss bce", "three has 3 classes; for yes or no give two, 0 and 1"),
        (
            "--dataset one.npz --loss bce",
            "one: a target is .*; for yes or no give numbers from 0 to 1",
        ),
        ("--dataset single.npz", "has only one class, so there is nothing to predict"),
        (
            "--dataset paradise-lost --model lstm --loss mse",
            "--loss is not for --model lstm, whose samples and labels are tokens",
        ),
        (
            "--dataset one.npz --loss mse --label-smoothing 0.1",
            "--label-smoothing is for --loss cross-entropy",
        ),
        (
            "--dataset one.npz --loss mse --partition label",
            "sorts samples by class, but each sample of one has a quantity",
        ),
        (
            "--dataset one.npz --loss mean",
            "--loss is mean; it must be one of cross-entropy, mse, bce, mae, huber",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(words, sentence):
    """Once, before anything runs."""
    if sentence is None:
        assert "accuracy" in run(words)[-1]
        return
    refuses(NnmpiError, sentence, run, words, 2)


def test_a_worker_knows_losses_by_name():
    """As the command does; another name is refused."""
    sets = nnmpi.data.Dataset("sums", X, SUMS.astype(np.float32), 0)

    def learn(group, loss):
        model = nnmpi.models.mlp((5,), 1, hidden=[4]).initialize(dtype="float64")
        worker = work(model, group, loss=loss)
        loader = nnmpi.data.Loader(sets, 50, group, shuffle=False, dtype="float64")
        outputs = model(Tensor(X.astype(np.float64))).numpy()
        expected = np.mean((outputs[:, 0] - SUMS.astype(np.float32)) ** 2)
        report = worker.step(next(iter(loader.epoch(0))))
        assert report.loss == pytest.approx(expected, rel=1e-12) and report.rmse == pytest.approx(
            expected**0.5
        )
        assert np.isnan(report.accuracy)
        worker.release()
        return report.loss

    assert len(set(simulate(lambda group: learn(group, "mse"), 3))) == 1
    refuses(
        NnmpiError,
        "the loss 'squares' is unknown; choose one of cross-entropy, mse, bce",
        simulate,
        lambda group: learn(group, "squares"),
        2,
    )


def test_several_classes_for_each_sample_are_refused_before_the_first_step(tmp_path):
    usage_error(
        r"signs has labels of shape \(2,\) for each sample, but --model mlp predicts",
        run,
        "--dataset signs.npz",
        ranks=2,
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_large_targets_are_learned_and_reported_in_their_units(loss, capfd):
    """As small ones are: trained, evaluated, predicted, exported and taken back."""
    y = np.stack([500 + 200 * X[:, 0], 1e6 + 3000 * X[:, 1]], 1)
    np.savez("large.npz", x=X, y=y.astype(np.float32))
    np.savez("small.npz", x=X, y=((y - y.mean(0)) / (y - y.mean(0)).std()).astype(np.float32))
    words = f"--loss {loss} --epochs 30 --model mlp --hidden 24 24"
    last, small = (
        run(f"--dataset {name}.npz {words}", ranks, name)[-1]
        for name, ranks in (("large", 3), ("small", 1))
    )
    assert last["r2"] == pytest.approx(small["r2"], abs=1e-4) and last["r2"] > 0.9
    std = nnmpi.load("large").signature.target_std
    assert std == pytest.approx((y - y.mean(0)).std(), rel=0.2)  # of four fifths
    assert last["rmse"] == pytest.approx(small["rmse"] * std, rel=0.3)
    if loss == "mse":
        assert last["loss"] == pytest.approx(last["rmse"] ** 2)
    capfd.readouterr()
    on_ranks(evaluate, "large --part train", 2)
    found = nnmpi.load("large").predict(X)
    assert found.shape == y.shape and np.abs(found - y).max() < 0.5 * y.std(0).max()
    on_ranks(export, "large --out torch.safetensors")
    capfd.readouterr()
    taken = nnmpi.load("large", weights="torch.safetensors")
    np.testing.assert_allclose(taken.predict(X), found, rtol=1e-9)
    state, h = load_file("torch.safetensors"), taken.transform(X)
    for layer, relu in (("1", True), ("3", True), ("5", False)):
        h = h @ state[f"{layer}.weight"].T + state[f"{layer}.bias"]
        h = np.maximum(h, 0) if relu else h
    np.testing.assert_allclose(h, found, rtol=1e-9)
    on_ranks(predict, "large large.npz")
    rows = capfd.readouterr().out.splitlines()[1:]
    np.testing.assert_array_equal([[float(x) for x in row.split(",")] for row in rows], found)


def test_targets_as_they_are_and_models_without_a_last_layer(capfd):
    """Not normalized on request; an export that cannot have the data's units says so."""
    np.savez("large.npz", x=X, y=(500 + 200 * SUMS).astype(np.float32))
    assert run("--dataset large.npz --loss mse --no-normalize", out="plain")[-1]["r2"] < 0
    assert "which are not normalized: divide such large ones" in capfd.readouterr().out
    assert nnmpi.load("plain").signature.target_mean == ()
    Path("ends.py").write_text(
        "from nnmpi import nn\n"
        "def net(shape, outputs):\n"
        "    return nn.Sequential(nn.Linear(shape[0], outputs), nn.Tanh())\n"
    )
    run("--dataset large.npz --loss mse --model ends.py:net", out="tanh")
    capfd.readouterr()
    on_ranks(export, "tanh --trust --out t.safetensors")
    assert "they are its outputs times" in capfd.readouterr().out
    found = nnmpi.load("tanh", trust=True).predict(X)
    taken = nnmpi.load("tanh", weights="t.safetensors", trust=True).predict(X)
    np.testing.assert_array_equal(taken, found)
