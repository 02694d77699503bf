"""The moving average of the weights: by hand, on every layout, through a checkpoint, in a run."""

from functools import partial

import numpy as np
import pytest

import nnmpi
from nnmpi import Layout, NnmpiError, data, models, ops, optim
from nnmpi.commands import evaluate
from nnmpi.train.cli import main as train
from nnmpi.train.metrics import read_metrics
from tests.harness.commands import on_ranks
from tests.worker_options import arranged, grouped

DECAY = 0.6  # updates up to the twelfth keep less
DRAW = np.random.default_rng(0)
SAMPLES = data.Dataset("d", DRAW.normal(size=(160, 6)), DRAW.integers(0, 4, 160), 4)
ADAM, MUON = (partial(kind, eps=1e-3) for kind in (optim.Adam, optim.Muon))
PIPE = {"pp": 2, "split": [3, 3]}


def network():
    return models.mlp((6,), 4, hidden=[8, 8])


def freeze(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name != "1.weight"


def by_hand(make):
    model, average = network().initialize(0, dtype="float64"), {}
    optimizer = make(model.storage, lr=0.02)
    freeze(model)
    for t, batch in enumerate(data.Loader(SAMPLES, 8, dtype="float64").epoch(0), 1):
        model.zero_grad()
        ops.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        keep = min(DECAY, (t - 1) / (t + 8))
        for name, parameter in model.named_parameters():
            average[name] = keep * average.get(name, 0) + (1 - keep) * parameter.data
    return average


def averaged(group, layout, folder=None, **options):
    """Return the average, on rank 0; with a folder, save after 7 batches, or go on from there."""
    options = {"make": ADAM, "lr": 0.02, "dtype": "float64", "ema": DECAY, **options}
    worker = arranged(network(), group, Layout(**layout), **grouped(**options))
    freeze(worker.model)
    micro = {"microbatches": 4, "whole_microbatches": True} if layout.get("reduction") else {}
    loader = data.Loader(SAMPLES, 8, worker.arrangement, dtype="float64", **micro)
    first = nnmpi.resume(folder, worker).get("batch", 0) if folder else 0
    for number, batch in enumerate(loader.epoch(0, first), first + 1):
        worker.step(batch)
        if number % 5 == 0:
            worker.evaluate(loader.epoch(0))
        if folder and number == 7:
            nnmpi.save(folder, worker, batch=7)
            break
    with worker.averaged():
        average = worker.state()[0].to_dict()
    worker.release()
    return average


def apart(ours, theirs):
    return max(float(abs(ours[name] - theirs[name]).max()) for name in theirs)


@pytest.mark.parametrize("make", [ADAM, MUON], ids=["adam", "muon"])
@pytest.mark.parametrize(
    "ranks, layout, options",
    [
        (1, {}, {}),
        (3, {}, {"fused_update": True}),
        (3, {}, {"fused_update": False}),
        (2, {"tp": 2}, {}),
        (4, PIPE, {}),
        (2, {"zero": 1}, {}),
        (3, {"zero": 2}, {}),
        (4, {**PIPE, "zero": 3}, {}),
        (2, {"reduction": "fixed"}, {}),
    ],
)
def test_it_is_that_of_the_serial_run(ranks, layout, options, make):
    """With evaluations on the way, after which the weights go on; a frozen one is its average."""
    if make is MUON and "tp" in layout:
        pytest.skip("Muon needs whole matrices, which are in no block of its update")
    run = partial(averaged, layout=layout, make=make, **options)
    assert apart(nnmpi.simulate(run, ranks)[0], by_hand(make)) < 1e-12


def test_a_resumed_loop_has_its_bits_and_another_layout_its_numbers(tmp_path):
    cut = partial(averaged, layout={}, folder=tmp_path)
    whole, _, again = (nnmpi.simulate(run, 2)[0] for run in (partial(cut, folder=None), cut, cut))
    assert apart(again, whole) == 0
    assert apart(nnmpi.simulate(partial(cut, layout=PIPE), 2)[0], whole) < 1e-12


def test_a_run_is_evaluated_opened_and_resumed_with_it(tmp_path, capsys):
    """The loss of the run's end is that of its predictions, which are not of its last weights."""
    words = "--model mlp --hidden 16 --dtype float64 --epochs 2 --lr 0.02 --ema 0.9"
    on_ranks(train, f"{words} --out {tmp_path}/whole", 2)
    on_ranks(train, f"{words} --stop-after 60 --out {tmp_path}/cut", 2)
    on_ranks(train, f"--resume {tmp_path}/cut", 2)
    whole, cut = (read_metrics(tmp_path / run / "metrics.jsonl") for run in ("whole", "cut"))
    assert whole[-1]["loss"] == cut[-1]["loss"]
    _, test = data.load("digits")
    chance = nnmpi.load(tmp_path / "whole").predict(test.x)[np.arange(len(test)), test.y]
    assert -np.log(chance).mean() == pytest.approx(whole[-1]["loss"])
    capsys.readouterr()
    on_ranks(evaluate.main, [f"{tmp_path}/whole"])
    assert f"{whole[-1]['loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--ema 1", "--ema is 1.0; give a finite number, 0 or more, and below 1"),
        ("--ema 0.9 --sync asp", r"\(ema\) needs ranks in step, not asp"),
        ("--ema 0.9 --pp 2 --pipeline pipedream", r"\(ema\) cannot be combined with"),
    ],
)
def test_it_is_refused_where_ranks_update_apart(words, sentence, tmp_path):
    with pytest.raises(NnmpiError, match=sentence):
        on_ranks(train, f"--model mlp --epochs 1 {words} --out {tmp_path}/run", 2)


def test_ranks_with_other_decays_are_refused():
    with pytest.raises(NnmpiError, match="ema 0"):
        nnmpi.simulate(lambda g: averaged(g, {}, ema=0.5 + g.rank / 10), 2)


def test_blocks_that_share_an_array_of_gradients_are_averaged_one_by_one():
    """What `Optimizer.update` promises to a generator holds with an average, too."""
    weights = [np.zeros(3), np.zeros(3)]
    optimizer = optim.SGD(optim.Arrays(weights, [np.zeros(3), np.zeros(3)]), 1.0)
    optimizer.keep_average(0.5)
    scratch = np.zeros(3)

    def blocks():
        for number, block in enumerate(optimizer.cut(grads=[scratch, scratch]), 1):
            block.grad[...] = number
            yield block

    for _ in range(2):
        optimizer.update(blocks())
    assert [array.tolist() for array in weights] == [[-2.0] * 3, [-4.0] * 3]
    with optimizer.averaged():  # the second update keeps a tenth of the first one's
        np.testing.assert_allclose(weights, [[-1.9] * 3, [-3.8] * 3])
    assert [array.tolist() for array in weights] == [[-2.0] * 3, [-4.0] * 3]
