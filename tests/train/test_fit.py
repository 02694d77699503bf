"""`nnmpi.fit`: the command's loop for a program's model and data, in every layout, begun again."""

import os
import signal
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import nnmpi
from nnmpi import Layout, StopTraining, fit, simulate
from nnmpi.base.errors import NnmpiError, UsageError
from nnmpi.base.files import read_json
from nnmpi.comm.fit import parse_network
from nnmpi.data import Dataset, Loader, load
from nnmpi.models import mlp
from nnmpi.ops import cross_entropy
from nnmpi.optim import Adam, Cosine, ReduceOnPlateau
from nnmpi.train.cli import main
from nnmpi.train.metrics import read_metrics
from tests.harness.refusals import usage_error
from tests.harness.slow import once_more

X = np.random.default_rng(0).random((53, 6)).astype("float32")
Y = (X.sum(axis=1) > 3).astype(int) + (X[:, 0] > 0.8)
TRAIN, TEST = (X, Y), (X[:21], Y[:21])


def build():
    return mlp((6,), 3, hidden=[8, 8], dropout=0.1)


def fitted(model=None, **options):
    usual = {"epochs": 3, "batch_size": 10, "lr": 0.01, "quiet": True}
    return fit(model or build(), TRAIN, TEST, **usual | options)


def alone(function):
    """Call a function on one simulated rank, which needs no MPI."""
    return simulate(lambda group: function(), 1)[0]


def same(one, other):
    """Return whether two results have the same bits."""
    mine, theirs = one.model.state(), other.model.state()
    return one.history == other.history and all(
        np.array_equal(mine[name], theirs[name]) for name in mine
    )


LAYOUTS = {
    "dp 2": (2, None),
    "dp 3": (3, None),
    "pp 2": (2, Layout(pp=2)),
    "tp 2": (2, Layout(tp=2)),
    "zero 3": (3, Layout(zero=3)),
    "pp 2 x dp 2": (4, Layout(pp=2, dp=2)),
    "fixed": (2, Layout(reduction="fixed")),
    "zero 1": (2, Layout(zero=1)),
}


@pytest.mark.parametrize("name", [*list(LAYOUTS)[:5], *map(once_more, list(LAYOUTS)[5:])])
def test_layouts_and_resumed_runs_equal_the_serial_run(name, tmp_path):
    def program(group, layout, **options):
        result = fitted(layout=layout, keep_best=True, dtype="float64", **options)
        values = [*result.history.values(), result.predict(X[:5]), [result.evaluate().loss]]
        result.release()
        return [np.array(value, float) for value in values], result.best_step

    ranks, layout = LAYOUTS[name]
    ((expected, best_step),) = simulate(partial(program, layout=None), 1)
    folder = {"checkpoint": tmp_path / "run"}
    simulate(partial(program, layout=layout, epochs=2, **folder), ranks)
    for values, step in simulate(partial(program, layout=layout, **folder), ranks):
        assert step == best_step
        for value, want in zip(values, expected, strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-9)


@pytest.mark.parametrize("zero", [1, 2])
def test_values_that_are_set_reach_the_parts_that_other_nodes_update(zero, tmp_path):
    """ZeRO's ranks on other nodes, or on devices, have copies of weights that others update."""

    def program(group, **options):
        result = fitted(layout=Layout(zero=zero), group=group, **options)
        return result.model.state()

    nodes = {"machine": parse_network("alpha_us=1,gbit=10", 2)}
    whole = simulate(program, 2, **nodes)
    folder = {"checkpoint": tmp_path / "run"}
    simulate(partial(program, epochs=2, **folder), 2, **nodes)
    for mine, theirs in zip(simulate(partial(program, **folder), 2, **nodes), whole, strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def test_equals_a_loop_by_hand_and_the_command(tmp_path):
    train, test = load("iris")

    def by_hand(group):
        model = mlp((4,), 3, [16]).initialize(seed=0)
        worker = nnmpi.Worker(model, Adam(model.storage, lr=0.02), group)
        loader, held_out = Loader(train, 32, group), Loader(test, 30, group, shuffle=False)
        for epoch in range(3):
            for batch in loader.epoch(epoch):
                worker.step(batch)
        loss = worker.evaluate(held_out.epoch(0)).loss
        return model.state(), loss

    def in_one_call(group):
        model = mlp((4,), 3, [16])
        result = fit(model, train, test, epochs=3, optimizer=partial(Adam, lr=0.02), quiet=True)
        return result.model.state(), result.history["test_loss"][-1]

    for (mine, loss), (theirs, their_loss) in zip(
        simulate(in_one_call, 2), simulate(by_hand, 2), strict=True
    ):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
        assert loss == pytest.approx(their_loss, rel=1e-6)

    words = "--dataset iris --model mlp --hidden 16 --epochs 3 --early-stopping 2 --quiet --out"
    simulate(lambda group: main([*words.split(), str(tmp_path / "run")], group), 1)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    options = {"epochs": 3, "schedule": "cosine", "normalize": True, "early_stopping": 2}
    result = alone(lambda: fit(mlp((4,), 3, [16]), train, test, quiet=True, **options))
    losses = [line["loss"] for line in lines if line["kind"] == "eval"]
    assert result.history["test_loss"] == losses


def test_goes_on_where_it_was_interrupted(tmp_path):
    whole = alone(partial(fitted, callbacks=lambda moment: None))

    def interrupt(moment):
        if moment.step == 6:
            os.kill(os.getpid(), signal.SIGINT)

    group = simulate(lambda group: group, 1)[0]  # a signal is the main thread's
    model, folder = build(), tmp_path / "run"
    with pytest.raises(NnmpiError, match=r"stopped by SIGINT .*nnmpi.fit\(..., checkpoint='.*'\)"):
        fitted(model, callbacks=interrupt, checkpoint=folder, group=group)
    assert same(fitted(checkpoint=folder, group=group), whole)
    assert same(fitted(checkpoint=folder, group=group), whole)  # and once more, to no effect
    fitted(model, group=group, epochs=1)  # the interrupted model can be trained again
    usage_error(
        "checkpoint .*: the run has batch_size 10, which cannot change to batch_size 11",
        lambda: alone(partial(fitted, checkpoint=folder, batch_size=11)),
    )
    for call in (
        lambda: nnmpi.load(folder),
        lambda: alone(lambda: main(["--resume", str(folder)], nnmpi.start())),
    ):
        usage_error(r"is a run of nnmpi.fit, .* call nnmpi.fit\(..., checkpoint=", call)
    assert read_json(folder / "config.json")["model"] == "program:Sequential"


def test_callbacks_see_the_model_and_change_the_rate(tmp_path):
    def halve(moment):
        assert moment.history["step"][-1] == moment.step
        moment.lr /= 2

    def program(group):
        fitted(callbacks=halve, checkpoint=tmp_path / "run", epochs=2)
        return fitted(callbacks=halve, checkpoint=tmp_path / "run")

    whole = alone(partial(fitted, callbacks=[halve]))
    assert whole.history["learning_rate"] == [0.01, 0.005, 0.0025]
    assert same(simulate(program, 1)[0], whole)

    def stop(moment):
        raise StopTraining

    assert alone(partial(fitted, callbacks=stop)).stopped == "as callback stop asked"

    def differ(group):
        def differing(moment):
            moment.lr = 0.1 * (group.rank + 1)

        fitted(callbacks=differing)

    usage_error(
        "callback differing set the learning rate to 0.1 on rank 0 and 0.2 on rank 1",
        lambda: simulate(differ, 2),
    )
    with pytest.raises(NnmpiError, match=r"broken\(moment\) raised KeyError in line [0-9]+ of"):

        def broken(moment):
            return {}["x"]

        alone(partial(fitted, callbacks=broken))

    def rename(moment):
        moment.learning_rate = 0.1  # which would change nothing

    with pytest.raises(NnmpiError, match=r"rename\(moment\) raised AttributeError"):
        alone(partial(fitted, callbacks=rename))


def test_one_after_another_and_in_one_another():
    whole, inner = alone(fitted), []
    assert same(alone(partial(fitted, callbacks=lambda moment: inner.append(fitted()))), whole)
    assert len(inner) == 3 and all(same(item, whole) for item in inner)

    def twice(group):
        model = build()
        first, second = fitted(model), fitted(model)
        return first.history["loss"][-1] > second.history["loss"][-1]

    assert simulate(twice, 2) == [True, True]

    def within(model):
        fitted(model, callbacks=lambda moment: fitted(model))

    usage_error("another nnmpi.fit is training this model", lambda: alone(lambda: within(build())))

    def parts(group):
        model = build()
        fitted(model, layout=Layout(pp=2)), fitted(model, layout=Layout(pp=2))

    usage_error("the ranks have parts of this model", lambda: simulate(parts, 2))


def test_the_best_weights_and_averages_are_the_models():
    result = alone(partial(fitted, keep_best=True, lr=0.3, epochs=12))
    best = result.history["step"].index(result.best_step)
    assert result.best_step < result.step
    assert alone(result.evaluate).accuracy == result.history["test_accuracy"][best]
    average = alone(partial(fitted, ema=0.9))
    assert alone(average.evaluate).loss == pytest.approx(average.history["test_loss"][-1])


def test_own_losses_metrics_and_quantities():
    def double(logits, labels):
        return cross_entropy(logits, labels, reduction="none") * 2

    def thrice(logits, labels):
        return 3.0 * (logits.argmax(axis=1) == labels)

    result = alone(partial(fitted, loss=double, metrics=["f1", thrice]))
    evaluated = alone(result.evaluate)
    assert evaluated.loss == pytest.approx(result.history["test_loss"][-1])
    assert evaluated.metrics["thrice"] == pytest.approx(3 * evaluated.metrics["accuracy"])
    numbers = (X, X.sum(axis=1))
    call = partial(fit, mlp((6,), 1), numbers, numbers, loss="mse", normalize=True, quiet=True)
    result = alone(partial(call, epochs=30))
    assert np.abs(alone(lambda: result.predict(X)) - numbers[1]).max() < 1
    assert alone(result.evaluate).metrics["rmse"] == pytest.approx(result.history["test_rmse"][-1])


HABITS = [
    {"freeze": "1.*,4.bias"},
    {"schedule": "plateau:1,0.5", "lr": 0.1, "epochs": 6},
    {"schedule": "restarts:1,2", "balance": True},
]


@pytest.mark.parametrize("options", HABITS)
def test_what_is_frozen_and_what_rates_do_is_alike_in_layouts_and_on_resume(options, tmp_path):
    def program(group, **more):
        result = fitted(dtype="float64", **{**options, **more})
        values = [*result.history.values(), result.predict(X[:5])]
        result.release()
        return [np.array(value, float) for value in values]

    ((*expected,),) = simulate(program, 1)
    for layout in (Layout(pp=2), Layout(tp=2), Layout(zero=3)):
        for values in simulate(partial(program, layout=layout), 2):
            for value, want in zip(values, expected, strict=True):
                np.testing.assert_allclose(value, want, rtol=1e-9)
    if options.get("schedule") == "plateau:1,0.5":
        options = {**options, "checkpoint": tmp_path / "run", "warmup_epochs": 0}
        whole = alone(partial(fitted, **{**options, "checkpoint": None}))
        alone(partial(fitted, **{**options, "epochs": 4}))
        assert same(alone(partial(fitted, **options)), whole)
        rates = whole.history["learning_rate"]
        assert rates[0] == 0.1 and rates[-1] < 0.1


def test_a_time_ends_the_training_and_freezing_is_of_one():
    result = alone(partial(fitted, max_time="1s", epochs=1_000_000))
    assert result.stopped == "as --max-time is over" and 0 < result.step < 1_000_000
    assert result.history["test_loss"][-1] is not None

    def twice():
        model = build()
        fitted(model, freeze="1.*")
        first = model.state()["1.weight"]
        initial = build().initialize(seed=0).state()["1.weight"]
        fitted(model)
        return first, initial, model.state()["1.weight"]

    first, initial, second = alone(twice)
    assert np.array_equal(first, initial) and not np.array_equal(first, second)


REFUSED = {
    "freeze x. fits no parameter; they are called 1.weight": {"freeze": "x*"},
    "freeze leaves nothing to train": {"freeze": "*"},
    "schedule plateau counts evaluations": {"schedule": "plateau", "eval_every": 0},
    "schedule is plateau:0.5,1; give evaluations and": {"schedule": "plateau:0.5,1"},
    "schedule is restarts:2,0.5; give epochs and a growth": {"schedule": "restarts:2,0.5"},
    "max_time is '3 weeks'; it must be a time such as": {"max_time": "3 weeks"},
    "momentun is not an option; did you mean momentum": {"momentun": 0.9},
    r"pp is a Layout's: give .*layout=nnmpi.Layout\(pp=": {"pp": 2},
    "nnmpi plan finds the fastest one": {"layout": "auto"},
    r"weights belong to the samples: .*\(x, y, weights\)": {"sample_weight": Y},
    "stratify is of a split": {"stratify": True},
    "label_smoothing is for loss cross-entropy": {"loss": "mse", "label_smoothing": 0.1},
    "schedule is ReduceOnPlateau; give a name such as": {"schedule": ReduceOnPlateau(0.1)},
    "trace is written into a run's folder; give checkpoint": {"trace": True},
    "epochs is 0": {"epochs": 0},
    "hidden is not an option": {"hidden": [3]},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused_in_a_sentence(sentence):
    usage_error(sentence, lambda: alone(partial(fitted, **REFUSED[sentence])))


def test_refused_objects():
    def with_optimizer():
        fitted(optimizer=Adam(build().initialize().storage))

    usage_error("optimizer is Adam; give a name, or what makes one", alone, with_optimizer)
    loader = Loader(Dataset("mine", X, Y, 3), 5)
    usage_error("train is Loader; give a data.Dataset", alone, lambda: fit(build(), loader, TEST))
    rates = alone(partial(fitted, schedule=Cosine(0.01, 18))).history["learning_rate"]
    assert rates[-1] == Cosine(0.01, 18)(17)


def test_a_notebook_shows_a_table_and_curves(monkeypatch, capsys):
    shown = []
    handle = SimpleNamespace(update=shown.append)
    display = SimpleNamespace(
        HTML=str, display=lambda text, display_id=False: shown.append(text) or handle
    )
    kernel = SimpleNamespace(kernel=None)
    module = SimpleNamespace(get_ipython=lambda: kernel, display=display)
    monkeypatch.setitem(sys.modules, "IPython", module)
    result = alone(partial(fitted, quiet=False))
    assert [text.count("<tr>") for text in shown] == [0, 2, 3, 4, 4, 0]
    assert "test_loss" in shown[-2] and shown[-1].count("<polyline") == 4
    assert result._repr_html_() == shown[-2] + shown[-1]
    assert capsys.readouterr().out == ""


def test_a_model_with_values_goes_on_from_them():
    def program(group, layout=None):
        model = build()
        if layout is not None or group.size == 1:
            model.initialize(seed=0)
        return fitted(model, layout=layout).history["loss"]

    ((expected,),) = [simulate(program, 1)]
    for losses in simulate(partial(program, layout=Layout(zero=3)), 2):
        assert losses == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UsageError, match="has its values already, and .* leave initialize"):
        simulate(partial(program, layout=Layout(pp=2)), 2)
