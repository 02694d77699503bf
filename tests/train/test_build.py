"""Options reach the parts that they are for."""

import numpy as np
import pytest

from nnmpi import Tensor, simulate
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.errors import UsageError
from nnmpi.base.files import read_json
from nnmpi.comm.mesh import Mesh
from nnmpi.data import Dataset, Loader, Normalize
from nnmpi.optim import SGD, Adam, AdamW, Muon
from nnmpi.train import build
from nnmpi.train.checkpoint import Extent
from nnmpi.train.cli import main, parse
from nnmpi.train.config import (
    Config,
    ExchangeConfig,
    ModelConfig,
    NumericsConfig,
    OptimizationConfig,
    ParallelConfig,
    RunConfig,
    assemble,
)
from nnmpi.train.derived import count_microbatches
from nnmpi.train.inputs import load_inputs


def shapes(config, sample_shape):
    model = build.build_model(config, sample_shape, 10).initialize()
    return [
        parameter.data.shape for _, parameter in model.named_parameters() if parameter.data.ndim > 1
    ]


def test_hidden_widths_make_the_layers():
    assert shapes(ModelConfig(model="mlp", hidden=(5, 6)), (4,)) == [(4, 5), (5, 6), (6, 10)]
    assert shapes(ModelConfig(model="mlp", hidden=()), (8, 8, 1)) == [(64, 10)]
    cnn = [(3, 3, 1, 32), (3, 3, 32, 64), (3136, 128), (128, 64), (64, 10)]
    assert shapes(ModelConfig(), (28, 28, 1)) == cnn
    assert shapes(ModelConfig(hidden=(7,)), (28, 28, 1)) == [*cnn[:2], (3136, 7), (7, 10)]
    assert len(shapes(ModelConfig(model="resnet"), (8, 8, 3))) > 7


def test_optimizers_get_their_options():
    storage = build.build_model(ModelConfig(model="mlp"), (4,), 3).initialize().storage
    sgd = build.build_optimizer(
        OptimizationConfig(optimizer="sgd", lr=0.5, momentum=0.9, weight_decay=0.1), storage
    )
    assert isinstance(sgd, SGD)
    assert (sgd.lr, sgd.momentum, sgd.weight_decay) == (0.5, 0.9, (0.1,))
    adamw = build.build_optimizer(OptimizationConfig(optimizer="adamw"), storage)
    assert isinstance(adamw, AdamW)
    assert adamw.weight_decay == (0.01,)
    adam = build.build_optimizer(OptimizationConfig(optimizer="adam"), storage)
    assert isinstance(adam, Adam)
    assert adam.weight_decay == (0.0,)
    for momentum, expected in ((None, 0.95), (0.0, 0.0), (0.5, 0.5)):
        options = OptimizationConfig(optimizer="muon", momentum=momentum)
        muon = build.build_optimizer(options, storage)
        assert isinstance(muon, Muon)
        assert muon.momentum == expected


def test_the_worker_gets_its_options(group, monkeypatch):
    given = {}
    monkeypatch.setattr(build, "Worker", lambda *_, **options: given.update(options))
    inputs = load_inputs(Config(), group, lambda _: None, Mesh())

    def options(config):
        model = build.build_full_model(config, inputs.train, numpy_backend(), group)
        build.build_trainer(config, model, group, inputs, numpy_backend())
        return given

    plain = dict(options(Config()))
    assert plain["exchange"] == ExchangeConfig()
    assert (plain["numerics"].clip, plain["seed"]) == (None, 0)

    other = options(
        Config(
            optimization=OptimizationConfig(label_smoothing=0.5),
            numerics=NumericsConfig(clip=2.0),
            parallel=ParallelConfig(allreduce="tree"),
            run=RunConfig(seed=7),
        )
    )
    assert other["exchange"] == ExchangeConfig("tree")
    assert (other["numerics"].clip, other["seed"]) == (2.0, 7)
    logits, labels = Tensor(np.array([[5.0, 0.0, -5.0]])), np.array([0])
    assert (
        other["loss"](logits, labels).item() > 1 > other["evaluation_loss"](logits, labels).item()
    )


def test_the_loaders_get_their_options(group):
    def inputs(**options):
        return load_inputs(assemble(options), group, lambda _: None, Mesh())

    plain = inputs()
    assert (plain.batch_size, plain.train_loader.shuffle, plain.test_loader.shuffle) == (
        32,
        True,
        False,
    )
    assert (plain.train_loader.microbatches, plain.train_loader.dtype) == (1, "float32")
    other = inputs(
        batch_size="full",
        microbatches=3,
        dtype="float64",
        seed=5,
        augment="shift-flip",
        test_fraction=0.5,
    )
    assert (other.batch_size, other.train_loader.batches_per_epoch, len(other.test)) == (
        899,
        1,
        898,
    )
    assert (other.train_loader.microbatches, other.test_loader.microbatches) == (3, 1)
    assert (other.train_loader.dtype, other.train_loader.seed) == ("float64", 5)
    names = [type(transform).__name__ for transform in other.train_loader.transform.transforms]
    assert names == ["Shift", "Flip", "Normalize"]
    assert [type(transform).__name__ for transform in other.test_loader.transform.transforms] == [
        "Normalize"
    ]
    assert inputs(normalize=False).train_loader.transform is None
    assert inputs(batch_size=5000).batch_size == 1438


@pytest.mark.parametrize("dataset", ["iris", "digits"])
def test_a_small_set_is_made_input_once_with_the_bits_of_its_batches(group, dataset):
    def inputs(**options):
        return load_inputs(
            assemble({"dataset": dataset, "model": "mlp", **options}), group, lambda _: None, Mesh()
        )

    each_time = inputs(dtype="float64")  # data sets hold float32
    assert each_time.train_loader.dataset is each_time.train
    once = inputs()
    normalize = Normalize.fit(once.train)
    for result, loader in ((once.train, once.train_loader), (once.test, once.test_loader)):
        assert loader.transform is None
        options = {"shuffle": loader.shuffle, "transform": normalize, "workers": 0}
        expected = Loader(result, loader.batch_size, **options)
        for ours, theirs in zip(loader.epoch(1), expected.epoch(1), strict=True):
            assert ours.x.tobytes() == theirs.x.tobytes()
            assert ours.x.dtype == theirs.x.dtype
            np.testing.assert_array_equal(ours.y, theirs.y)
    if dataset == "digits":
        augmented = inputs(augment="shift")
        assert augmented.train_loader.transform is not None
        assert augmented.test_loader.transform is None


def test_a_fixed_order_has_the_same_microbatches_under_every_layout():
    """Or it would not have the same bits."""
    for options, stages, expected in (
        ({}, 1, 1),
        ({}, 2, 8),
        ({"reduction": "fixed"}, 1, 16),
        ({"reduction": "fixed"}, 8, 16),
        ({"reduction": "fixed", "microbatches": 6}, 8, 6),
    ):
        assert count_microbatches(assemble(options), stages, 32) == expected
    assert count_microbatches(assemble({"reduction": "fixed"}), 2, 5) == 5


def test_the_run_is_as_long_as_epochs_or_steps_say(group):
    inputs = load_inputs(Config(), group, lambda _: None, Mesh())
    assert build.build_extent(OptimizationConfig(epochs=3), inputs) == Extent(3, 135, 45, 12, 135)
    assert build.build_extent(OptimizationConfig(epochs=3, max_steps=50), inputs).steps == 50
    assert build.build_extent(OptimizationConfig(epochs=3, max_steps=500), inputs).steps == 135
    short = OptimizationConfig(epochs=3, max_steps=50, stop_after=20)
    extent = build.build_extent(short, inputs)
    assert (extent.steps, extent.stop, build.warmup_steps(short, extent)) == (50, 20, 5)
    rate = build.build_schedule(short, extent)
    assert rate(5) == short.lr and 0 < rate(49) < 0.01 * short.lr and rate(50) == 0


def test_ranks_of_one_process_load_each_data_set_that_they_are_asked_for():
    """They have one between them: that of the options given, not of those before."""

    def program(group):
        iris, digits = (assemble({"dataset": name, "model": "mlp"}) for name in ("iris", "digits"))
        first, second, third = (
            load_inputs(item, group, lambda _: None, Mesh(dp=2)) for item in (iris, digits, iris)
        )
        assert (len(first.train), len(second.train)) == (120, 1438)
        assert first.signature.sample_shape != second.signature.sample_shape
        assert third.train is first.train

    simulate(program, ranks=2)


def test_weights_of_the_classes():
    train = Dataset("t", np.zeros((9, 2)), np.array([0] * 4 + [1] * 2 + [2] * 3), 3)
    assert build.weigh("balanced", train).tolist() == [0.75, 1.5, 1.0]
    assert build.weigh((0, 2, 5), train).tolist() == [0, 2, 5]
    numbers = Dataset("t", np.zeros((2, 2)), np.array([0.5, 1.5]), 0)
    for weights, samples, text in (
        ((1, 2), train, "--class-weights 1 2: the data have 3 classes; give one number for each"),
        ((0, 0, 0), train, "not only zeros"),
        ("balanced", numbers, "is for classes, which the data have not"),
    ):
        with pytest.raises(UsageError, match=text):
            build.weigh(weights, samples)
    assert parse(["--class-weights", "1", "0.5,2e3"]).optimization.class_weights == (1, 0.5, 2000)
    for wrong in ("1 a", "1 nan", "inf 1", "-0.5 1"):
        with pytest.raises(UsageError, match="--class-weights is"):
            parse(["--class-weights", *wrong.split()])


def test_class_weights_are_the_same_in_every_layout(tmp_path):
    words = "--model mlp --dataset iris --dtype float64 --epochs 1 --quiet --label-smoothing 0.1"
    found = []
    for more in ("", "--pp 2", "--tp 2", "--zero 1", "--reduction fixed", "unweighted"):
        weighted = "" if more == "unweighted" else f"--class-weights 1 4.75 0 {more}"
        out = tmp_path / str(len(found))
        command = f"{words} {weighted} --out {out}".split()
        simulate(lambda group, given=command: main(given, group), 2 if found else 1)
        found.append(read_json(out / "finished.json")["loss"])
    assert (
        found[:-1] == pytest.approx(found[:1] * 5, rel=1e-12) and abs(found[-1] - found[0]) > 0.01
    )
