"""An evaluation's metrics are those of all samples, whoever has them, in whatever parts."""

import numpy as np
import pytest

from nnmpi import (
    AsynchronousWorker,
    Layout,
    Sync,
    Tensor,
    Worker,
    models,
    nn,
    no_grad,
    ops,
    simulate,
)
from nnmpi.base.errors import UsageError
from nnmpi.data import Loader
from nnmpi.metrics import METRICS, Metric
from nnmpi.nn import Sharding
from tests.compose.small_runs import build, dataset, optimizer_of
from tests.harness.refusals import told_on_all
from tests.worker_options import arranged, work

ROWS = 23
NAMES = "accuracy", "precision", "recall", "f1", "recall:1", "perplexity"


def near(outputs, labels):
    """A metric of one's own: which labels are missed by at most one class."""
    return abs(outputs.argmax(axis=1) - labels) <= 1


def outputs_of(model, x):
    """Return what a model computes of all rows, by one rank."""
    with no_grad():
        return model(Tensor(x.astype("float64"))).numpy()


def by_class(outputs, labels):
    """Return the metrics of classes by their definitions, class by class."""
    best, classes = outputs.argmax(axis=-1).reshape(-1), outputs.shape[-1]
    outputs, labels = outputs.reshape(-1, classes), labels.reshape(-1)
    outputs, best, labels = outputs[labels >= 0], best[labels >= 0], labels[labels >= 0]
    precisions, recalls = {}, {}
    for one in {*best.tolist(), *labels.tolist()}:
        both = float(((best == one) & (labels == one)).sum())
        precisions[one] = both / max((best == one).sum(), 1)
        recalls[one] = both / max((labels == one).sum(), 1)
    f1 = [
        2 * precisions[one] * recalls[one] / max(precisions[one] + recalls[one], 1e-300)
        for one in recalls
    ]
    losses = np.log(np.exp(outputs).sum(axis=1)) - outputs[np.arange(len(labels)), labels]
    larger = (outputs > outputs[np.arange(len(labels)), labels][:, None]).sum(axis=1)
    return {
        "accuracy": (best == labels).mean(),
        "precision": np.mean(list(precisions.values())),
        "recall": np.mean(list(recalls.values())),
        "f1": np.mean(f1),
        "recall:1": recalls.get(1, 0.0),
        "perplexity": np.exp(losses.mean()),
        "top-5": (larger < 5).mean(),
        "near": near(outputs, labels).mean(),
    }


def same_everywhere(group, found, expected):
    """Assert that all ranks have found these values."""
    right = all(
        np.isclose(value, expected[name], rtol=1e-12, atol=0) for name, value in found.items()
    )
    assert group.gather([right, sorted(found)]) == [[True, sorted(found)]] * group.size, found


@pytest.mark.simulated
@pytest.mark.parametrize("kind", ["worker", "asynchronous"])
def test_they_are_of_all_samples(group, kind):
    """With batches and parts that divide nothing, and ranks that have no sample of the last one;
    recorded passes measure, too, each time anew, and an evaluation without metrics has none.
    """
    model = build()
    data = dataset(ROWS)
    expected = by_class(outputs_of(model, data.x), data.y)
    worker = {
        "worker": lambda: Worker(model, optimizer_of(model), group),
        "asynchronous": lambda: AsynchronousWorker(
            model, optimizer_of(model), group, Sync("local")
        ),
    }[kind]()
    batches = Loader(data, 7, group, shuffle=False, dtype="float64", workers=0)
    reports = [
        worker.evaluate(batches.epoch(0), metrics=given)
        for given in ([*NAMES, near], (), [*NAMES, near], [*NAMES, near], "f1")
    ]
    worker.release()
    for report in (*reports[:1], *reports[2:4]):
        assert [*report.metrics] == [*NAMES, "near"]
        same_everywhere(group, report.metrics, expected)
    assert reports[1].metrics == {}
    same_everywhere(group, reports[4].metrics, expected)


class Net(nn.Module):
    """Seven classes of which each rank of a tensor group has some, or none."""

    def __init__(self):
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 7)
        self.sharding = {"head": Sharding.VOCAB}

    def forward(self, x):
        """Return logits."""
        return self.head(ops.tanh(self.first(x)))


def part_of(worker, rows):
    """Return the rows of this rank's replica, unevenly: the first one has most of them."""
    place = worker.arrangement
    bounds = [0, *np.linspace(rows - place.data_ranks + 1, rows, place.data_ranks).astype(int)]
    return slice(bounds[place.data_rank], bounds[place.data_rank + 1])


@pytest.mark.simulated(max_size=9)
def test_classes_on_several_ranks(group):
    """The logits are gathered in blocks, of as many rows as there are here, or of a few."""
    x = np.random.default_rng(2).normal(size=(ROWS, 6))
    y = (np.arange(ROWS) ** 2) % 7
    expected = by_class(outputs_of(Net().initialize(seed=0, dtype="float64"), x), y)
    worker = arranged(Net(), group, Layout(dp=1, tp=group.size), x[:1], "float64")
    found = worker.evaluate(x, y, metrics=[*NAMES, "top-5", near]).metrics
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nnmpi.compose.evaluation.LOGITS_BYTES", 8 * 7 * 5)
        again = worker.evaluate(x, y, metrics=[*NAMES, "top-5", near]).metrics
    worker.release()
    same_everywhere(group, found, expected)
    assert again == found


@pytest.mark.simulated(min_size=4, max_size=4)
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 4},
        {"dp": 2, "pp": 2},
        {"pp": 2, "tp": 2, "pipeline": "gpipe"},
        {"dp": 2, "tp": 2},
        {"dp": 2, "sp": 2},
        {"dp": 4, "zero": 3},
    ],
    ids=lambda layout: ",".join(f"{name}{value}" for name, value in layout.items()),
)
def test_tokens_in_every_layout(group, layout):
    """Padding does not count; shards of positions, stages and classes give the values of all."""
    tokens = np.random.default_rng(0).integers(0, 9, (7, 7))
    labels = tokens[:, 1:].copy()
    labels[::2, 4:] = -1

    def net():
        return models.gpt(9, 6, features=8, layers=2, heads=2)

    whole = net().initialize(seed=0, dtype="float64")
    with no_grad():
        expected = by_class(whole(tokens[:, :-1]).numpy(), labels)
    worker = arranged(net(), group, Layout(**layout), tokens[:1, :-1], "float64")
    mine = part_of(worker, 7)
    given = worker.evaluate(tokens[mine, :-1], labels[mine], metrics=[*NAMES, "top-5", near])
    worker.release()
    same_everywhere(group, given.metrics, expected)


@pytest.mark.simulated(max_size=5)
@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_numbers_and_yes_or_no(group, loss):
    """On ranks of which all but the first have one row, or none."""
    random = np.random.default_rng(1)
    x = random.normal(size=(ROWS, 6))
    y = random.normal(1000, 3, size=(ROWS, 3)) if loss == "mse" else (x[:, :3] > 0.2).astype(float)
    model = build()
    outputs = outputs_of(model, x)
    score = outputs[:, 0]
    pairs = score[y[:, 0] == 1][:, None] - score[y[:, 0] == 0] if loss == "bce" else None
    worker = work(model, group, loss=loss)
    last = ROWS - group.size + 2
    bounds = [0, last, *range(last + 1, ROWS + 1), ROWS][: group.size + 1]
    bounds = [0, ROWS] if group.size == 1 else bounds
    mine = slice(bounds[group.rank], bounds[group.rank + 1])
    if loss == "mse":
        error = outputs - y
        expected = {
            "rmse": np.sqrt((error**2).mean()),
            "mae": abs(error).mean(),
            "r2": 1 - (error**2).sum() / ((y - y.mean(axis=0)) ** 2).sum(),
        }
        found = worker.evaluate(x[mine], y[mine], metrics=[*expected]).metrics
    else:
        first = (outputs[:, 0] > 0) & (y[:, 0] == 1)
        expected = {
            "accuracy": ((outputs > 0) == y).mean(),
            "recall:0": first.sum() / y[:, 0].sum(),
            "first": (np.sign(pairs) + 1).mean() / 2,
        }
        auc = METRICS["auc"]
        one = Metric(
            "first",
            lambda outputs, labels: auc.measure(outputs[:, :1], labels[:, :1]),
            auc.finish,
            auc.merge,
        )
        found = worker.evaluate(x[mine], y[mine], metrics=["accuracy", "recall:0", one]).metrics
    worker.release()
    same_everywhere(group, found, expected)


@pytest.mark.simulated(max_size=4)
def test_what_is_refused_is_refused_on_all_ranks(group):
    """Also if one rank alone has the rows at which a metric fails; the next evaluation goes on."""

    def fails(outputs, labels):
        if (labels == 2).any():
            raise ValueError("two")
        return labels * 1.0

    model, data = build(), dataset(ROWS)
    worker = work(model, group)
    batches = Loader(data, 7, group, shuffle=False, dtype="float64", workers=0)

    def evaluate(metrics):
        return lambda: worker.evaluate(batches.epoch(0), metrics=metrics)

    cases = {
        "auc is not for a model that predicts 3 classes; give accuracy": ["f1", "auc"],
        "metric fails: fails(outputs, labels) raised ValueError in line": fails,
        "metric recall:3: the classes are 0 to 2": "recall:3",
        "is unknown": "f2",
    }
    if group.size > 1:
        cases["rank 0 evaluates the metrics f1, and rank 1 (none)"] = ["f1"] * (not group.rank)
    for sentence, metrics in cases.items():
        assert sentence in told_on_all(group, evaluate(metrics), ValueError)
    expected = by_class(outputs_of(model, data.x), data.y)
    same_everywhere(group, evaluate("f1")().metrics, expected)
    worker.release()


def test_the_samples_of_no_rank_have_no_metrics():
    """An evaluation without rows gives NaN, as its means have nothing to count."""

    def program(group):
        worker = work(build(), group)
        return worker.evaluate([], metrics=["f1", "recall:1", "accuracy", "perplexity"]).metrics

    for found in simulate(program, 2):
        assert np.isnan([*found.values()]).all()


def test_a_value_is_the_same_on_all_ranks():
    """Also of a function that depends on the rank: ranks must not stop at other evaluations."""

    def program(group):
        worker = work(build(), group)
        own = Metric("own", lambda outputs, labels: [len(labels)], lambda state: 10 + group.rank)
        return worker.evaluate(
            Loader(dataset(ROWS), 7, group, dtype="float64").epoch(0), metrics=own
        ).metrics["own"]

    assert simulate(program, 3) == [10, 10, 10]


def test_a_merge_may_change_what_it_is_given():
    def add(first, second):
        first += second
        return first

    def program(group):
        worker = work(build(), group)
        own = Metric("own", lambda outputs, labels: [len(labels)], lambda state: state[0], add)
        batches = Loader(dataset(ROWS), 3, group, shuffle=False, dtype="float64").epoch(0)
        return worker.evaluate(batches, metrics=own).metrics["own"]

    for ranks in (1, 2, 3):
        assert simulate(program, ranks) == [ROWS] * ranks


@pytest.mark.parametrize("ranks", [1, 3])
def test_states_that_cannot_be_merged_are_refused(ranks):
    """On all ranks, in a sentence, whether a rank has them alone or several together."""

    def program(group, measure, merge):
        worker = work(build(), group)
        batches = Loader(
            dataset(ROWS), 5 * group.size, group, shuffle=False, dtype="float64"
        ).epoch(0)
        worker.evaluate(batches, metrics=Metric("own", measure, len, merge))

    def broken(first, second):
        raise ValueError("no merge")

    for measure, merge, text in (
        (lambda outputs, labels: labels * 1.0, np.add, "own: its states have the shapes"),
        (lambda outputs, labels: [1], broken, "own: broken.* raised ValueError .*: no merge"),
        (lambda outputs, labels: None, np.add, "own: .*raised TypeError.*returns None"),
    ):
        with pytest.raises(UsageError, match=text):
            simulate(lambda group, a=measure, b=merge: program(group, a, b), ranks)
