"""Weights of samples: each batch's loss is sum(w l) / sum(w) over all ranks, as in a loop by hand,
in every layout, in replays, begun again, and with weights of classes.
"""

from functools import partial

import numpy as np
import pytest

import nnmpi
from nnmpi import AsynchronousWorker, Layout, Sync, Worker, data, fit, models, ops, simulate
from nnmpi.base.errors import DataError, UsageError
from nnmpi.data.sampler import order
from nnmpi.train.cli import main
from nnmpi.train.metrics import read_metrics
from tests.harness.refusals import usage_error
from tests.harness.slow import once_more
from tests.worker_options import arranged, sgd

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(23, 6)).astype("float32")
Y = DRAW.integers(0, 3, 23)
WEIGHTS = 10 * DRAW.random(23) * (np.arange(23) % 5 > 0)
CLASSES = np.array([0.5, 2.0, 1.0])
EPOCHS = 4
EACH = partial(ops.cross_entropy, reduction="none")


def build(outputs=3):
    return models.mlp((6,), outputs, hidden=[8, 8])


def by_hand(losses=EACH, targets=Y, divisors=WEIGHTS, outputs=3):
    """Return the losses of the epochs, of batches of 10 rows."""
    model, found = build(outputs).initialize(seed=0, dtype="float64"), []
    optimizer = sgd(model, 0.05)
    for epoch in range(EPOCHS):
        total = 0.0
        for rows in np.split(order(23, 0, epoch), [10, 20]):
            model.zero_grad()
            values = losses(model(X[rows].astype("float64")), targets[rows])
            mean = (values * WEIGHTS[rows]).sum() / (divisors[rows].sum() or 1.0)
            mean.backward()
            optimizer.step()
            total += mean.item() * len(rows)
        found.append(total / 23)
    return found


def fitted(group, targets=Y, outputs=3, weights=WEIGHTS, **options):
    usual = {"epochs": EPOCHS, "batch_size": 10, "lr": 0.05, "optimizer": "sgd", "quiet": True}
    samples = (X, targets, weights), (X[:7], targets[:7])
    result = fit(build(outputs), *samples, dtype="float64", **usual | options)
    result.release()
    return result.history


def check(expected, ranks, **options):
    for history in simulate(partial(fitted, **options), ranks):
        np.testing.assert_allclose(history["loss"], expected, rtol=1e-9)


LAYOUTS = {
    "dp 3": (3, {}),
    "pp 2": (2, {"layout": Layout(pp=2)}),
    "tp 2": (2, {"layout": Layout(tp=2)}),
    "microbatches": (1, {"microbatches": 4}),
    "zero 3": (2, {"layout": Layout(zero=3)}),
    "fixed": (2, {"layout": Layout(reduction="fixed")}),
    "memory": (1, {"layout": Layout(activation_memory="least")}),
}


@pytest.mark.parametrize("name", [*list(LAYOUTS)[:4], *map(once_more, list(LAYOUTS)[4:])])
def test_the_mean_is_over_the_weights_of_all_ranks(name, tmp_path):
    ranks, options = LAYOUTS[name]
    options |= {"checkpoint": tmp_path / "run"}
    simulate(partial(fitted, epochs=2, **options), ranks)
    check(by_hand(), ranks, **options)
    with pytest.raises(DataError, match="labels or weights have changed"):
        check([], ranks, weights=WEIGHTS[::-1], **options)


def test_weights_of_classes_and_smoothing_multiply_them():
    options = {"class_weights": tuple(CLASSES), "label_smoothing": 0.1}
    losses = partial(EACH, weight=CLASSES, label_smoothing=0.1)
    check(by_hand(losses, divisors=WEIGHTS * CLASSES[Y]), 3, **options)


def squares(outputs, targets):
    return ((outputs - targets) ** 2).mean(axis=1)


QUANTITIES = DRAW.normal(size=(23, 2)).astype("float32")
YES = (Y > 1).astype("float32")[:, None]


@pytest.mark.parametrize(
    "loss, losses, targets",
    [
        ("mse", squares, QUANTITIES),
        (squares, squares, QUANTITIES),
        (lambda outputs, targets: (outputs - targets) ** 2, squares, QUANTITIES),
        ("bce", lambda x, y: ops.binary_cross_entropy(x, y, reduction="none")[:, 0], YES),
    ],
)
def test_losses_of_numbers_are_weighted_by_sample(loss, losses, targets):
    outputs, targets = targets.shape[1], targets.astype("float64")
    check(by_hand(losses, targets, outputs=outputs), 3, loss=loss, targets=targets, outputs=outputs)


@pytest.mark.parametrize("ranks, layout", [(3, Layout()), (2, Layout(sp=2, dp=1))])
def test_of_sequences_every_label_has_its_samples_weight(ranks, layout):
    """In a Worker, and in a loop of one's own; labels that are ignored have none."""
    tokens = DRAW.integers(0, 4, (9, 7))
    labels = np.where(np.arange(54).reshape(9, 6) % 11 == 3, -1, tokens[:, 1:])
    samples = data.Dataset("t", tokens[:, :-1], labels, 4, weights=WEIGHTS[:9])

    def train(group):
        model = models.gpt(4, 6, 8, 1, 2)
        worker = arranged(model, group, layout, samples.x[:1], "float64", lr=0.5)
        loader = data.Loader(
            samples, 5, worker.arrangement, microbatches=2, shuffle=False, dtype="float64"
        )
        return [worker.step(batch).loss for batch in loader.epoch(0)]

    model, expected = models.gpt(4, 6, 8, 1, 2).initialize(0, "float64"), []
    optimizer = sgd(model, 0.5)
    for batch in data.Loader(samples, 5, shuffle=False, dtype="float64"):
        x, y, weights = batch
        model.zero_grad()
        values = EACH(model(x), y, ignore_index=-1)
        loss = (values * weights[:, None]).sum() / batch.global_targets
        counts = WEIGHTS[batch.indices] * (y >= 0).sum(axis=1)
        right = (values.data * WEIGHTS[batch.indices][:, None]).sum() / counts.sum()
        assert loss.item() == pytest.approx(right, rel=1e-12)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for found in simulate(train, ranks):
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_evaluations_count_all_samples_alike():
    def program(group, weights=None):
        worker = arranged(build(), group, Layout(), dtype="float64")
        samples = data.Dataset("d", X, Y, 3, weights=weights)
        loader = data.Loader(samples, 10, group, shuffle=False, dtype="float64")
        return worker.evaluate(loader.epoch(0), metrics=["f1"])

    for with_weights, without in zip(
        simulate(partial(program, weights=WEIGHTS), 2), simulate(program, 2), strict=True
    ):
        assert (with_weights.loss, with_weights.metrics) == (without.loss, without.metrics)


def test_a_step_without_weights_replays_none_with_them():
    """Of batches alike but for these."""

    def program(group):
        worker = arranged(build(), group, Layout(), lr=1e-12)
        kinds = {"weighted": {"weights": WEIGHTS}, "plain": {}}
        loaders = {
            kind: data.Loader(data.Dataset("d", X, Y, 3, **given), 23, group, shuffle=False)
            for kind, given in kinds.items()
        }
        losses = {kind: [] for kind in kinds}
        for epoch in range(6):
            for kind, loader in loaders.items():
                losses[kind] += [worker.step(batch).loss for batch in loader.epoch(epoch)]
        return losses

    (losses,) = simulate(program, 1)
    first = {kind: values[0] for kind, values in losses.items()}
    assert abs(first["weighted"] - first["plain"]) > 1e-3
    for kind, values in losses.items():
        np.testing.assert_allclose(values, first[kind], rtol=1e-5)


def test_weights_that_differ_on_a_rank_are_named():
    def program(group):
        worker = arranged(build(), group, Layout())
        samples = data.Dataset("d", X, Y, 3, weights=WEIGHTS + (group.rank == 1))
        for batch in data.Loader(samples, 10, group):
            worker.step(batch)

    usage_error("rank 1 has weights of samples: the checksum", simulate, program, 3)


def test_what_cannot_have_weights_is_refused():
    def program(group, kind=Worker, **options):
        model = build().initialize(seed=0)
        worker = kind(model, sgd(model, 0.1), group, **options)
        loader = data.Loader(data.Dataset("d", X, Y, 3, weights=WEIGHTS), 10, group)
        worker.run(loader, 0, 0, 3, 0, lambda step: 0.1)

    def total(logits, labels, reduction="sum"):
        return ops.cross_entropy(logits, labels, reduction=reduction)

    usage_error("this loss declares a sum", simulate, partial(program, loss=total), 2)
    single = r"samples have weights.*synchronous Worker"
    asynchronous = partial(program, kind=AsynchronousWorker, sync=Sync("asp"))
    usage_error(single, simulate, asynchronous, 2)
    usage_error(single, simulate, partial(fitted, sync="asp"), 2)
    pipedream = Layout(pp=2, pipeline="pipedream")
    usage_error(single, simulate, partial(fitted, layout=pipedream), 2)
    usage_error("are 0, so none counts", simulate, partial(fitted, weights=0 * WEIGHTS), 1)
    for weights, what in (
        (WEIGHTS[:5], "23 samples and weights of shape"),
        (WEIGHTS - 1, r"the weight -1.0 of sample 0 is not a finite number from 0"),
        (WEIGHTS * np.nan, "the weight nan of sample 0"),
    ):
        with pytest.raises(DataError, match=what):
            data.Dataset("d", X, Y, 3, weights=weights)
    test = X, Y, WEIGHTS
    with pytest.raises(UsageError, match="test is tuple; give a data.Dataset, or a pair"):
        simulate(lambda group: nnmpi.fit(build(), test, test, quiet=True), 1)


def test_a_column_of_a_table_has_the_weights(tmp_path):
    """It is no feature, and other tables need not have it."""
    rows = np.column_stack([X, WEIGHTS, Y]).tolist()
    names = "a,b,c,d,e,f,weight,kind"
    lines = [names, *(",".join(map(repr, row[:-1])) + f",{row[-1]:.0f}" for row in rows)]
    table, bare = tmp_path / "table.csv", tmp_path / "bare.csv"
    table.write_text("\n".join(lines) + "\n")
    bare.write_text("\n".join(line.rsplit(",", 2)[0] for line in lines) + "\n")
    train, test = data.load(table, sample_weight="weight")
    assert len(train.columns) == 6 and sorted([*train.weights, *test.weights]) == sorted(WEIGHTS)
    words = f"--dataset {table} --model mlp --hidden 8 --epochs 2 --batch-size 8 --dtype float64"
    run = tmp_path / "run"

    def command(more, ranks=1):
        simulate(lambda group: main([*words.split(), *more.split()], group), ranks)
        return [line["loss"] for line in read_metrics(run / "metrics.jsonl")]

    losses = command(f"--sample-weight 7 --quiet --out {run}")
    options = {"epochs": 2, "batch_size": 8, "schedule": "cosine", "normalize": True}
    model = models.mlp((6,), 3, hidden=[8])
    options |= {"dtype": "float64", "quiet": True, "log_every": 10}
    result = simulate(lambda group: fit(model, train, test, **options), 1)[0]
    assert result.history["test_loss"][-1] == losses[-1]
    assert nnmpi.load(run).predict(X[:2].astype("float64")).shape == (2, 3)
    words = words.replace(str(table), "digits")
    usage_error("no table with columns .*leave sample_weight out", command, "--sample-weight 7")
    for text, what in (("nan", "the weight is missing"), ("-1", "'-1' is no weight of a sample")):
        table.write_text("\n".join([*lines[:3], f"1,1,1,1,1,1,{text},0", *lines[4:]]))
        with pytest.raises(DataError, match=f"line 4, column 7: {what}"):
            data.load(table, sample_weight="weight")
    with pytest.raises(UsageError, match="cannot be the weights .* and the label"):
        data.load(table, sample_weight="kind", target="kind")
