"""What people type out of habit works, or is answered in a sentence; what is printed helps."""

import runpy

import numpy as np
import pytest

import nnmpi
from nnmpi import data, models, nn, optim
from nnmpi.errors import UsageError
from nnmpi.train.cli import parse

TREE = """\
Sequential      41 parameters
|  0  Flatten
|  1  Linear    20  weight (4, 4), bias (4,)
|  2  ReLU
|  3  Linear    15  weight (4, 3), bias (3,)
|  4  BatchNorm  6  weight (3,), bias (3,), running_mean (3,), running_variance (3,)"""


def test_a_model_is_printed_as_a_tree() -> None:
    """With or without values: the kinds, the shapes and how many parameters."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3), nn.BatchNorm(3))
    assert [line.split() for line in repr(model).splitlines()] == [line.split() for line in TREE.splitlines()]
    assert repr(model) == repr(model.initialize())


def test_a_state_brings_its_values() -> None:
    """Also to a model that has none yet, in its dtype."""
    first = models.mlp((4,), 3, (5,)).initialize(seed=3, dtype="float64")
    second = models.mlp((4,), 3, (5,))
    second.load_state(first.state())
    x = np.ones((2, 4))
    assert (first(x).numpy() == second(x).numpy()).all()


def test_reprs_say_what_it_is() -> None:
    """Without a number of the data."""
    train, _ = data.load("iris")
    model = models.mlp((4,), 3, (5,)).initialize()
    assert repr(train) == "Dataset(iris: 120 samples of 4, float32, 3 classes)"
    assert repr(data.Loader(train, 50)) == "Loader(iris: 3 batches of 50, part of rank 0 of 1)"
    assert repr(optim.SGD(model.storage, lr=0.1)) == "SGD(lr=0.1, 43 parameters, after 0 steps)"
    for x, y in data.Loader(train, 50).epoch(0):
        assert len(x) == len(y)


def test_what_stands_elsewhere_is_said() -> None:
    """By the name that it has here."""
    train, _ = data.load("iris")
    model = models.mlp((4,), 3, ()).initialize()
    for name, sentence in (
        ("train", "training is a block"),
        ("to", "the backend is chosen once"),
        ("wrong", "wrong'$"),
    ):
        with pytest.raises(AttributeError, match=sentence):
            getattr(model, name)
    with pytest.raises(UsageError, match="give model.storage, not its parameters"):
        optim.SGD(model.parameters(), lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Sequential takes the modules themselves"):
        nn.Sequential([nn.ReLU()])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="for x, y in loader.epoch"):
        list(data.Loader(train, 50))
    with pytest.raises(UsageError, match="--learning-rate is not an option; did you mean --lr?"):
        parse(["--learning-rate", "0.1"])


def test_the_package_lists_its_product(capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing else; `python -m nnmpi` lists the commands."""
    assert dir(nnmpi) == sorted([*nnmpi.__all__, "__version__"])
    assert all(hasattr(nnmpi, name) for name in dir(nnmpi))
    runpy.run_module("nnmpi", run_name="__main__")
    assert "python -m nnmpi.evaluate" in capsys.readouterr().out
