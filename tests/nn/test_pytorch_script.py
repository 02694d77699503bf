"""A script written for PyTorch, wrong arguments, and what is printed."""

import re
import warnings
from typing import Any, cast

import numpy as np
import pytest

import nnmpi
from nnmpi import data, models, nn, ops, optim
from nnmpi.base.errors import DeviceError, GraphError, ShapeError, UsageError
from tests.device.here import on_device
from tests.harness.refusals import refuses, usage_error


def test_reprs_say_what_it_is():
    """Without a number of the data."""
    train, _ = data.load("iris")
    model = models.mlp((4,), 3, (5,)).initialize()
    assert repr(train) == "Dataset(iris: 120 samples of 4, float32, 3 classes)"
    assert repr(data.Loader(train, 50)) == "Loader(iris: 3 batches of 50, part of rank 0 of 1)"
    assert repr(optim.SGD(model.storage, lr=0.1)) == "SGD(lr=0.1, 43 parameters, after 0 steps)"
    for x, y in data.Loader(train, 50).epoch(0):
        assert len(x) == len(y)
    assert (
        repr(nnmpi.Layout(dp=2, pp=3, pipeline="gpipe")) == "Layout(dp=2, pp=3, pipeline='gpipe')"
    )
    assert repr(nnmpi.Layout()) == "Layout()"


class Net(nn.Module):
    """Written as for PyTorch."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(in_channels=1, out_channels=4, kernel_size=3)
        self.pool = nn.MaxPool2d(kernel_size=2)
        self.normal = nn.ModuleList([nn.BatchNorm2d(num_features=4)])
        self.out = nn.Linear(in_features=36, out_features=3)
        self.drop = nn.Dropout(p=0.1)
        self.scale = nn.Parameter(np.full(3, 2.0))

    def forward(self, x):
        x = self.normal[0](self.pool(self.conv(x)))
        x = self.drop(x.view(x.shape[0], -1))
        return self.out(x) * self.scale

    @property
    def depth(self):
        return self.layres


def test_what_is_written_for_pytorch_computes_the_same():
    """Arguments, layers, states, optimizers and loops by PyTorch's names do what ours do by their
    own.
    """
    model, other = Net(), Net().initialize(seed=0)
    optimizer = optim.SGD(model.parameters(), lr=0.1)  # the model has its values now
    assert optimizer.storage is model.storage
    criterion, draw = nn.CrossEntropyLoss(), np.random.default_rng(0)
    sets = data.Dataset(
        "mine", draw.normal(size=(10, 8, 8, 1)).astype(np.float32), np.arange(10) % 3, 3
    )
    loader = data.Loader(sets, batch_size=4)
    assert len(loader) == 3
    for epoch in range(2):
        for (x, y), same in zip(loader, loader.epoch(epoch), strict=True):
            assert (x == same.x).all()
            optimizer.zero_grad()
            with nn.training(step=optimizer.steps):
                loss = criterion(model(x), y)
            loss.backward()
            norm = optim.clip_by_global_norm(model.parameters(), 1e-3)
            assert 0.99e-3 < optim.clip_by_global_norm(model.storage.grads, 1.0) < 1e-3 < norm
            optimizer.step()
    other.load_state_dict(model.state_dict())
    without = Net()
    # a state brings its values, also to a model that has none yet
    without.load_state_dict(model.state_dict())
    assert (without(x).numpy() == model(x).numpy()).all()
    assert (other(x).numpy() == model(x).numpy()).all() and model.state_dict()["scale"].shape == (
        3,
    )
    assert (Net().initialize().state_dict()["scale"] == 2).all()
    assert nn.Parameter([2.0, 0.5, 0.5]).shape == (3,) and nn.Linear(2, 3).weight.size == 6
    assert nn.Parameter([2, 3], nn.Normal(1)).shape == (2, 3)
    tensor = nnmpi.Tensor(np.arange(6.0).reshape(1, 2, 3))
    assert tensor.permute(0, 2, 1).view(6).numpy().tolist() == [0, 3, 1, 4, 2, 5]


def test_a_loss_computed_in_evaluation_warns(monkeypatch):
    """In one sentence at the line of backward, where dropout or batch normalization is in it and
    nobody has said so.
    """
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    x, y = np.ones((6, 4), np.float32), np.arange(6) % 3

    def loss(*layers):
        return nn.CrossEntropyLoss()(nn.Sequential(nn.Linear(4, 3), *layers).initialize()(x), y)

    for layer in (nn.Dropout(), nn.BatchNorm(3)):
        with pytest.warns(
            UserWarning, match=r"compute the loss within `with nn.training\(step="
        ) as text:
            loss(layer).backward()
        assert [item.filename for item in text] == [__file__]
        (loss() + loss(layer) * 0).detach()  # what nobody asks a gradient of
        with warnings.catch_warnings(action="error"):
            for mode in (nn.training(), nn.evaluation()):
                with mode:
                    value = loss(layer)
                value.backward()
            loss(nn.Dropout(0.0)).backward()
    with pytest.warns(UserWarning):
        (loss() + loss(nn.Dropout())).backward()  # of two graphs that meet
    step = nnmpi.compile(lambda x: loss(nn.Dropout(0.3)).backward())
    with pytest.warns(UserWarning):
        step(nnmpi.Tensor(x))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with warnings.catch_warnings(action="error"):
        loss(nn.Dropout()).backward()  # one rank warns for all


def test_wrong_arguments_are_refused_by_name():
    """The sentence names the argument as the signature does."""
    typed = nnmpi
    x, model = nnmpi.Tensor([1.0, 2.0]), models.mlp((4,), 3, ()).initialize()
    calls = {
        "in_features": lambda: typed.nn.Linear("3", 4),
        "in_channels": lambda: typed.nn.Conv2d("3", 4, 3),
        "num_layers": lambda: typed.nn.LSTM(3, 4, 1.0),
        "num_features": lambda: typed.nn.BatchNorm2d("3"),
        "momentum is None": lambda: typed.nn.BatchNorm2d(3, momentum=None),
        "batch_size": lambda: typed.data.Loader(data.load("iris")[0], "4"),
        "classes": lambda: typed.data.Dataset("a", np.ones((2, 1)), np.ones(2), "2"),
        "betas": lambda: typed.optim.Adam(model.storage, betas=0.9),
        "model.storage, or model.parameters": lambda: typed.optim.SGD(list(model.parameters()), 1),
        "dropout needs a key": lambda: typed.ops.dropout(x, p=0.1),
        "argument of their own: weight=": lambda: typed.ops.cross_entropy(x, 0, np.ones(3)),
        "state is a pair: h, c = cell": lambda: typed.nn.LSTMCell(3, 2)(x[None], x[None]),
        "weight has shape (3,); give one for each of 2": lambda: typed.ops.cross_entropy(
            x[None], np.array([1]), weight=[1, 2, 3]
        ),
        "one or three whole numbers, not (1, 2)": lambda: typed.nn.Conv3d(2, 2, (1, 2)),
        "nonlinearity is 'tanh' or 'relu', not 'gelu'": lambda: typed.nn.RNN(2, 2, 1, "gelu"),
        "several values of each channel": lambda: typed.nn.InstanceNorm2d(2)(x.reshape(1, 1, 2)),
        "MaxPool1d needs (batch, time, channels)": lambda: typed.nn.MaxPool1d(2)(x),
        "Conv1d needs (batch, time, channels)": lambda: nn.Conv1d(3, 4, 2)(x),
        "a cell needs (batch, features)": lambda: nn.GRUCell(3, 4)(x[0]),
        "give reduction='sum' by its name": lambda: typed.nn.CrossEntropyLoss("sum"),
        "reduction 'average'": lambda: typed.nn.MSELoss("average"),
        "needs a stride of 1, not 2": lambda: typed.nn.Conv2d(1, 3, 4, 2, padding="same"),
        "features cannot have 4 heads": lambda: typed.nn.CausalSelfAttention(6, 4),
        "cannot have 2 groups": lambda: typed.nn.Conv2d(3, 4, 3, groups=2),
        "stride must be": lambda: typed.nn.Conv2d(3, 4, 3, stride=0),
        "p is 1.0; give a number": lambda: typed.nn.Dropout(1.0),
        "p is '0.5'; give a number": lambda: typed.nn.Dropout("0.5"),
        "eps is '1e-5'; give a number": lambda: typed.nn.LayerNorm(3, "1e-5"),
        "lr is '0.1'; give a number": lambda: typed.optim.Cosine("0.1", 5),
        "(1.0, -1) are no sizes or axes; give whole numbers": lambda: x.view(len(x) / 2, -1),
        "init is 'normal'; give a function": lambda: typed.nn.Linear(4, 2, init="normal"),
        "heads is '2'": lambda: typed.nn.MultiheadAttention(4, "2"),
        "hidden is '8'": lambda: typed.nn.TransformerBlock(4, 2, "8"),
        "ranks is '2'; give a whole": lambda: typed.simulate(print, "2"),
        **({} if on_device() else {"[0, 1], not 1.0 to 2.0": lambda: typed.nn.BCELoss()(x, x)}),
        "max_norm is '1'": lambda: typed.optim.clip_by_global_norm([np.ones(3)], "1"),
        "'swish' is unknown": lambda: typed.nn.activation("swish"),
        "with_state": lambda: typed.nn.LSTM(4, 4)(np.ones((2, 3, 4), np.float32), (None, None)),
        "takes modules": lambda: nn.Sequential(nn.Flatten(), ops.relu),
        "split takes a data set": lambda: typed.data.split(np.ones(3), 0.2),
        "load_text(data.TextSource(path)), after": lambda: typed.data.load_text("paradise-lost"),
        "a masked array has gaps": lambda: typed.data.Dataset("m", np.ma.ones((1, 1)), [0], 1),
        "epoch is 'a'; give": lambda: typed.data.Loader(data.load("iris")[0], 9).epoch("a"),
        "steps is 5; give whole numbers": lambda: typed.optim.MultiStep(0.1, 5),
        "takes model.parameters()": lambda: typed.optim.clip_by_global_norm([nnmpi.Tensor(1)], 1),
        "seed is 'a'; give a whole number": lambda: nn.Linear(1, 1).initialize(cast(Any, "a")),
    }
    for words, call in calls.items():
        refuses((UsageError, ShapeError), re.escape(words), call)
    for owner, name, told in (
        (nnmpi, "Workr", "did you mean 'Worker'"),
        (nnmpi, "manual_seed", r"in nnmpi: model.initialize\(seed=0\)"),
        (nn.ReLU(), "train", "with nnmpi.nn.training"),
        (nnmpi.Tensor(1), "unsqueeze", r"in nnmpi: x\[None\]"),
        (nnmpi.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), "state_dict", "nnmpi.save and"),
        (nnmpi.Tensor(1), "lost(", r"no attribute 'lost\('$"),
        (Net(), "depth", "no attribute 'layres'"),
        (Net(), "norm", "no attribute 'norm'$"),
    ):
        refuses(AttributeError, told, getattr, owner, name)
    refuses(
        DeviceError,
        "elements do not fit into memory; make the model",
        lambda: nn.Linear(10**30, 1).initialize(),
    )
    refuses(
        GraphError,
        "needs a Tensor, not ndarray",
        lambda: ops.cross_entropy(cast(Any, np.ones((2, 3))), np.array([0, 1])),
    )


def test_a_parameter_is_not_replaced_by_values():
    """Which would compute, and not be trained."""
    layer = type("Mine", (nn.Linear,), {})(2, 3)
    for values in (np.zeros((2, 3), np.float32), nnmpi.Tensor(np.zeros((2, 3), np.float32))):
        with pytest.raises(UsageError, match=r"write its values by weight.data\[...\] = values"):
            layer.weight = values
    layer.initialize().weight.data[...] = 0
    layer.scale = np.ones(3)
    layer.scale = np.zeros(3)  # no parameter
    assert (
        layer(np.ones((1, 2), np.float32)).numpy() == layer.bias.data
    ).all() and not layer.scale.any()


def test_a_parameter_of_several_axes_needs_initial_values():
    """Two layers of zeros behind one another have no gradients."""
    usage_error(r"shape \(64, 32\) would begin with zeros.*give init", nn.Parameter, (64, 32))
    assert nn.Parameter((32,)).init is not None
    assert nn.Parameter((2, 2), nn.Constant(0)).shape == nn.Parameter(np.zeros((2, 2))).shape
