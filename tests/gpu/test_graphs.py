"""Steps on a device are recorded as graphs: their bits, what they contain, and what ends them."""

import gc

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, Worker, models, nn, ops, optim
from nnmpi.base.errors import UsageError
from nnmpi.compose.replayed import Replay
from nnmpi.ops.attention import KeyValues
from nnmpi.ops.loss import CrossEntropy
from nnmpi.tensor import Function
from tests.gpu.conftest import is_stand_in
from tests.gpu.play import FLOAT64, MODES, TOLERANCES, differences, precise

WIDE = 1024  # features; one row of numbers for dropout is as long
MODELS = {
    # The rows of batch statistics are freed before dropout reads its key: none may lie where the
    # key does.
    "normalized and dropped": (
        lambda: nn.Sequential(
            nn.Linear(6, WIDE), nn.BatchNorm1d(WIDE), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDE, 5)
        ),
        (3, 6),
    ),
    "dropped twice": (
        lambda: nn.Sequential(
            nn.Linear(6, 7), nn.Dropout(0.3), nn.Linear(7, 7), nn.Dropout(0.5), nn.Linear(7, 5)
        ),
        (3, 6),
    ),
    "convolved": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, 1, 1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.GlobalAvgPool2d(),
            nn.Linear(4, 5),
        ),
        (3, 5, 5, 3),
    ),
    "attended": (
        lambda: nn.Sequential(nn.TransformerBlock(8, 2, 9, 0.2), nn.Linear(8, 5)),
        (3, 4, 8),
    ),
    "recurrent": (lambda: Last(nn.LSTM(6, 7), nn.Linear(7, 5)), (3, 4, 6)),
    "gated": (lambda: Last(nn.GRU(6, 7), nn.Linear(7, 5)), (3, 4, 6)),
}


class Last(nn.Module):
    """A recurrent layer, and a layer over its last time."""

    replayable = True

    def __init__(self, layer, end):
        self.layer, self.end = layer, end

    def forward(self, x):
        return self.end(self.layer(x)[:, -1])


class Step:
    """A step of AdamW on a device."""

    def __init__(self, name, device, compiled):
        build, shape = MODELS[name]
        draw = np.random.default_rng(1)
        x = draw.standard_normal(shape).astype("float32")
        y = draw.integers(0, 5, shape[:1] if name != "attended" else shape[:2])
        self.x, self.y = (Tensor(device.asarray(values)) for values in (x, y))
        self.model = build().initialize(seed=2, backend=device)
        self.optimizer = optim.AdamW(self.model.storage, lr=0.01)
        self.run = nnmpi.compile(self.loop) if compiled else self.loop

    def loop(self, x, y):
        self.model.zero_grad()
        loss = ops.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def course(self, mode, steps=5):
        """Return the losses of some steps, at a rate of their own each."""
        losses = []
        for step in range(steps):
            self.optimizer.lr = 0.01 / (step + 1)
            with precise(mode), nn.training(seed=3, step=step):
                losses.append(self.run(self.x, self.y).item())
        return losses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_launches_have_the_eager_bits(device, name, mode):
    """Rates and keys differ from step to step."""
    eager, launched = (Step(name, device, compiled) for compiled in (False, True))
    assert launched.course(mode) == eager.course(mode)
    assert launched.run.recordings == 1 and not launched.run.refusal
    for key, values in eager.model.state().items():
        assert np.array_equal(launched.model.state()[key], values), key


def test_a_step_is_one_graph_and_the_update(device):
    """What Python notes ends no graph."""
    step = Step("normalized and dropped", device, True)
    step.course("float32", 3)
    calls = step.run._held.popitem()[1].recorder.calls
    kinds = [type(call.function).__name__ for call in calls]
    # forward and backward, and the empty rest after the update; the stand-in looks at the labels
    assert kinds.count("Segment") == 2 + is_stand_in(device)


def test_clipping_is_in_the_graph(device):
    """The host does not wait for the norm; some steps are clipped, some are not."""
    draw, found = np.random.default_rng(1), []
    x, y = (
        device.asarray(values)
        for values in (draw.standard_normal((6, 6)).astype("float32"), draw.integers(0, 5, 6))
    )
    for compiled in (False, True):
        model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5))
        optimizer = optim.AdamW(model.initialize(seed=2, backend=device).storage, lr=0.1)
        norms = []

        def eager(x, y, model=model, optimizer=optimizer, norms=norms):
            model.zero_grad()
            loss = ops.cross_entropy(model(x), y)
            loss.backward()
            norm = optim.clip_by_global_norm(model.parameters(), 0.47)
            if nnmpi.backend.recording.active() is None:
                norms.append(norm)
            optimizer.step()
            return loss

        step = nnmpi.compile(eager) if compiled else eager
        found.append([step(Tensor(x), Tensor(y)).item() for _ in range(7)])
        if not compiled:
            assert 0 < sum(norm > 0.47 for norm in norms) < 7
    assert found[0] == found[1]
    kinds = [type(call.function).__name__ for call in step._held.popitem()[1].recorder.calls]
    assert kinds.count("Segment") <= 3 + is_stand_in(device)  # before and behind the update


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["gpt", "lstm"])
def test_a_token_is_one_graph(device, kind, mode, monkeypatch):
    """With the eager bits, however many tokens came before; a full cache is captured anew."""
    monkeypatch.setattr(KeyValues, "LEAST", 4)
    here, there = (
        models.gpt(19, 20, features=12, layers=2, heads=3)
        if kind == "gpt"
        else models.lstm(19, features=10, layers=2)
        for _ in range(2)
    )
    dtype = "float64" if mode == FLOAT64 else "float32"
    model = here.initialize(2, dtype, backend=device)
    draw, found, captured = np.random.default_rng(1), {}, []
    numbers = draw.integers(0, 19, (2, 20))
    tokens = device.asarray(numbers)
    for compiled in (False, True):
        run = nnmpi.compile(lambda x: model(x)) if compiled else model
        found[compiled] = []
        with nnmpi.no_grad(), precise(mode), nn.continued({}):
            found[compiled].append(device.to_host(model(tokens[:, :3]).data))
            for i in range(3, 20):
                found[compiled].append(device.to_host(run(tokens[:, i : i + 1]).data))
                captured.append(getattr(run, "recordings", 0))
    for eager, launched in zip(found[False], found[True], strict=True):
        np.testing.assert_array_equal(eager, launched)
    whole = there.initialize(2, "float64")(numbers).data
    written = np.concatenate(found[True], axis=1).astype("float64")
    assert not differences({"": written}, {"": whole}, TOLERANCES[mode])
    # rooms for 8 and 18 tokens are followed by one for 38
    assert sum(captured) == (17 - 3 if kind == "gpt" else 17 - 1)
    calls = run._held.popitem()[1].recorder.calls
    kinds = [type(call.function).__name__ for call in calls]
    looks = 2 if kind == "gpt" else 1  # of the stand-in: at tokens, and at positions
    assert kinds.count("Segment") == 1 + looks * is_stand_in(device)


def test_a_step_that_has_changed_runs_once_before_it_is_captured_again(device):
    """Its kernels are then compiled, and the graphs' memory has room for its results."""
    step = Step("dropped twice", device, True)
    eager = Step("dropped twice", device, False)
    assert step.course("float32", 3) == eager.course("float32", 3)
    for each in (step, eager):
        each.model[0].weight.requires_grad = False
    found = []
    for _ in range(3):
        assert step.course("float32", 1) == eager.course("float32", 1)
        found.append(step.run.recordings)
    assert found == [0, 1, 1]


class Halved(Function):
    """A user's operation, which computes with Python."""

    def forward(self, x):
        return x / 2

    def backward(self, grad):
        return (grad / 2,)


def test_operations_of_users_are_called_between_graphs(device):
    w = Tensor(device.asarray(np.ones(3, "float32")), requires_grad=True)

    @nnmpi.compile
    def step(x):
        w.grad = None
        loss = (Halved()(x * w) * x).sum()
        loss.backward()
        return loss

    for factor in (1, 2, 3, 4):
        x = device.asarray(np.arange(3, dtype="float32") * factor)
        assert step(x).item() == 2.5 * factor**2
        assert device.to_host(w.grad).tolist() == [0, 0.5 * factor**2, 2.0 * factor**2]
    assert step.recordings == 1


def test_labels_and_targets_on_the_host_are_copied_in_each_launch(device):
    """Also with other values than at the capture."""
    table = Tensor(device.asarray(np.arange(12, dtype="float32").reshape(4, 3)), requires_grad=True)
    places, labels = np.array([0, 1]), np.array([2, 0])
    target = np.ones((2, 3), "float32")

    def eager():
        table.grad = None
        rows = ops.embedding(table, places)
        loss = ops.cross_entropy(rows, labels) + ops.mse(rows, target)
        loss.backward()
        return loss

    step = nnmpi.compile(eager)
    for number in range(5):
        places[0], labels[1], target[1] = number % 4, number % 3, number
        found = step().item(), device.to_host(table.grad)
        assert found[0] == eager().item()
        np.testing.assert_array_equal(found[1], device.to_host(table.grad))
    assert step.recordings == 1 and not step.refusal


@pytest.mark.parametrize("place", ["host", "device", "argument"])
def test_lengths_of_sequences_are_those_of_each_launch(device, place):
    """The packed order is made anew between two graphs."""
    layer = nn.LSTM(3, 4).initialize(seed=2, backend=device)
    draw = np.random.default_rng(1)
    x = device.asarray(draw.standard_normal((3, 5, 3)).astype("float32"))
    lengths = np.array([5, 2, 3])
    held = device.asarray(lengths) if place == "device" else lengths.copy()

    def eager(x, given):
        layer.zero_grad()
        loss = (layer(x, held if given is None else given) ** 2).sum()
        loss.backward()
        return loss

    step = nnmpi.compile(eager)
    for turn in range(5):
        lengths, given = np.roll(lengths, turn), None
        if place == "argument":
            given = device.asarray(lengths)
        else:
            held[...] = device.asarray(lengths) if place == "device" else lengths
        found = step(x, given).item(), device.to_host(layer.layers[0].weight.grad)
        assert found[0] == eager(Tensor(x), given).item()
        np.testing.assert_array_equal(found[1], device.to_host(layer.layers[0].weight.grad))
    assert step.recordings == 1 and not step.refusal


def test_what_cannot_be_captured_stays_eager_and_says_why(device):
    w = Tensor(device.asarray(np.ones(3, "float32")), requires_grad=True)
    counts = []

    @nnmpi.compile
    def step(x):
        w.grad = None
        loss = (x * w * Tensor(device.asarray(np.full(3, 2.0, "float32")))).sum()
        loss.backward()
        counts.append(1)
        return loss

    x = device.asarray(np.ones(3, "float32"))
    assert [step(x).item() for _ in range(4)] == [6.0] * 4
    assert len(counts) == 4 and not step.recordings and "H2D" in step.refusal


def test_text_of_a_model_that_cannot_be_captured_goes_on(device):
    """A token whose capture fails is not counted twice."""
    if is_stand_in(device):
        pytest.skip("the stand-in looks at the tokens, which ends a graph before")

    class Scaled(nn.Module):
        def __init__(self):
            self.model = models.gpt(19, 20, features=12, layers=2, heads=3)

        def forward(self, tokens):
            return self.model(tokens) * Tensor(device.asarray(np.full(19, 2.0, "float32")))

    model = Scaled().initialize(seed=2, backend=device)
    tokens = device.asarray(np.random.default_rng(1).integers(0, 19, (1, 12)))
    step, found = nnmpi.compile(lambda x: model(x)), []
    for run in (model, step):
        with nnmpi.no_grad(), nn.continued({}):
            parts = [device.to_host(run(tokens[:, i : i + 1]).data) for i in range(12)]
        found.append(np.concatenate(parts))
    np.testing.assert_array_equal(*found)
    assert "H2D" in step.refusal and not step.recordings


def test_gradients_of_a_step_that_is_done_again_are_its_own(device):
    """The step does not clear them, and it is its backward pass that cannot be captured."""

    class Copied(Function):
        captured = True

        def forward(self, x):
            return x * 2

        def backward(self, grad):
            return (grad * device.asarray(np.full(3, 2.0, "float32")),)

    a, b = (Tensor(device.asarray(np.ones(3, "float32")), requires_grad=True) for _ in range(2))

    @nnmpi.compile
    def step(x):
        loss = (Copied()(x * a) * b).sum()
        loss.backward()
        return loss

    x = device.asarray(np.arange(3, dtype="float32"))
    for count in (1, 1, 2, 1, 2):
        if count == 1:  # also before the second call, which notes a gradient that is not computed
            a.grad = b.grad = None
        step(x)
        for leaf in (a, b):
            assert device.to_host(leaf.grad).tolist() == [0, 2 * count, 4 * count]
    assert "H2D" in step.refusal and not step.recordings


def test_a_pass_that_cannot_be_captured_is_done_eagerly(device, group, monkeypatch):
    """Each rank notes the same of it as of a pass that was never tried."""
    if is_stand_in(device):
        pytest.skip("the stand-in looks at the labels, which ends a graph before the loss")
    losses = []
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((12, 6)).astype("float32"), draw.integers(0, 5, 12)
    backward = CrossEntropy.backward

    def copied(function, grad):
        to_logits, *rest = backward(function, grad)
        return to_logits * device.asarray(np.ones(5, "float32")), *rest

    for broken in (False, True):
        if broken:
            monkeypatch.setattr(CrossEntropy, "backward", copied)
        model = MODELS["dropped twice"][0]().initialize(seed=2, backend=device)
        worker = Worker(model, optim.AdamW(model.storage, lr=0.01), group, backend=device)
        losses.append([worker.step(x, y).loss for _ in range(6)])
        assert (worker.passes.replay.replays == 0) == broken
        assert ("H2D" in worker.explain_replay()) == broken
        worker.release()
    assert losses[0] == losses[1]


def test_work_that_cannot_be_captured_after_a_part_was_done_is_an_error(device):
    step = Step("dropped twice", device, False)

    @nnmpi.compile
    def twice(x, y):
        step.loop(x, y)
        return step.loop(x, y) * Tensor(device.asarray(np.ones(3, "float32"))).sum()

    twice(step.x, step.y)
    with pytest.raises(UsageError, match="in the middle .* do not compile it"):
        twice(step.x, step.y)


def test_memory_of_graphs_returns_to_the_pool(device):
    pool = device.xp.get_default_memory_pool()
    used = []
    for _ in range(3):  # the first time constants are made, which stay
        step = Step("normalized and dropped", device, True)
        step.course("float32")
        held = pool.used_bytes()
        del step
        gc.collect()
        device.release_memory()
        used.append(pool.used_bytes())
        assert held > used[-1]
    assert used[1] == used[2]


class Apart(Halved):
    """The same, called between graphs."""

    is_call = True


class Halves(nn.Module):
    """Halves what comes, apart from graphs."""

    replayable = True

    def forward(self, x):
        return Apart()(x)


@pytest.mark.parametrize("end", [128, 90])
def test_memory_of_a_worker(device, group, monkeypatch, end):
    """Recorded steps take what eager ones do, also of two shapes, and with calls between graphs."""
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((128, 8)).astype("float32"), draw.integers(0, 5, 128)
    Tensor(device.asarray(x)) @ Tensor(device.asarray(x.T))  # takes cuBLAS's workspace
    pool, grown = device.xp.get_default_memory_pool(), []
    for replays in (False, True):
        if not replays:
            monkeypatch.setattr(Replay, "takes", lambda *_: False)
        body = [layer for _ in range(12) for layer in (Halves(), nn.Linear(WIDE // 16, WIDE // 16))]
        model = nn.Sequential(nn.Linear(8, WIDE // 16), *body, nn.Linear(WIDE // 16, 5))
        model.initialize(seed=2, backend=device)
        gc.collect()
        pool.free_all_blocks()
        before = pool.total_bytes()
        worker = Worker(model, optim.AdamW(model.storage), group, backend=device)
        for _ in range(5):
            worker.step(x, y)
            worker.step(x[:end], y[:end])
        grown.append(pool.total_bytes() - before)
        assert (worker.passes.replay.replays > 2) == replays
        worker.release()
        monkeypatch.undo()
    assert grown[1] < 1.1 * grown[0]


def test_a_worker_launches_graphs_from_the_third_step_of_a_shape_on(device, group):
    losses = {}
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((12, 6)).astype("float32"), draw.integers(0, 5, 12)
    for replays in (False, True):
        model = MODELS["dropped twice"][0]().initialize(seed=2, backend=device)
        worker = Worker(model, optim.AdamW(model.storage, lr=0.01), group, backend=device)
        if not replays:
            worker.passes.replay._refused = True
        reports = [worker.step(x, y) for _ in range(6)]
        losses[replays] = [report.loss for report in reports]
        assert (worker.passes.replay.replays >= 2) == replays
        losses[replays].append(worker.evaluate(x, y).loss)
        worker.release()
    assert losses[False] == losses[True]
