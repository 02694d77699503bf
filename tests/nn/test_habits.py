"""What people type out of habit works, or is answered in a sentence; what is printed helps."""

import re
import runpy
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import nnmpi
from nnmpi import data, models, nn, ops, optim
from nnmpi.aliases import INSTEAD
from nnmpi.errors import DataError, GraphError, ShapeError, UsageError
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


def test_size_is_numpys_and_pytorchs() -> None:
    x = nnmpi.Tensor(np.ones((2, 3)))
    assert (x.size, x.size(), x.size(0), x.size(-1)) == (6, (2, 3), 2, 3)
    assert x.view(x.size(0), -1).shape == (2, 3)


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
    with pytest.raises(UsageError, match=r"Sequential takes modules, such as nn.ReLU\(\), not <function relu"):
        nn.Sequential(nn.Flatten(), ops.relu)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="decay by weight_decay={"):
        optim.AdamW([{"params": list(model.parameters()), "weight_decay": 0.1}])  # type: ignore[arg-type]
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
    typed: dict[str, Any] = {"zeros": nnmpi, "functional": nn, "lr_scheduler": optim, "DataLoader": data, "cat": ops}
    optimizer = optim.SGD(model.storage, lr=0.1)
    group = nnmpi.simulate(lambda group: group, 1)[0]
    typed |= {"allreduce": group, "Get_rank": group, "fit": nnmpi.Worker(model, optimizer, group)}
    typed |= {"normal_": nn.init, "tril": nnmpi, "param_groups": optimizer, "state_dict": optimizer}
    for name, where in {**typed, "unsqueeze": x, "register_buffer": model, "add_": parameter}.items():
        with pytest.raises(AttributeError, match=re.escape(f"{name!r}; {INSTEAD[name]}")):
            getattr(where, name)
    for make, name in (
        (optim.AdamW, "amsgrad"),
        (optim.SGD, "foreach"),
        (nn.BCEWithLogitsLoss, "pos_weight"),
        (nn.Embedding, "padding_idx"),
        (nn.CrossEntropyLoss, "weight"),
        (ops.cross_entropy, "weight"),
        (optim.SGD, "dampening"),
    ):
        with pytest.raises(TypeError, match=re.escape(f"{make.__name__} has no argument {name!r}; {INSTEAD[name]}")):
            make(**{name: 1})
    for line, name in (
        ("import nnmpi.nn.functional as F", "functional"),
        ("from nnmpi.nn import functional as F", "functional"),
        ("from nnmpi.utils.data import random_split", "utils"),
        ("from nnmpi.parallel import DistributedDataParallel", "DistributedDataParallel"),
    ):
        with pytest.raises(ModuleNotFoundError, match=re.escape(f"{name!r}; {INSTEAD[name]}")):
            exec(line)
    with pytest.raises(ImportError, match="^cannot import name 'LSTM' from 'nnmpi.data'"):
        exec("from nnmpi.data import LSTM")
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
            with nn.training(step=optimizer.steps):
                loss = criterion(model(x), y)
            loss.backward()
            norm = optim.clip_by_global_norm(model.parameters(), 1e-3)  # type: ignore[arg-type]
            assert 0.99e-3 < optim.clip_by_global_norm(model.storage.grads, 1.0) < 1e-3 < norm
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


def test_a_loss_computed_in_evaluation_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence at the line of backward, where dropout or batch normalization is in it and nobody has said so."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    x, y = np.ones((6, 4), np.float32), np.arange(6) % 3

    def loss(*layers: nn.Module) -> nnmpi.Tensor:
        return nn.CrossEntropyLoss()(nn.Sequential(nn.Linear(4, 3), *layers).initialize()(x), y)

    for layer in (nn.Dropout(), nn.BatchNorm(3)):
        with pytest.warns(UserWarning, match=r"compute the loss within `with nn.training\(step=") as told:
            loss(layer).backward()
        assert [each.filename for each in told] == [__file__]
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


def test_arguments_of_pytorch_are_answered() -> None:
    """Taken where they say something here, and else told what to write."""
    typed: Any = nnmpi
    model = typed.nn.Sequential(typed.nn.Linear(4, 3)).initialize()
    optimizer = typed.optim.SGD(model.storage, lr=0.1)
    calls: dict[str, Callable[[], object]] = {
        "ReLU has no argument 'inplace'; leave it out": lambda: typed.nn.ReLU(inplace=True),
        "ReLU takes no arguments; leave True out: no operation changes": lambda: typed.nn.ReLU(True),
        "Flatten takes no arguments; leave 1 out": lambda: typed.nn.Flatten(1),
        "Dropout has no argument 'inplace'; leave it out": lambda: typed.nn.Dropout(0.1, inplace=True),
        "Tensor.max has no argument 'dim'; x.ndim; of max an axis: x.max(1) has the values": lambda: typed.Tensor(
            [[1.0]]
        ).max(dim=1),
        "LSTM has no argument 'batch_first'; leave it out: x is (batch, time, features), and h all": lambda: (
            typed.nn.LSTM(4, 4, batch_first=True)
        ),
        "Optimizer.zero_grad has no argument 'set_to_none'; leave": lambda: optimizer.zero_grad(set_to_none=True),
        "Module.zero_grad has no argument 'set_to_none'; leave": lambda: model.zero_grad(set_to_none=True),
        "Loader has no argument 'pin_memory'; the backend": lambda: typed.data.Loader(None, 4, pin_memory=True),
        "nnmpi.tensor is a package; nnmpi.Tensor(values) makes a tensor": lambda: typed.tensor([1.0]),
        "LSTM has no argument 'bias'; leave it out: the layer has": lambda: typed.nn.LSTM(3, 4, bias=False),
        "LSTM has no argument 'proj_size'; it takes inputs, features, layers and bidirectional": lambda: typed.nn.LSTM(
            3, 4, proj_size=2
        ),
        "BatchNorm has no argument 'affine'; leave it out: the layer": lambda: typed.nn.BatchNorm2d(3, affine=False),
        "MaxPool2d has no argument 'ceil_mode'; leave it": lambda: typed.nn.MaxPool2d(2, ceil_mode=True),
        "LeakyReLU takes 1 positional argument, slope; leave the others": lambda: typed.nn.LeakyReLU(0.1, True),
        "Conv2d has no argument 'padding_mode'; leave it": lambda: typed.nn.Conv2d(1, 1, 3, padding_mode="reflect"),
        "relu has no argument 'inplace'; leave it out": lambda: typed.ops.relu(x, inplace=True),
        "dropout has no argument 'training'; outside of nn.training()": lambda: typed.ops.dropout(
            x, 0.1, training=True
        ),
        "scaled_dot_product_attention takes 3 positional arguments, q, k, v, and causal by name": lambda: (
            typed.ops.scaled_dot_product_attention(*[typed.Tensor(heads[0])] * 3, np.ones((4, 4), bool))
        ),
        "scaled_dot_product_attention has no argument 'attn_mask'; causal=True is": lambda: (
            typed.ops.scaled_dot_product_attention(*[typed.Tensor(heads[0])] * 3, attn_mask=np.ones((4, 4), bool))
        ),
        "sum has no argument 'out'; leave it out": lambda: np.sum(x, out=np.ones(())),  # type: ignore[call-overload]
        "sum has no argument 'axes'; it takes axis, keepdims": lambda: typed.Tensor([1.0]).sum(axes=None),
    }
    heads, x = np.random.default_rng(0).random((3, 1, 2, 4, 5), np.float32), nnmpi.Tensor([1.0, 2.0])
    for sentence, call in calls.items():
        with pytest.raises(TypeError, match=re.escape(sentence)):
            call()
    wrong: dict[str, Callable[[], object]] = {
        "Linear's inputs is '3'; give a whole number of at least 1": lambda: typed.nn.Linear("3", 4),
        "Linear's outputs is 4.0; give a whole number of at least 1": lambda: typed.nn.Linear(3, 4.0),
        "Embedding's entries is 0; give": lambda: typed.nn.Embedding(0, 4),
        "Conv2d's inputs is '3'; give": lambda: typed.nn.Conv2d("3", 4, 3),
        "LSTM's layers is 1.0; give": lambda: typed.nn.LSTM(3, 4, 1.0),
        "BatchNorm's channels is '3'; give": lambda: typed.nn.BatchNorm2d("3"),
        "BatchNorm's momentum is None and": lambda: typed.nn.BatchNorm2d(3, momentum=None),
        "LayerNorm's features is 0; give": lambda: typed.nn.LayerNorm([2, 0]),
        "batch_size is '4'; give a whole number of at least 1": lambda: typed.data.Loader(None, "4"),
        "classes is '2'; give a whole number of at least 0": lambda: typed.data.Dataset("a", heads[0], heads[0], "2"),
        "betas are 0.9; give two numbers such as (0.9, 0.999)": lambda: typed.optim.Adam(model.storage, betas=0.9),
        "dropout needs a key, from which the mask is drawn, not None; a layer brings its own: self.drop": lambda: (
            typed.ops.dropout(x, p=0.1)
        ),
        "reduction is one of mean, sum, none, and no array; to weigh": lambda: typed.nn.CrossEntropyLoss(np.ones(3)),
        "reduction 'average' is unknown": lambda: typed.nn.MSELoss("average"),
    }
    for sentence, call in wrong.items():
        with pytest.raises(UsageError, match=re.escape(sentence)):
            call()
    with pytest.raises(UsageError, match="split takes a data set, not a ndarray; make one"):
        typed.data.split(heads[0], 0.2)
    with pytest.raises(DataError, match=r"a: samples are a list and labels a list; give arrays"):
        typed.data.Dataset("a", [[1.0]], [1], 2)
    for loss in (ops.cross_entropy, ops.binary_cross_entropy):
        with pytest.raises(GraphError, match=r"needs a Tensor, not ndarray; wrap the array in nnmpi.Tensor"):
            loss(cast(Any, np.ones((2, 3))), np.array([0, 1]))
    row, label = nnmpi.Tensor([[1.0, 2.0]]), np.array([1])
    assert typed.ops.cross_entropy(input=row, target=label, weight=None).item() == ops.cross_entropy(row, label).item()
    with pytest.raises(UsageError, match=r"h, state = lstm.with_state\(x, state\)"):
        typed.nn.LSTM(4, 4).initialize()(np.ones((2, 3, 4), np.float32), (None, None))
    image = nnmpi.Tensor(np.ones((2, 7, 6, 1), np.float32))
    conv = typed.nn.Conv2d(1, 3, kernel_size=(3, 5), padding="same", dilation=(2, 1)).initialize()
    assert conv(image).shape == (2, 7, 6, 3) and conv.padding == (2, 2)
    assert (
        typed.ops.max_pool2d(image, kernel_size=2).shape
        == typed.ops.avg_pool2d(image, kernel_size=2).shape
        == (2, 3, 3, 1)
    )
    masked = typed.ops.scaled_dot_product_attention(*map(typed.Tensor, heads), is_causal=True).numpy()
    assert np.allclose(masked[:, :, 0], heads[2][:, :, 0]) and not np.allclose(masked[:, :, 1], heads[2][:, :, 1])
    rows, lengths = heads[0, 0], np.array([4, 2])
    lstm = typed.nn.LSTM(5, 3).initialize()
    assert (lstm(rows, lengths=lengths).numpy() == lstm(rows, lengths).numpy()).all()
    for kernel, stride in ((4, 1), (3, 2)):
        with pytest.raises(UsageError, match='padding="same" needs an odd kernel and a stride of 1'):
            typed.nn.Conv2d(1, 3, kernel, stride, padding="same")


def test_what_is_no_pair_is_not_unpacked() -> None:
    """PyTorch's `h, _ = lstm(x)` of two samples would name the rows; to go over the rows is fine."""
    x, lstm = nnmpi.Tensor(np.arange(12, dtype=np.float32).reshape(2, 3, 2)), nn.LSTM(2, 4).initialize()
    for result in (lstm(x), x.max(1), x.min(axis=1)):
        with pytest.raises(UsageError, match=r"no pair: values = x.max\(1\), .* h, state = lstm.with_state\(x\)"):
            first, second = result
        assert [row.shape for row in result] == [row.shape for row in [*result]] == [result.shape[1:]] * 2
        (first, *rest) = result
        assert first.shape == rest[0].shape == result.shape[1:]
    first, second = x
    _, (h, c) = lstm.with_state(x)
    assert first.shape == second.shape == (3, 2) and h.shape == c.shape == (1, 2, 4)


def test_numpy_reads_a_tensor() -> None:
    """As numbers, not as an array of objects; where that would end a graph it is refused."""
    x = nnmpi.Tensor([1.0, 2.0])
    assert np.asarray(x).dtype == np.float32 and np.array(x, float).tolist() == [1.0, 2.0]
    assert np.stack([x, x]).dtype == np.float32 and np.mean([x.sum(), x.max()]) == 2.5
    x.requires_grad = True
    for ours, theirs in ((x.max(), np.max(x)), (x.min(0), np.min(x, axis=0)), (x.mean(), np.mean(x))):  # type: ignore[call-overload]
        assert isinstance(theirs, nnmpi.Tensor) and theirs.item() == ours.item() and theirs.requires_grad
    assert np.argmax(x) == 1 and np.var(x, ddof=1).item() == 0.5 and np.clip(x, 0, 1).requires_grad  # type: ignore[call-overload]
    assert np.array([x.sum(), x.sum()]).tolist() == [3.0, 3.0]
    with pytest.raises(GraphError, match=r"becomes an array by x.numpy\(\)"):
        np.stack([x, x])
    with pytest.raises(UsageError, match=r"nnmpi.tensor.stack and concatenate"):
        nnmpi.Tensor([x.sum(), x.sum()])


def test_a_parameter_is_not_replaced_by_an_array() -> None:
    """Which would compute, and not be trained."""
    layer: Any = nn.Linear(2, 3)
    with pytest.raises(UsageError, match=r"written by weight.data\[...\] = values"):
        layer.weight = np.zeros((2, 3), np.float32)
    layer.initialize().weight.data[...] = 0
    layer.scale = np.ones(3)
    layer.scale = np.zeros(3)  # no parameter
    assert (layer(np.ones((1, 2), np.float32)).numpy() == layer.bias.data).all() and not layer.scale.any()


def test_places_of_arguments_are_those_of_pytorch() -> None:
    """Or they have none: a number is not taken for something else."""
    layer = nn.BatchNorm(4, 1e-3, 0.01)
    assert (layer.eps, layer.momentum) == (1e-3, 0.01)
    model, typed = nn.Linear(4, 3).initialize(), dict[str, Any](SGD=optim.SGD, LSTM=nn.LSTM)
    for call in (lambda: typed["SGD"](model.storage, 0.1, 0.9, 1e-4), lambda: typed["LSTM"](4, 4, 1, False)):
        with pytest.raises(TypeError, match="positional arguments"):
            call()
    with pytest.raises(UsageError, match="reduction is one of mean, sum, none, and no array"):
        ops.cross_entropy(nnmpi.Tensor([[1.0, 2.0]]), np.array([0]), cast(Any, np.ones(2)))


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
