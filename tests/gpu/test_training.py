"""Twenty steps of each model on the device: losses and weights are the host's, nothing waits,
nothing grows.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

import nnmpi
from nnmpi import Numerics, Tensor, Worker, models, nn, ops, optim
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.errors import DivergenceError
from nnmpi.compose.scalars import SQUARES, DeferredScalars
from nnmpi.data import Dataset, Loader
from nnmpi.nn.compiled import Recording
from nnmpi.optim import updates
from tests.equivalence.reference import digits
from tests.gpu.conftest import INTERPRETED, is_stand_in
from tests.gpu.play import (
    BF16,
    FLOAT32,
    FLOAT64,
    FP16,
    MODES,
    TF32,
    differences,
    no_waiting,
    precise,
)
from tests.harness.slow import GROWTH

STEPS, BATCH, CLASSES = 3 if INTERPRETED else 20, 12, 5
# Of losses and of the weights' change, as a share of the largest: rounding grows from step to step.
LIMITS = {FLOAT64: 1e-9, FLOAT32: 2e-3, TF32: 5e-2, FP16: 5e-2, BF16: 2e-1}
MANY, MANY_ON_THE_HOST = 6 if INTERPRETED else 1000, 60  # steps over which memory is watched


@dataclass(frozen=True)
class Model:
    """A model, the shape of its samples, and how its loss is made of logits or of anything else."""

    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    regression: bool = False


MODELS = {
    "mlp": Model(lambda: models.mlp((8, 8, 1), CLASSES, (33, 21)), (8, 8, 1)),
    "mlp with dropout": Model(
        lambda: models.mlp((8, 8, 1), CLASSES, (33, 21), "gelu", 0.3), (8, 8, 1)
    ),
    "cnn": Model(lambda: models.cnn((8, 8, 1), CLASSES, (17,)), (8, 8, 1)),
    "resnet": Model(lambda: models.resnet((8, 8, 3), CLASSES, width=4), (8, 8, 3)),
    "transformer block": Model(lambda: nn.TransformerBlock(24, 3, 50), (17, 24), regression=True),
}
# Tiny numbers by which one divides show the rounding of a device.
STEADY = {"eps": 1e-3}
OPTIMIZERS = {
    **{
        name: partial(
            row.kind, lr=1e-3, **{key: STEADY[key] for key in STEADY.keys() & row.options}
        )
        for name, row in updates.OPTIMIZERS.items()
        if row.kind.elementwise
    },
    "sgd": lambda storage: optim.SGD(storage, lr=0.05),
    "momentum": lambda storage: optim.SGD(
        storage, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "adam": lambda storage: optim.Adam(storage, lr=1e-3, eps=1e-3, amsgrad=True),
    "adamw": lambda storage: optim.AdamW(storage, lr=1e-3, eps=1e-3, weight_decay=0.1),
}


class Training:
    """A model in training on a backend, step by step."""

    def __init__(self, model, optimizer, backend, mode, compiled=False):
        wide = FLOAT64 if mode == FLOAT64 else FLOAT32
        draw = np.random.default_rng(1)
        x = draw.standard_normal((BATCH, *model.sample)).astype(wide)
        y = (
            draw.standard_normal(x.shape).astype(wide)
            if model.regression
            else draw.integers(0, CLASSES, BATCH)
        )
        self.backend, self._mode = backend, mode
        self.x, self.y = Tensor(backend.asarray(x)), Tensor(backend.asarray(y))
        self.module = module = model.build().initialize(seed=4, dtype=wide, backend=backend)
        self.optimizer = update = OPTIMIZERS[optimizer](module.storage)
        self.number = 0

        # No method: a recording is made anew when an attribute of its object changes.
        def loop(x, y):
            module.zero_grad()
            output = module(x)
            loss = ops.mse(output, y) if model.regression else ops.cross_entropy(output, y)
            loss.backward()
            update.step()
            return loss

        self.run = nnmpi.compile(loop) if compiled else loop

    def step(self):
        """Do a step; return its loss, which stays where it is."""
        self.number += 1
        with precise(self._mode), nn.training(seed=9, step=self.number):
            return self.run(self.x, self.y)

    def course(self, steps=STEPS):
        """Return the losses of some steps, and how far they moved the weights and statistics, as
        float64.
        """
        first = {name: value.astype(np.float64) for name, value in self.module.state().items()}
        losses = [self.step() for _ in range(steps)]
        moved = {
            name: value.astype(np.float64) - first[name]
            for name, value in self.module.state().items()
        }
        return {"losses": np.array([loss.item() for loss in losses]), **moved}


EACH_NAME = pytest.mark.parametrize("name", MODELS)


@pytest.mark.parametrize("mode", MODES)
@EACH_NAME
def test_training_is_the_hosts(device, name, mode):
    """SGD in each precision beside NumPy in float64."""
    right = Training(MODELS[name], "sgd", numpy_backend(), FLOAT64).course()
    result = Training(MODELS[name], "sgd", device, mode).course()
    assert not apart(result, right, LIMITS[mode])


@pytest.mark.parametrize("mode", [FLOAT64, FLOAT32])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_are_the_hosts(device, optimizer, mode):
    """Each of them on the smallest model."""
    right = Training(MODELS["mlp"], optimizer, numpy_backend(), FLOAT64).course()
    result = Training(MODELS["mlp"], optimizer, device, mode).course()
    assert not apart(result, right, LIMITS[mode])


@pytest.mark.parametrize("mode", [FLOAT32, BF16])
@EACH_NAME
def test_a_recorded_step_is_the_plain_one(device, name, mode):
    """The same calls on the same arrays; but cuBLAS may add up in another order where these lie
    elsewhere.
    """
    plain = Training(MODELS[name], "adam", device, mode).course(6)
    training = Training(MODELS[name], "adam", device, mode, compiled=True)
    with patch.object(Recording, "replay", autospec=True, side_effect=Recording.replay) as replay:
        recorded = training.course(6)
    assert replay.call_count == 4
    assert not apart(recorded, plain, 1e-5 if mode == FLOAT32 else 2e-2)


EACH_COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["plain", "recorded"])


@EACH_COMPILED
@EACH_NAME
def test_no_step_waits_for_the_device(real_device, name, compiled):
    """After the first steps, which compile kernels and test cuBLAS, the host only asks and never
    waits.
    """
    training = Training(MODELS[name], "adam", real_device, FLOAT32, compiled)
    losses = [training.step() for _ in range(3)]
    with no_waiting():
        losses += [training.step() for _ in range(3)]
    assert all(np.isfinite(loss.item()) for loss in losses)


@pytest.mark.slow(GROWTH)
@EACH_COMPILED
@pytest.mark.parametrize("name", ["mlp with dropout", "cnn", "transformer block"])
def test_memory_stays_flat(device, name, compiled):
    """Over a thousand steps (fewer where NumPy stands in), not a byte more is in use, nor in the
    pool.
    """
    training = Training(MODELS[name], "adam", device, FLOAT32, compiled)
    for _ in range(10):
        training.step().item()
    gc.collect()
    before = device.memory()
    for _ in range(MANY_ON_THE_HOST if is_stand_in(device) else MANY):
        training.step()
    device.synchronize()
    gc.collect()
    after = device.memory()
    assert after.used_bytes <= before.used_bytes
    assert after.pool_bytes <= before.pool_bytes + 2**20


def apart(found, right, limit):
    """Return what differs: losses one by one, and the change of all parameters as a share of the
    largest change.
    """
    largest = max(float(np.abs(value).max()) for name, value in right.items() if name != "losses")
    words = differences({"losses": found["losses"]}, {"losses": right["losses"]}, limit)
    for name, value in right.items():
        error = float(np.abs(found[name] - value).max()) / largest
        if name != "losses" and not error <= limit:
            words.append(
                f"{name}'s change is off by {error:.2g} of the largest, more than {limit:g}"
            )
    return words


@pytest.mark.parametrize("bad", [None, 0, 4, 7], ids=str)
@pytest.mark.parametrize(
    "make, clip",
    [(optim.Adam, None), (partial(optim.SGD, momentum=0.9), 0.6), (optim.SGD, None)],
    ids=["adam", "momentum-clip", "sgd"],
)
def test_numbers_that_are_read_a_step_late_change_nothing(device, group, make, clip, bad):
    """Not a report, not a weight, and not the step at which a run stops: a batch with NaN changes
    nothing, though its update is launched, and the next step too, before anybody knows.
    """
    given = digits()
    x = given.rows(np.arange(len(given)))[:80]
    if bad is not None:
        x[Loader(given.take(np.arange(80)), 10).order(0)[10 * bad + 3]] = np.nan
    dataset = Dataset("numbers", x, given.y[:80], given.classes)
    results = []
    for late in (False, True):
        model = models.mlp(dataset.sample_shape, dataset.classes).initialize(seed=0, backend=device)
        optimizer = make(model.storage, lr=0.01)
        numerics = Numerics(clip=clip)
        worker = Worker(model, optimizer, group, numerics=numerics, backend=device)
        if not late:
            worker._can_go_ahead = lambda: False
        assert worker._can_go_ahead() == (late and not is_stand_in(device))
        reports = []

        def note(item, reports=reports):
            reports.append((item.batch, item.totals.loss, item.totals.accuracy))
            reports.append((item.totals.grad_norm, item.totals.samples, item.totals.steps))

        error = ""
        try:
            worker.run(
                Loader(dataset, 10), 0, 0, 8, 0, lambda step: 0.01 / (1 + step), progress=note
            )
        except DivergenceError as found:
            error = f"{found}"
        arrays = dict(model.state())
        for name, slots in optimizer.slots().items():
            arrays |= {f"{name} {i}": slot for i, slot in enumerate(slots)}
        state = {name: np.array(device.to_host(values)) for name, values in arrays.items()}
        results.append((reports, error, optimizer.steps, state))
        assert worker._repeated == (bad == 4 and late and not is_stand_in(device))
        worker.release()
    (reports, error, steps, state), (others, same, count, there) = results
    if clip is not None and bad is None:  # some steps are clipped, and some are not
        assert 0 < sum(norm > clip for norm, *_ in reports[1::2]) < 8
    assert reports == others and len(reports) == 2 * (8 if bad is None else bad)
    assert error == same and bool(error) == (bad is not None)
    assert steps == count == len(reports) // 2
    for name, values in state.items():
        np.testing.assert_array_equal(there[name], values, err_msg=name)


class Magnitude(nn.Module):
    """sqrt(x^2), whose gradient at 0 is NaN."""

    replayable = True

    def forward(self, x):
        return (x * x) ** 0.5


@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_that_alone_is_not_finite_ends_the_run(device, group, late):
    """The loss is finite; so is the next step's gradient, which is there when the norm is read."""
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((40, 4)).astype("float32"), draw.integers(0, 3, 40)
    dataset = Dataset("numbers", x, y, 3)
    x[Loader(dataset, 5).order(0)[5 * 4 + 2]] = 0
    model = nn.Sequential(nn.Linear(4, 3, bias=False), Magnitude())
    model.initialize(seed=0, backend=device)
    optimizer = optim.SGD(model.storage, lr=0.01)
    worker = Worker(model, optimizer, group, backend=device)
    if not late:
        worker._can_go_ahead = lambda: False
    with np.errstate(all="ignore"), pytest.raises(DivergenceError):  # the double's, by NumPy
        worker.run(Loader(dataset, 5), 0, 0, 8, 0, lambda step: 0.01)
    assert optimizer.steps == 4
    worker.release()


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e20])
def test_a_norm_that_is_read_late_is_the_steps_own(device, group, size):
    """Even if it is 0, or so small or large that float32 cannot hold its square."""
    if is_stand_in(device):
        pytest.skip("the stand-in has no kernel for the norm")
    model = models.mlp((4,), 3, hidden=[5]).initialize(seed=0, backend=device)
    worker = Worker(model, optim.SGD(model.storage, 0.1), group, backend=device)
    scalars, (grad,) = DeferredScalars(), model.storage.grads
    grad.fill(size)
    worker.exchange.note_squares(scalars)
    read = scalars.send()
    grad.fill(1)  # the next step's
    worker.exchange.squares = read()[SQUARES]
    _, norm = worker.exchange.meet([0.0])
    assert norm == pytest.approx(float(np.float32(size)) * grad.size**0.5, rel=1e-12, abs=0)
    worker.release()
