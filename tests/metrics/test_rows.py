"""Each metric has scikit-learn's value, of all rows at once and merged from batches in any way."""

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from nnmpi.base.errors import UsageError
from nnmpi.compose.evaluation import MetricStates
from nnmpi.compose.losses import SumCrossEntropy, SumError
from nnmpi.compose.stats import Totals
from nnmpi.metrics import METRICS, Metric, MetricTask, find_metric, find_metrics, top_k
from tests.harness.refusals import usage_error

ROWS = 41


def waves(columns, phase):
    """Return numbers that are the same on every machine, with some ties."""
    numbers = np.arange(ROWS * columns).reshape(ROWS, columns)
    return np.round(np.sin(1 + numbers * 0.7 + phase) * 4, 2)


def classes(count):
    """Return labels."""
    rows = np.arange(ROWS)
    return (rows**2 + rows // 3) % count


LOGITS, LABELS = waves(7, 0), classes(7) % 6  # no label is of class 6, which is predicted
TWO, HALVES = np.round(waves(2, 0)), classes(2)  # 7 scores: most are tied
YES, IS_YES = np.round(waves(3, 0)), (waves(3, 1) > 0.5).astype(float)
NUMBERS = waves(2, 2) + 2000  # far from 0
OUTPUTS = NUMBERS + waves(2, 0) / 8

# of scikit-learn 1.9.1
CASES = {
    "accuracy": (LOGITS, LABELS, 0.14634146341463414),
    "precision": (LOGITS, LABELS, 0.18015873015873016),
    "recall": (LOGITS, LABELS, 0.1373015873015873),
    "f1": (LOGITS, LABELS, 0.1473922902494331),
    "f1:2": (LOGITS, LABELS, 0.4444444444444444),
    "precision:1": (LOGITS, LABELS, 0.0),
    "top-5": (LOGITS, LABELS, 0.7073170731707317),
    "perplexity": (LOGITS, LABELS, 79.86924090710602),
    "auc": (TWO, HALVES, 0.5052910052910053),
    "auc of 3": (YES, IS_YES, 0.8736602903269569),
    "precision of 3": (YES, IS_YES, 0.8271604938271605),
    "recall of 3": (YES, IS_YES, 0.8395061728395062),
    "f1 of 3": (YES, IS_YES, 0.7776422764227643),
    "recall of yes": (YES[:, 0], IS_YES[:, 0], 1.0),
    "rmse": (OUTPUTS[:, 0], NUMBERS[:, 0], 0.35319976814758797),
    "rmse of 2": (OUTPUTS, NUMBERS, 0.3549342680041731),
    "mae": (OUTPUTS, NUMBERS, 0.31870426829268805),
    "r2": (OUTPUTS[:, 0], NUMBERS[:, 0], 0.984209963556435),
    "r2 of 2": (OUTPUTS, NUMBERS, 0.9840283421300499),
    "r2 of 2, one constant": (OUTPUTS, NUMBERS * [1, 0], 0.984209963556435),
}


def cuts(rows, way):
    """Return the parts in which rows are measured."""
    ways = {"one": [rows], "each": list(np.split(rows, len(rows)))}
    return ways.get(way) or np.split(rows, [3, 3, 4, 20])  # one is empty, and one has a single row


@pytest.mark.parametrize("way", ["one", "each", "uneven"])
@pytest.mark.parametrize("case", CASES)
def test_it_has_the_value_of_scikit_learn(case, way):
    outputs, labels, value = CASES[case]
    metric = find_metric(case.partition(" ")[0])
    parts = [part for part in cuts(np.arange(ROWS), way) if len(part)]
    states = [metric.state(outputs[part], labels[part]) for part in parts]
    assert metric.value(reduce(metric.merge, states)) == pytest.approx(value, rel=1e-12, abs=1e-15)
    assert metric(outputs, labels) == pytest.approx(value, rel=1e-12, abs=1e-15)


def test_every_row_has_a_value_and_says_what_it_is():
    """Each has a case above, a title for its curve and a line of the page that is made of rows."""
    assert {case.partition(" ")[0].partition(":")[0] for case in CASES} == {*METRICS}
    assert all(row.title and row.help for row in METRICS.values())


def test_it_is_scikit_learns_function():
    """Where it is installed, of other numbers."""
    sk = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(5)
    for rows, count in ((1, 7), (2, 6), (300, 11)):
        logits, labels = random.normal(size=(rows, count)), random.integers(0, count, rows)
        best = logits.argmax(axis=1)
        for name in ("precision", "recall", "f1"):
            function = getattr(sk, f"{name}_score")
            value = function(labels, best, average="macro", zero_division=0)
            assert METRICS[name](logits, labels) == pytest.approx(value, rel=1e-12)
        value = sk.top_k_accuracy_score(labels, logits, k=5, labels=range(count))
        assert METRICS["top-5"](logits, labels) == pytest.approx(value, rel=1e-12)
        number, output = random.normal(1e6, 1.0, rows), random.normal(1e6, 1.0, rows)
        value = sk.mean_absolute_error(number, output)
        assert METRICS["mae"](output, number) == pytest.approx(value, rel=1e-12)
        if rows > 2:
            value = sk.r2_score(number, output)
            assert METRICS["r2"](output, number) == pytest.approx(value, rel=1e-12)
            score = np.round(random.normal(size=(rows, 2)), 1)
            value = sk.roc_auc_score(labels % 2, score[:, 1] - score[:, 0])
            assert METRICS["auc"](score, labels % 2) == pytest.approx(value, rel=1e-12)


def test_r2_far_from_zero_keeps_its_digits():
    """Where sums of squares would have none left; merged from batches that lie far apart, too."""
    targets = 1e8 + np.arange(64.0) % 7
    outputs = targets + (np.arange(64) % 2) / 4
    expected = 1 - 2.0 / np.square(np.arange(64.0) % 7 - (np.arange(64) % 7).mean()).sum()
    metric = METRICS["r2"]
    states = [metric.state(outputs[i : i + 5], targets[i : i + 5]) for i in range(0, 64, 5)]
    assert metric.value(reduce(metric.merge, states)) == pytest.approx(expected, rel=1e-12)


def test_what_has_no_value_is_nan():
    assert np.isnan(METRICS["auc"](TWO, np.ones(ROWS, int)))  # labels of one class
    assert np.isnan(METRICS["auc"](TWO * np.nan, HALVES))
    assert np.isnan(METRICS["r2"](OUTPUTS, NUMBERS * 0))  # no variance
    assert np.isnan([METRICS[name].value(None) for name in METRICS]).all()  # no rows
    assert METRICS["top-5"](LOGITS * np.nan, LABELS) == 0


def test_of_equal_logits_the_first_count():
    """As many as are asked for, and the best one is that of the accuracy."""
    ties = np.zeros((4, 4))
    assert top_k(2)(ties, np.arange(4)) == 0.5
    labels = np.arange(ROWS) % 2
    assert top_k(1)(TWO, labels) == METRICS["accuracy"](TWO, labels)


def test_auc_counts_pairs():
    """By its definition: the share of pairs in the right order, of equal ones a half."""
    scores = TWO[:, 1] - TWO[:, 0]
    pairs = scores[HALVES == 1][:, None] - scores[HALVES == 0]
    assert METRICS["auc"](TWO, HALVES) == pytest.approx((np.sign(pairs) + 1).mean() / 2, rel=1e-14)
    # large logits, whose probabilities would all be 1
    assert METRICS["auc"](np.array([[0, 800.0], [0, 900]]), np.array([0, 1])) == 1.0


def test_what_an_evaluation_knows_is_what_would_be_measured():
    """Accuracy and perplexity come from its loss and score; with a loss of one's own they do not,
    nor with a smoothed one.
    """
    log_losses = np.log(np.exp(LOGITS).sum(axis=1)) - LOGITS[np.arange(ROWS), LABELS]
    totals = Totals(
        targets=ROWS, loss_sum=log_losses.sum(), score_sum=(LOGITS.argmax(1) == LABELS).sum()
    )
    for name in ("accuracy", "perplexity"):
        assert METRICS[name].known(totals) == pytest.approx(METRICS[name](LOGITS, LABELS), 1e-12)
    chosen = METRICS["perplexity"], METRICS["f1"]
    for loss, measured in (
        (SumCrossEntropy(), 1),
        (SumCrossEntropy(None, 0.1), 2),
        (lambda logits, labels: logits, 2),
    ):
        states = MetricStates(chosen, loss)
        states.add(LOGITS, LABELS, True)
        assert len(states.shapes()) == measured


@pytest.mark.parametrize(
    "names, task, sentence",
    [
        ("auc", MetricTask("classes", 3), r"auc is not for .* 3 classes; give accuracy, precision"),
        ("top-5", MetricTask("classes", 5), "top-5 is not for"),
        ("f1", MetricTask("quantities"), r"predicts quantities; give rmse, .*r2, or one of your"),
        ("rmse", MetricTask("tokens", 9), "9 tokens; give accuracy, top-5,.* f1"),
        ("perplexity", MetricTask("yes or no"), "yes or no; give accuracy,.* auc, or"),
        ("fi", None, "metrics= fi is unknown; give one of accuracy,"),
        ("recall:ash", None, "recall:ash is of no class; give its number, such as recall:0"),
        ("top-5:3", None, "top-5:3 is unknown"),
        ("no_such.py:f", None, "there is no file no_such.py"),
    ],
)
def test_a_metric_that_does_not_apply_is_refused(names, task, sentence):
    usage_error(sentence, find_metrics, names, task)


def test_a_class_is_told_by_name_or_number():
    outputs, labels = LOGITS, LABELS
    by_name = find_metric("recall:c", class_names="abcdefg")
    assert by_name(outputs, labels) == find_metric("recall:2")(outputs, labels) == 0.5
    usage_error(r"recall:7: the classes are 0 to 6", find_metric("recall:7"), outputs, labels)


def test_a_function_of_ones_own_is_a_mean():
    """Of a value of each label, or of each sample; another result is refused, with its shape."""
    metric = find_metric(lambda outputs, labels: abs(outputs - labels) / labels)
    assert metric(OUTPUTS, NUMBERS) == pytest.approx((abs(OUTPUTS - NUMBERS) / NUMBERS).mean())
    rows = find_metric(lambda outputs, labels: abs(outputs - labels).max(axis=1))
    assert rows(OUTPUTS, NUMBERS) == pytest.approx(abs(OUTPUTS - NUMBERS).max(axis=1).mean())
    usage_error("one number", find_metric(lambda outputs, labels: 1.0), OUTPUTS, NUMBERS)
    usage_error(
        "raised ZeroDivisionError in line",
        find_metric(lambda outputs, labels: 1 / 0),
        OUTPUTS,
        NUMBERS,
    )
    usage_error(
        "metric odd: .* raised TypeError", Metric("odd", lambda x, y: [1], lambda s: None), 1, 1
    )
    usage_error("two metrics that are called f1", find_metrics, ["f1", Metric("f1", len, len)])
    assert len(find_metrics(["f1", "f1"])) == 1


def test_what_is_given_twice_is_measured_once():
    def right(outputs, labels):
        return outputs.argmax(axis=1) == labels

    own = Metric("own", lambda outputs, labels: [1], len)
    for given in ("f1", "recall:1", right, own):
        assert len(find_metrics([given, given])) == 1
    usage_error(
        "has two metrics that are called recall",
        find_metrics,
        [replace(own, name="recall"), "recall"],
    )
    usage_error("metrics= None is unknown; give one of accuracy", find_metrics, None)


def test_a_metric_cannot_change_what_others_measure():
    def spoils(outputs, labels):
        outputs += 1
        return labels * 0.0

    states = MetricStates(find_metrics(spoils), SumError("mse"))
    states.add(OUTPUTS, NUMBERS, True)
    assert "read-only" in str(states.failed)
    assert isinstance(states.failed, UsageError)
