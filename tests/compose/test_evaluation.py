"""Evaluations are means over all samples, whoever has them, and whichever worker is asked."""

import numpy as np
import pytest

from nnmpi import AsynchronousWorker, Layout, Sync, Tensor, Worker, models, no_grad, ops
from nnmpi.compose.losses import LabelLoss, squared_errors
from nnmpi.data import Loader
from tests.compose.small_runs import build, dataset, optimizer_of
from tests.worker_options import arranged

ROWS = 23


def expected():
    """Return loss and accuracy of the model as it begins, without the workers' code."""
    data = dataset(ROWS)
    with no_grad():
        logits = build()(Tensor(data.x.astype("float64"))).data
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(ROWS), data.y]
    return float(losses.mean()), float((logits.argmax(axis=1) == data.y).mean())


@pytest.mark.simulated
@pytest.mark.parametrize("kind", ["worker", "asynchronous"])
def test_it_is_the_mean_over_all_samples(group, kind):
    """With batches and parts that divide nothing, and ranks that have no sample of the last
    batch.
    """
    model = build()
    workers = {
        "worker": lambda: Worker(model, optimizer_of(model), group),
        "asynchronous": lambda: AsynchronousWorker(
            model, optimizer_of(model), group, Sync("local")
        ),
    }
    worker = workers[kind]()
    batches = Loader(dataset(ROWS), 7, group, shuffle=False, dtype="float64", workers=0)
    report = worker.evaluate(batches.epoch(0))
    if kind == "worker":
        pairs = [(batch.x, batch.y) for batch in batches.epoch(0)]
        assert worker.evaluate(pairs).loss == report.loss
        assert worker.evaluate([[x, y] for x, y in pairs]).loss == report.loss
        assert worker.evaluate(next(batches.epoch(0))).samples > 0
    worker.release()
    result = (report.loss, report.accuracy)
    assert (
        group.gather([bool(np.allclose(result, expected(), rtol=1e-12)), report.samples])
        == [[True, ROWS]] * group.size
    )


@pytest.mark.simulated(min_size=4, max_size=4)
@pytest.mark.parametrize(
    "schedule, options", [("1f1b", {"zero": 3}), ("v-half", {"expert_parallel": True})]
)
def test_replicas_that_meet_in_a_forward_have_as_many(group, schedule, options):
    """Where one replica has fewer samples of a batch than stages, and another more."""
    tokens = np.random.default_rng(0).integers(0, 9, (5, 7))
    whole, model = (models.gpt(9, 6, features=8, layers=2, heads=2, experts=2) for _ in "ab")
    whole.initialize(seed=0, dtype="float64")
    with no_grad():
        expected = ops.cross_entropy(whole(tokens[:, :-1]), tokens[:, 1:]).item()
    layout = Layout(pp=2, pipeline=schedule, **options)
    worker = arranged(model, group, layout, tokens[:1, :-1], "float64")
    place = worker.arrangement
    part = np.array_split(np.arange(5), place.data_ranks)[place.data_rank]
    report = worker.evaluate(tokens[part, :-1], tokens[part, 1:])
    worker.release()
    assert (report.samples, report.loss) == (5, pytest.approx(expected, rel=1e-12))


def test_quantities_of_a_sample_are_averaged():
    """By a loss of one's own and by the score; outputs that do not fit have none."""
    x, y = np.ones((3, 2)), np.zeros((3, 2))
    loss = LabelLoss(lambda outputs, targets: (outputs - targets) ** 2)
    assert loss(Tensor(x), y).item() == 3 == -squared_errors(x, y)
    assert squared_errors(x[:, :1], y[:, 0]) == -3
    assert np.isnan([squared_errors(x, y[:2]), squared_errors(x, y[:, :1])]).all()
