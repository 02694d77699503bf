"""A model whose parts change between steps: trained, measured and saved as it is, or refused.

Every layout is given every change, and compared with one rank that trains the same model.
"""

from functools import cache

import numpy as np
import pytest

import nnmpi
from nnmpi import GradientExchange, Layout, data, nn, ops, optim
from nnmpi.base.errors import NnmpiError, UsageError
from nnmpi.compose.inference import Inference
from tests.harness.refusals import usage_error

pytestmark = pytest.mark.host_only("the layers that are added have values of the host")

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(8, 4)), DRAW.integers(0, 3, 8)
SAMPLES = data.Dataset("d", X, Y, 3)
STEPS, CHANGED_AT = 7, 5  # passes are replayed by then


class Block(nn.Module):
    """A user's module: one layer of the chain, whose own parts may change."""

    replayable = True

    def __init__(self):
        self.first = nn.Linear(6, 6)
        self.act = nn.Tanh()
        self.rest = [nn.Linear(6, 6), nn.Tanh()]
        self.places = [None]
        self.by_name = {"act": nn.Tanh()}
        self._last = nn.Tanh()

    def forward(self, x):
        x = self.by_name["act"](self.act(self.first(x)))
        for layer in [*self.rest, *self.places, getattr(self, "_last", None)]:
            x = x if layer is None else layer(x)
        return x


def network():
    model = nn.Sequential(
        *(nn.Linear(4, 6), nn.Tanh()),
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.0)),
        nn.Residual(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)),
        nn.BatchNorm(6),
        Block(),
        *(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)),
    )
    model.sharding = {"6": nn.Sharding.COLUMN, "8": nn.Sharding.ROW}
    return model


def put(place, make, of=lambda model: model.layers):
    """Return the change that puts a new module into a list."""

    def change(model):
        of(model)[place] = make()

    return change


def write(path, name, value):
    """Return the change that writes an attribute of the module at a path."""
    return lambda model: setattr(model.get(path), name, value())


def forget_last(model):
    del model.get("5")._last


def dropouts(model):
    """Two of them, whose masks differ by their names."""
    block = model.get("5")
    block.act, block.rest[1] = nn.Dropout(0.4), nn.Dropout(0.4)


def tie(model):
    model.get("2.0").weight = model.get("6").weight


def swap(model):
    model.layers[6], model.layers[2].layers[0] = model.layers[2].layers[0], model.layers[6]


def new_norm(model):
    old, norm = model.get("4"), nn.BatchNorm(6)
    norm.weight, norm.bias = old.weight, old.bias
    model.layers[4] = norm


def freeze(*paths):
    def change(model):
        for path in paths:
            for parameter in model.get(path).parameters():
                parameter.requires_grad = False

    return change


CHANGES = {
    "nothing": lambda model: None,
    "replaced": put(1, nn.SiLU),
    "replaced by name": lambda model: model.replace("7", nn.SiLU()),
    "another list": lambda model: setattr(
        model, "layers", [*model.layers[:7], nn.SiLU(), model.layers[8]]
    ),
    "nested": put(1, nn.SiLU, lambda model: model.layers[2].layers),
    "appended": lambda model: model.layers.append(nn.Tanh()),
    "inserted": lambda model: model.layers.insert(1, nn.SiLU()),
    "deleted": lambda model: model.layers.pop(6),
    "no shortcut": write("3", "shortcut", lambda: None),
    "another rate": write("2.2", "p", lambda: 0.4),
    "another forward": write("2", "forward", lambda: ops.relu),
    "an attribute": write("5", "act", nn.SiLU),
    "a function": write("5", "act", lambda: ops.relu),
    "a hidden one": write("5", "_last", lambda: None),
    "no attribute": forget_last,
    "in a user's list": put(1, nn.SiLU, lambda model: model.get("5").rest),
    "in a list of places": put(0, nn.SiLU, lambda model: model.get("5").places),
    "twice": lambda model: model.get("5").places.append(model.get("5").first),
    "in a dictionary": put("act", nn.SiLU, lambda model: model.get("5").by_name),
    "dropouts": dropouts,
    "deleted from a user's": lambda model: model.get("5").rest.pop(0),
    "tied": tie,
    "swapped": swap,
    "another parameter": write("6", "weight", lambda: nn.Parameter(np.ones((6, 6)))),
    "another layer": put(6, lambda: nn.Linear(6, 6)),
    "another norm": new_norm,
    "frozen": freeze("0", "6"),
    "frozen to the middle": freeze("0", "2", "3", "4", "5"),
}
SEPARATE = {"exchange": GradientExchange(fused_update=False, overlap=True, bucket_bytes=64)}
LAYOUTS = {
    "fused": (2, {}, {}),
    "dp": (2, {}, SEPARATE),
    "zero 1": (2, {"zero": 1}, {}),
    "zero 2": (2, {"zero": 2}, {}),
    "zero 3": (2, {"zero": 3}, {"exchange": GradientExchange(allreduce="ring")}),
    "pp": (2, {"pp": 2, "split": (6, 8)}, {}),
    "tp": (2, {"tp": 2}, {}),
    "least": (1, {"activation_memory": "least"}, {}),
    "planned": (2, {"activation_memory": 2**20}, {}),
}


def trained(group, layout, options, change):
    """Return losses, an evaluation, predictions and weights; the change comes between two steps."""
    full = network()
    where = nnmpi.arrange(full, group, Layout(**layout), X)
    model = where.model.initialize(seed=0, dtype="float64", storage=where.storage)
    sgd = optim.SGD(model.storage, lr=0.3)
    worker = nnmpi.Worker(model, sgd, group, arrangement=where, **options)
    loader = data.Loader(SAMPLES, 8, where, shuffle=False, dtype="float64")
    losses = []
    for step in range(STEPS):
        if step == CHANGED_AT:
            change(full)
        losses += [worker.step(batch).loss for batch in loader.epoch(step)]
    losses.append(worker.evaluate(loader.epoch(0)).loss)
    outputs = Inference(where, worker.backend)(X) if layout.get("zero", 0) < 3 else 0
    return losses, outputs, worker.state()[0].to_dict()


@cache
def serial(change):
    """Return the result of a change on one rank, or its error; made once."""
    try:
        return nnmpi.simulate(lambda group: trained(group, {}, {}, CHANGES[change]), 1)[0]
    except UsageError as error:
        return error


@pytest.mark.filterwarnings("ignore:a parameter of shape")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_changed_model_is_trained_as_it_is_or_refused(name, change):
    ranks, layout, options = LAYOUTS[name]
    expected = serial(change)
    try:
        result = nnmpi.simulate(lambda g: trained(g, layout, options, CHANGES[change]), ranks)[0]
    except NnmpiError as error:
        assert change != "nothing"
        if name in ("dp", "fused") and change != "another norm":
            assert isinstance(expected, Exception), error
        return
    assert not isinstance(expected, Exception)
    losses, outputs, weights = result
    assert losses == pytest.approx(expected[0], rel=1e-9)
    if layout.get("zero", 0) < 3:
        np.testing.assert_allclose(outputs, expected[1], rtol=1e-9)
    assert [*weights] == [*expected[2]]
    for key, array in weights.items():
        np.testing.assert_allclose(array, expected[2][key], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", ["zero 2", "pp", "least"])
@pytest.mark.parametrize("asked", ["step", "evaluate", "predict", "state", "save", "make"])
def test_whoever_asks_first_is_refused(name, asked, tmp_path):
    """Also a Worker of a model that changed after it was arranged."""
    ranks, layout, _ = LAYOUTS[name]

    def program(group):
        full = network()
        where = nnmpi.arrange(full, group, Layout(**layout), X)
        model = where.model.initialize(seed=0, dtype="float64", storage=where.storage)
        sgd = optim.SGD(model.storage, lr=0.3)
        if asked == "make" and name != "least":  # which is planned by the first step
            full.layers[1] = nn.SiLU()
        worker = nnmpi.Worker(model, sgd, group, arrangement=where)
        predict = Inference(where, worker.backend)
        loader = data.Loader(SAMPLES, 8, where, shuffle=False, dtype="float64")
        (batch,) = loader.epoch(0)
        worker.step(batch)
        calls = {
            "step": lambda: worker.step(batch),
            "evaluate": lambda: worker.evaluate(loader.epoch(0)),
            "predict": lambda: predict(X),
            "state": worker.state,
            "save": lambda: nnmpi.save(tmp_path, worker),
        }
        full.layers[1] = nn.SiLU()
        for call in [calls.get(asked, calls["step"])] * 2:
            usage_error(r"layer 1 \(Tanh\) is now layer 1 \(SiLU\)", call)
        raise UsageError("layer 1 (Tanh) is now layer 1 (SiLU)")

    with pytest.raises(UsageError, match=r"layer 1 \(Tanh\) is now layer 1 \(SiLU\)"):
        nnmpi.simulate(program, ranks)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("change", ["replaced", "tied", "an attribute", "another norm", "deleted"])
def test_a_loop_of_ones_own_trains_the_model_as_it_is_or_is_refused(stage, change):
    """ZeRO 2 and 3 compute by the units into which they have cut the model."""

    def program(group):
        model = network().initialize(seed=0, dtype="float64")
        parallel = (
            nnmpi.ShardedDataParallel(model, group, stage)
            if stage
            else nnmpi.DataParallel(model, group)
        )
        optimizer = optim.SGD(model.storage, lr=0.3)
        mine, losses = slice(4 * group.rank, 4 * group.rank + 4), []
        x = SAMPLES.x[mine].astype("float64")
        for step in range(STEPS):
            if step == CHANGED_AT:
                CHANGES[change](model)
                if stage > 1 and change != "an attribute":
                    usage_error("changed since it was divided|is new in the model", model, x)
            with nn.training(seed=0, step=step):
                loss = ops.cross_entropy(model(x), Y[mine], reduction="sum")
            model.zero_grad()
            parallel.backward(loss, 8)
            optimizer.step()
            losses.append(group.sum_floats([loss.item()])[0] / 8)
        return losses

    try:
        losses = nnmpi.simulate(program, 2)[0]
    except UsageError as error:
        assert stage > 1 or "4 (BatchNorm) is new in the model" in f"{error}"
        return
    assert losses == pytest.approx(serial(change)[0][:-1], rel=1e-9)


@pytest.mark.parametrize("change", ["inserted", "deleted", "tied", "appended"])
def test_a_changed_model_is_saved_by_its_names_of_now(change, tmp_path):
    """One that is built so from the start goes on with it."""

    def program(group, changed):
        model = network()
        if changed:
            CHANGES[change](model)
        model.initialize(seed=0, dtype="float64")
        worker = nnmpi.Worker(model, optim.Adam(model.storage, lr=0.01), group)
        loader = data.Loader(SAMPLES, 8, group, shuffle=False, dtype="float64")
        if changed:
            assert nnmpi.resume(tmp_path, worker) == {"epoch": 2}
        else:
            for epoch in range(2):
                if epoch:
                    CHANGES[change](model)
                worker.step(*loader.epoch(epoch))
            nnmpi.save(tmp_path, worker, epoch=2)
        return worker.step(*loader.epoch(2)).loss, worker.evaluate(loader.epoch(0)).loss

    before = nnmpi.simulate(lambda group: program(group, False), 2)[0]
    assert nnmpi.simulate(lambda group: program(group, True), 2)[0] == pytest.approx(before)
