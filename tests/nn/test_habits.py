"""What people type out of habit works, or is answered in a sentence; what is printed helps."""

import re
import runpy
from collections.abc import Callable

import numpy as np
import pytest

import nnmpi
from nnmpi import data, models, nn, ops, optim
from nnmpi.aliases import INSTEAD
from nnmpi.errors import ShapeError, UsageError
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
    assert repr(nnmpi.Layout(dp=2, pp=3, schedule="gpipe")) == "Layout(dp=2, pp=3, schedule='gpipe')"
    assert repr(nnmpi.Layout()) == "Layout()"

    def say(group: nnmpi.Group) -> str:
        fresh = models.mlp((4,), 3, (5,)).initialize()
        worker = nnmpi.Worker(fresh, optim.SGD(fresh.storage, lr=0.1), group)
        said = repr(worker)
        worker.release()
        return said

    said = "Worker(Sequential of 43 parameters, SGD(lr=0.1, 43 parameters, after 0 steps), rank 1 of 2 ranks)"
    assert nnmpi.simulate(say, 2)[1] == said


def test_what_stands_elsewhere_is_said() -> None:
    """By the name that it has here."""
    model = models.mlp((4,), 3, ()).initialize()
    for name, sentence in (
        ("train", "within a block: with nn.training"),
        ("to", "the backend is chosen once"),
        ("wrong", "wrong'$"),
    ):
        with pytest.raises(AttributeError, match=sentence):
            getattr(model, name)
    with pytest.raises(UsageError, match="give model.storage, or model.parameters()"):
        optim.SGD(list(model.parameters()), lr=0.1)
    with pytest.raises(ShapeError, match="channels come last here"):
        nn.Conv2d(3, 4, 3).initialize()(np.ones((2, 3, 8, 8), np.float32))
    with pytest.raises(UsageError, match="Sequential takes the modules themselves"):
        nn.Sequential([nn.ReLU()])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a Loader takes a data set, not a tuple"):
        data.Loader((np.ones((3, 4)), np.zeros(3)), 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sum got dim and axis, which are one thing"):
        nnmpi.Tensor([1.0]).sum(axis=0, dim=0)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="--learning-rate is not an option; did you mean --lr?"):
        parse(["--learning-rate", "0.1"])


def test_each_answer_names_what_there_is() -> None:
    """Wherever one of PyTorch's names is typed, what is written in its place is told, and is there."""
    for answer in INSTEAD.values():
        for room, name in re.findall(r"\b(nnmpi|nn|ops|optim|data|tensor)\.([A-Za-z]\w*)", answer):
            assert hasattr(nnmpi if room == "nnmpi" else getattr(nnmpi, room), name), answer
    x, model = nnmpi.Tensor([[1.0, 2.0]]), models.mlp((4,), 3, ()).initialize()
    parameter = next(iter(model.parameters()))
    typed = {"zeros": nnmpi, "functional": nn, "lr_scheduler": optim, "DataLoader": data, "cat": ops}
    for name, where in {**typed, "unsqueeze": x, "register_buffer": model, "add_": parameter}.items():
        with pytest.raises(AttributeError, match=re.escape(f"{name!r}; {INSTEAD[name]}")):
            getattr(where, name)
    assert f"{x.sum():.2f} {int(x.sum())} {x.numel()} {parameter.numel()}" == "3.00 3 2 12"


class Net(nn.Module):
    """Written as for PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels=1, out_channels=4, kernel_size=3)
        self.pool = nn.MaxPool2d(kernel_size=2)
        self.normal = nn.ModuleList([nn.BatchNorm2d(num_features=4)])
        self.out = nn.Linear(in_features=36, out_features=3)
        self.drop = nn.Dropout(p=0.1)
        self.scale = nn.Parameter(np.full(3, 2.0))

    def forward(self, x: nnmpi.Tensor) -> nnmpi.Tensor:
        x = self.normal[0](self.pool(self.conv(x)))
        x = self.drop(x.view(x.shape[0], -1))
        return self.out(x) * self.scale


def test_what_is_written_for_pytorch_computes_the_same() -> None:
    """Arguments, layers, states, optimizers and loops by PyTorch's names do what ours do by their own."""
    model, other = Net(), Net().initialize(seed=0)
    optimizer = optim.SGD(model.parameters(), lr=0.1)  # the model has its values now
    assert optimizer.storage is model.storage
    criterion, draw = nn.CrossEntropyLoss(), np.random.default_rng(0)
    sets = data.Dataset("mine", draw.normal(size=(10, 8, 8, 1)).astype(np.float32), np.arange(10) % 3, 3)
    loader = data.Loader(sets, batch_size=4)
    assert len(loader) == 3
    for epoch in range(2):
        for (x, y), same in zip(loader, loader.epoch(epoch), strict=True):
            assert (x == same.x).all()
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    other.load_state_dict(model.state_dict())
    assert (other(x).numpy() == model(x).numpy()).all() and model.state_dict()["scale"].shape == (3,)
    assert (Net().initialize().state_dict()["scale"] == 2).all()
    assert (
        nn.Parameter([2.0, 0.5, 0.5]).shape == (3,) and nn.Linear(2, 3).weight.numel() == 6
    )  # before there are values
    assert nnmpi.Tensor([[1.0, 2.0]]).argmax(dim=1, keepdim=True).shape == (1, 1)  # type: ignore[call-arg]
    assert nn.Parameter([2, 3]).shape == nn.Parameter((2, 3)).shape == (2, 3)  # type: ignore[arg-type]
    tensor = nnmpi.Tensor(np.arange(6.0).reshape(1, 2, 3))
    assert tensor.permute(0, 2, 1).view(6).numpy().tolist() == [0, 3, 1, 4, 2, 5]
    assert tensor.sum(dim=-1, keepdim=True).shape == (1, 2, 1)  # type: ignore[call-arg]
    assert tensor.argmax(dim=-1).tolist() == [[2, 2]]  # type: ignore[call-arg]
    assert np.allclose(ops.softmax(tensor, dim=1).sum(axis=1).numpy(), 1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("loss", "operation"),
    [
        (nn.MSELoss(), ops.mse),
        (nn.L1Loss("sum"), lambda x, y: ops.mae(x, y, "sum")),
        (nn.HuberLoss(delta=0.5), lambda x, y: ops.huber(x, y, delta=0.5)),
        (nn.BCEWithLogitsLoss(reduction="none"), lambda x, y: ops.binary_cross_entropy(x, y, "none")),
    ],
)
def test_losses_are_modules_too(loss: nn.Module, operation: Callable[..., nnmpi.Tensor]) -> None:
    """And give what the operations give."""
    x, y = nnmpi.Tensor([[0.5, -2.0, 3.0]]), np.array([[0.1, 0.9, 0.3]], np.float32)
    assert (loss(x, y).numpy() == operation(x, y).numpy()).all()


def test_the_package_lists_its_product(capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing else; `python -m nnmpi` lists the commands."""
    assert dir(nnmpi) == sorted([*nnmpi.__all__, "__version__"])
    assert all(hasattr(nnmpi, name) for name in dir(nnmpi))
    runpy.run_module("nnmpi", run_name="__main__")
    assert "python -m nnmpi.evaluate" in capsys.readouterr().out
