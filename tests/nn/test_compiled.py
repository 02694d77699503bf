"""Compiled steps: replayed, they give bit for bit what the eager ones give; what they record anew,
and refuse.
"""

import gc
import random
import threading
import weakref
from collections import UserDict, deque
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import count
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings

import nnmpi
from nnmpi import models, nn, ops, optim
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.nn.compiled import MOST_RECORDINGS
from nnmpi.optim.clip import clip_by_global_norm, global_norm
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor
from tests.device.here import here, on_device
from tests.harness.refusals import refuses, usage_error
from tests.nn.tally import Tally
from tests.ops.replays import check_replays
from tests.ops.rows import OPS
from tests.tensor.rows import TENSOR

TABLE = [*TENSOR, *OPS]
ON_HOST = pytest.mark.host_only("NumPy's arrays, and functions that the stand-in lacks")
NOT_CAPTURED = pytest.mark.host_only("a device captures the second call")


@pytest.mark.parametrize("row", TABLE, ids=[row.name for row in TABLE])
def test_every_operation_replays(row):
    """Recorded with some values and replayed with others, an operation gives what it gives eagerly
    with these.
    """

    @settings(max_examples=10)
    @given(row.cases)
    def same(case):
        leaves = [Tensor(np.array(x), requires_grad=True) for x in case.inputs]
        check_replays(
            case.function,
            leaves,
            [[x * factor for x in case.inputs] for factor in (0.75, 0.5, 1.0)],
        )

    same()


def network():
    """A model with all that is difficult: dropout, running statistics, a shortcut, shared
    parameters, pooling.
    """
    shared = nn.Linear(6, 6)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Residual(nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm(6))),
        nn.Conv2d(6, 6, 2, stride=2),
        nn.ReLU(),
        nn.GlobalAvgPool2d(),
        nn.LayerNorm(6),
        nn.Dropout(0.3),
        nn.Stash("a"),
        shared,
        nn.GELU(),
        nn.Pop("a"),
        shared,
        nn.Tanh(),
        nn.Linear(6, 3),
    )


def step_of(model, loss_of=ops.cross_entropy, update=lambda: None):
    """Return a training step."""

    def step(x, y):
        model.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        update()
        return loss

    return step


def train(
    compiled,
    optimizer=optim.Adam,
    dtype="float32",
    sizes=(5, 5, 3, 5, 1, 3, 1, 5),
    model=None,
    backend=None,
):
    """Train some steps and return losses, parameters and buffers."""
    backend = numpy_backend() if backend is None else backend
    model = network() if model is None else model
    model.initialize(seed=1, dtype=dtype, backend=backend)
    update = optimizer(model.storage, 0.01)
    step = step_of(model, update=update.step)
    run = nnmpi.compile(step) if compiled else lambda x, y: step(Tensor(x), Tensor(y))
    rng, losses = np.random.default_rng(0), []
    for number, rows in enumerate(sizes):
        update.lr = 0.01 / (1 + number)
        x, y = rng.standard_normal((rows, 8, 6, 2)).astype(dtype), rng.integers(0, 3, rows)
        with nn.training(seed=3, step=number, first_row=2):
            losses.append(run(backend.asarray(x), backend.asarray(y)))
    return [loss.item() for loss in losses], model.state(), run


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam])
def test_training_is_the_same(optimizer, dtype):
    """Losses, weights and running statistics are the eager run's, with batches of several sizes in
    turn.
    """
    eager, state, _ = train(False, optimizer, dtype)
    losses, compiled, step = train(True, optimizer, dtype)
    assert losses == eager
    np.testing.assert_equal(compiled, state)
    assert step.recordings == 3


def linear_step():
    model = nn.Sequential(nn.Linear(3, 2)).initialize()
    return model, nnmpi.compile(step_of(model, ops.mse))


X, Y = np.arange(6, dtype="float32").reshape(2, 3), np.ones((2, 2), "float32")


def test_a_step_may_name_arrays_and_tensors_of_its_module():
    """They are compared as objects: their truth has no value."""
    weights = Tensor(np.arange(6.0, dtype="float32").reshape(2, 3))
    step = eval("lambda x: x * W + Tensor(X)", {"X": here(X), "W": weights, "Tensor": Tensor})
    compiled = nnmpi.compile(step)
    for x in map(here, (X, X + 1, X + 2)):
        np.testing.assert_array_equal(compiled(x).numpy(), step(Tensor(x)).numpy())


def test_tuples_and_dictionaries_of_results():
    """Several results keep their order or names."""
    both = nnmpi.compile(lambda x: (x + 1, None, x * 2))
    named = nnmpi.compile(lambda x: {"sum": x.sum()})
    for x in (X, X + 1):
        item, nothing, two = both(x)
        np.testing.assert_array_equal(item.data, x + 1)
        np.testing.assert_array_equal(two.data, x * 2)
        assert nothing is None
        assert named(x)["sum"].item() == x.sum()
    assert nnmpi.compile(lambda x: None)(X) is None


def test_records_again_when_the_model_moves():
    """After a new initialization, or for a parameter frozen since, the old calls are not used."""
    model, step = linear_step()
    step(X, Y)
    old = model.storage.grads[0]
    model.initialize(seed=5)
    step(X, Y)
    assert model.storage.grads[0].any()
    assert model.storage.grads[0] is not old
    model[0].weight.requires_grad = False
    step(X, Y)
    assert model[0].weight.grad is None


def test_a_hook_that_is_set_later_is_called():
    model, step = linear_step()
    weight, seen = model[0].weight, []
    step(X, Y)
    weight.hook = seen.append
    step(X, Y)
    step(X, Y)
    assert seen == [weight, weight]
    weight.hook = None
    step(X, Y)
    assert len(seen) == 2


@pytest.mark.parametrize("loose", [True, False])
def test_gradients_that_the_step_sets_to_none_are_so_in_replays(loose):
    """Also that of a parameter which the step does not use, but the optimizer updates."""
    model = models.mlp([4], 3, [8]).initialize(seed=0)
    used, other = (model[i].weight for i in (1, 3))
    x = Tensor(np.ones((2, 4), "float32"), requires_grad=True) if loose else used
    recorded = Tally()

    @nnmpi.compile
    def step():
        recorded()
        for leaf in (x, other):
            leaf.grad = None
        (x * x).sum().backward()

    for _ in range(3):
        other.grad = other.data.copy()
        step()
        np.testing.assert_array_equal(x.grad, 2 * x.data)
        assert other.grad is None
    assert recorded.call_count == 2  # which are compared; a device captures the second one


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: x > 0,
        lambda x: x.argmax(),
        lambda x: x.numpy(),
    ],
)
def test_looking_into_tensors_is_refused(look):
    """A number taken out while recording would stay for ever."""
    usage_error("always be the first step's", lambda: nnmpi.compile(look)(X))
    assert X.sum() == 15  # and afterwards everything works as before
    assert Tensor(X).sum().item() == 15


def test_an_error_leaves_nothing_behind():
    """A step that raises while it is recorded is recorded when it is called again."""
    failing = [True]

    def step(x):
        if failing[0]:
            raise RuntimeError("once")
        return x + 1

    compiled = nnmpi.compile(step)
    refuses(RuntimeError, "once", compiled, X)
    failing[0] = False
    np.testing.assert_array_equal(compiled(X).data, X + 1)
    assert compiled.recordings == 1


@NOT_CAPTURED
def test_old_recordings_go(monkeypatch):
    """Only so many kinds are held; where steps push one another out, malloc's memory is not looked
    through in each.
    """
    looked = []
    name = "nnmpi.backend.program.replay.return_freed_memory"
    monkeypatch.setattr(name, lambda: looked.append(None))
    step = nnmpi.compile(lambda x, n: x * n)
    for n in range(MOST_RECORDINGS + 5):
        assert step(X, n).data[1, 2] == 5 * n
    assert step.recordings == MOST_RECORDINGS
    assert not looked
    for _ in range(4):
        assert step(X, n).data[1, 2] == 5 * n
    assert len(looked) == 2  # by the first replay, and by that after a comparison


def test_one_within_another_is_refused_when_it_was_called_before():
    """Its replay would not be noted by the outer one."""
    inner = nnmpi.compile(lambda x: x * 2)
    inner(np.ones(3))
    outer = nnmpi.compile(lambda x: inner(x) + 1)
    usage_error("compile only the outer one", outer, np.ones(3))


def test_threads_take_turns():
    """One step has one set of places and results."""
    model = nn.Sequential(nn.Linear(3, 2)).initialize(seed=0, dtype="float64")
    step = nnmpi.compile(lambda x: model(x).sum())
    wrong = []

    def work(number):
        x = np.full((40, 3), float(number))
        right = model(Tensor(x)).sum().item()
        wrong.extend(i for i in range(300) if step(x).item() != right)

    step(np.zeros((40, 3)))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_numbers_of_numpys_and_in_tuples_are_values():
    step = nnmpi.compile(lambda x, factors: x * factors[0])
    ones = np.ones(2)
    for factors, right in (
        ((2.0,), 2),
        ((2,), 2),
        ((0.0,), 0.0),
        ((-0.0,), -0.0),
        ((np.float64(5),), 5),
    ):
        result = step(ones, factors).data
        np.testing.assert_array_equal(result, [right, right])
        assert np.signbit(result[0]) == np.signbit(right)
    assert step.recordings == (0 if on_device() else 5)  # a device captures the second call


@pytest.mark.parametrize(
    "size", [3, 4000]
)  # short arrays have memory of their own in a recording, long ones the pool's
def test_gradients_of_loose_leaves_are_the_callers(size):
    """What is no parameter has no place of its own for its gradient: each step gives another
    array.
    """
    leaf = Tensor(np.arange(float(size)), requires_grad=True)

    def step(x):
        (leaf * x).sum().backward()

    compiled, saved = nnmpi.compile(step), []
    for value in (1.0, 2.0, 3.0):
        leaf.grad = None
        compiled(np.full(size, value))
        saved.append(leaf.grad)
    assert [set(item.tolist()) for item in saved] == [{1.0}, {2.0}, {3.0}]
    for total in (7.0, 11.0, 15.0):  # now it adds up
        compiled(np.full(size, 4.0))
        assert set(leaf.grad.tolist()) == {total}


def eager(step):
    """Return a step that is called like a compiled one."""
    return lambda *inputs: step(*map(Tensor, inputs))


@pytest.mark.host_only("labels and indices that are looked at; a device's kernels answer with NaN")
def test_bad_indices_are_found_in_a_replay():
    """A negative index would pick a row from the end."""
    table = Tensor(np.ones((5, 2), "float32"))
    step = nnmpi.compile(lambda places: ops.embedding(table, places))
    step(np.array([0, 1]))
    for wrong in (-1, 5):
        refuses(ShapeError, f"index {wrong} is outside", step, np.array([0, wrong]))


def test_indices_that_are_numbers_are_refused():
    """x[i] would pick the first step's row for ever; an array of one index may change."""
    usage_error("index", lambda: nnmpi.compile(lambda x, i: x[i])(X, np.array(0)))
    step = nnmpi.compile(lambda x, i: x[i])
    for i in (0, 1):
        np.testing.assert_array_equal(step(X, np.array([i])).data, X[[i]])


@NOT_CAPTURED
def test_shapes_that_depend_on_values_are_found():
    """One row in the place of two would be spread over both."""
    step = nnmpi.compile(lambda x, mask: x[mask])
    for _ in range(2):
        step(X, np.array([True, True]))
    refuses(ShapeError, "cannot be compiled", step, X, np.array([False, True]))


def test_a_mode_inside_leads_back_to_that_of_the_time():
    """After a block in evaluation, masks are those of the step that runs now."""
    model, ones = nn.Sequential(nn.Dropout(0.5)).initialize(), np.ones((8, 8), "float32")

    def both(x):
        with nn.evaluation():
            saved = model(x)
        return saved, model(x)

    step = nnmpi.compile(both)
    for number in range(3):
        with nn.training(seed=1, step=number):
            for ours, plain in zip(step(ones), both(Tensor(ones)), strict=True):
                np.testing.assert_array_equal(ours.data, plain.data)


def test_gradients_are_clipped_each_time():
    """As is everything that the step does to them; the norm itself is a number, which is
    refused.
    """
    results = []
    for wrap in (eager, nnmpi.compile):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).initialize()

        def step(x, model=model):
            model.zero_grad()
            model[0](x).sum().backward()
            model.storage.finish_gradients()  # zeros for the second layer
            clip_by_global_norm(model.storage.grads, 1.0)

        wrapped = wrap(step)
        for number in range(3):
            wrapped(X + number)
            model.storage.grads[0][-1] += 1  # what finishing clears
        results.append(model.storage.grads[0].copy())
        with pytest.raises(UsageError, match="norm"):
            nnmpi.compile(lambda x, model=model: global_norm(model.storage.grads))(X)
    np.testing.assert_array_equal(*results)


@NOT_CAPTURED
def test_memory_goes_with_its_recording():
    """At once, not when Python looks for cycles: there are few objects, and they are large."""
    step = nnmpi.compile(lambda x: ops.linear(x, Tensor(np.eye(3, dtype="float32"))).sum())
    step(X)
    (held,) = step._held.values()
    recorder = weakref.ref(held.recorder)
    gc.disable()
    try:
        del held, step
        assert recorder() is None
    finally:
        gc.enable()


# ---- what a recording freezes: followed, or refused ----


class Pair(NamedTuple):
    """A batch."""

    x: Any
    y: Any


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: Pair(x, y),
        lambda x, y: (2.0, ("name", [{"x": x}, {"y": (y,)}])),
        lambda x, y: {"x": x, "more": [y, None, 3]},
        lambda x, y: (Tensor(x), y),
    ],
)
@ON_HOST
def test_arrays_within_inputs_are_read_anew(wrap):
    """Also from nested ones, of which each structure has one recording."""

    def leaves(item):
        if isinstance(item, dict):
            item = list(item.values())
        if isinstance(item, tuple | list):
            return [leaf for part in item for leaf in leaves(part)]
        return [item] if isinstance(item, Tensor) else []

    def step(batch):
        x, y = leaves(batch)
        return (x * y).sum()

    compiled = nnmpi.compile(step)
    for value in (1, 2, 3):
        array = np.full((2, 3), value, "float32")
        assert compiled(wrap(array, array + 1)).item() == 6 * value * (value + 1)
    assert compiled.recordings == 1
    assert compiled(wrap(array[:1], array[:1])).item() == 27 and compiled.recordings == 2


class Scaled(nn.Module):
    """A layer with a number."""

    def __init__(self):
        self.factor = 1.0
        self.factors = {"inner": [1.0]}

    def forward(self, x):
        return x * self.factor * self.factors["inner"][0]


FACTOR, VARIABLE = 1.0, ContextVar("VARIABLE", default=1.0)


def closures():
    """Return, by name, pairs of a step and a function that sets what it multiplies by."""
    table, listed, spaced, numbers = (
        {"factor": 1.0},
        [1.0],
        SimpleNamespace(factor=1.0),
        deque([1.0]),
    )
    slots = {"__slots__": ("factor",)}
    slotted, owner = type("Slots", (), slots)(), type("Settings", (), {})
    layer, layers, keys, users = Scaled(), [nn.Sequential(Scaled())], {1.0: None}, UserDict()
    module, scope = ModuleType("users"), ModuleType("scope")
    scope.inner = module  # type: ignore[attr-defined]
    proxy, view = MappingProxyType(table), table.values()

    def by_default(x, settings=table):
        return x * settings["factor"]

    def outer(x):
        def inner():
            return FACTOR

        return x * inner()

    def local_number():
        factor = 1.0

        def set_factor(value):
            nonlocal factor
            factor = value

        return (lambda x: x * factor), set_factor

    def replaced(value):
        layers[0].replace("0", Scaled())
        layers[0][0].factor = value

    class Stepper:
        number = property(lambda _: spaced.factor)

        def step(self, x):
            return x * self.factor

        @staticmethod
        def read():
            return spaced.factor

    def set_key(value):
        keys.clear()
        keys[value] = None

    def named(x):
        return x * named.factor  # type: ignore[attr-defined]

    def of(item):
        return lambda value: setattr(item, "factor", value)

    stepper, local, cached = Stepper(), Stepper(), lru_cache(maxsize=0)(lambda: spaced.factor)
    weak = weakref.ref(local)

    def update(value):
        table.update(factor=value)

    def set_global(value):
        globals().update(FACTOR=value)

    by_module = eval("lambda x: x * scope.inner.factor", {"scope": scope})
    inner = layer.factors["inner"]
    return {
        "global": (lambda x: x * FACTOR, set_global),
        "global of an inner function": (outer, set_global),
        "local": local_number(),
        "dict": (lambda x: x * table["factor"], update),
        "default": (by_default, update),
        "list": (lambda x: x * listed[0], partial(listed.__setitem__, 0)),
        "deque": (lambda x: x * numbers[0], partial(numbers.__setitem__, 0)),
        "UserDict": (lambda x: x * users["n"], partial(users.__setitem__, "n")),
        "namespace": (lambda x: x * spaced.factor, of(spaced)),
        "property": (lambda x: x * stepper.number, of(spaced)),
        "staticmethod": (lambda x: x * Stepper.read(), of(spaced)),
        "wrapper": (lambda x: x * cached(), of(spaced)),
        "attribute": (named, of(named)),
        "context": (lambda x: x * VARIABLE.get(), VARIABLE.set),
        "slot": (lambda x: x * slotted.factor, of(slotted)),
        "class": (lambda x: x * owner.factor, of(owner)),
        "object": (lambda x: x * local.factor, of(local)),
        "method": (stepper.step, of(stepper)),
        "partial": (partial(by_default, settings=table), update),
        "module": (lambda x: layer(x), of(layer)),
        "module's dict": (lambda x: layer(x), partial(inner.__setitem__, 0)),
        "replaced layer": (lambda x: layers[0](x), replaced),
        "local name of a module": (lambda x: x * module.factor, of(module)),
        "global name of a module": (by_module, of(module)),
        "dict's key": (lambda x: x * min(keys), set_key),
        "dict's view": (lambda x: x * min(view), update),
        "proxy": (lambda x: x * proxy["factor"], update),
        "weak reference": (lambda x: x * weak().factor, of(local)),
    }


@pytest.mark.parametrize("name", closures())
def test_what_a_step_closes_over_is_followed(name):
    step, set_factor = closures()[name]
    compiled = nnmpi.compile(step)
    try:
        for factor in (1.0, 3.0, 5.0, 3.0):
            set_factor(factor)
            for _ in range(2):
                assert compiled(np.ones(3)).data[0] == factor
            assert compiled.recordings == 1
    finally:
        set_factor(1.0)


def test_what_a_step_itself_changes_is_followed():
    """It is then recorded in every call."""
    scale, seen = 1.0, []

    @nnmpi.compile
    def step(x):
        nonlocal scale
        scale *= 2
        seen.append(scale)
        with nn.training(step=len(seen)):
            return x * scale

    assert [step(np.ones(2)).data[0] for _ in range(4)] == [2, 4, 8, 16]
    assert seen == [2, 4, 8, 16]
    waiting = deque([1.0, 2.0, 3.0, 4.0])
    taken = nnmpi.compile(lambda x: x * waiting.popleft())
    assert [taken(np.ones(2)).data[0] for _ in range(4)] == [1, 2, 3, 4]


def test_the_step_of_a_training_block_inside_is_followed_or_refused():
    model = nn.Sequential(nn.Dropout(0.5)).initialize(seed=0)
    optimizer = optim.SGD(nn.Linear(2, 2).initialize(seed=0).storage, lr=0.1)
    ones, number = np.ones((8, 8), "float32"), 0

    def dropped(x, step=None):
        with nn.training(step=number if step is None else step):
            return model(x)

    inside = nnmpi.compile(dropped)
    masks = set()
    for number in range(3):  # noqa: B007 - the step reads it
        for step in (None, number + 10):
            result = inside(ones, step)
            np.testing.assert_array_equal(result.data, dropped(Tensor(ones), step).data)
            masks.add(result.data.tobytes())
    assert len(masks) == 6

    def by_optimizer(x):
        with nn.training(step=optimizer.steps):
            return model(x)

    usage_error(
        r"optimizer\.steps inside a compiled step would always",
        lambda: nnmpi.compile(by_optimizer)(ones),
    )
    assert by_optimizer(Tensor(ones)).shape == (8, 8)


@pytest.mark.parametrize("name", ["lr", "steps"])
def test_settings_of_the_optimizer_are_refused_inside(name):
    """And followed from outside."""
    model = nn.Sequential(nn.Linear(3, 2)).initialize(seed=0)
    optimizer = optim.SGD(model.storage, lr=0.5)

    def set_it(x):
        setattr(optimizer, name, 2)
        return x

    for step in (lambda x: x * getattr(optimizer, name), set_it):
        before = getattr(optimizer, name)
        with pytest.raises(UsageError, match=rf"optimizer\.{name} inside a compiled step"):
            nnmpi.compile(step)(np.ones(2))
        assert getattr(optimizer, name) == before


RNG = np.random.default_rng(0)


@pytest.mark.parametrize("items", [iter([1, 2, 3, 4, 5]), (n + 1 for n in range(5)), count(1)])
def test_items_of_an_iterator_are_taken_one_by_one(items):
    step = nnmpi.compile(lambda x: x * next(items))
    assert [step(np.ones(1)).item() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert "an iterator, whose next item a replay would not take" in step.refusal


class Bent(Function):
    """Is written as one writes NumPy: operators, in place, a function of a submodule."""

    def forward(self, x):
        y = self.xp.linalg.norm(x, axis=0, keepdims=True) + x * x
        y += 1
        self.saved = (x, y)
        return y

    def backward(self, grad):
        x, y = self.saved
        return (2 * x * grad / y.max(),)


class Doubled(Function):
    """Knows nothing of recordings."""

    def forward(self, x):
        self.saved = (x.copy(),)
        return x * 2

    def backward(self, grad):
        return (grad * 2 + 0 * self.saved[0],)


@pytest.mark.parametrize("kind", [Doubled, pytest.param(Bent, marks=ON_HOST)])
def test_operations_of_ones_own_are_recorded(kind):
    leaf = Tensor(np.ones((2, 3)), requires_grad=True)

    def step(x):
        leaf.grad = None
        y = kind()(leaf * x).sum()
        y.backward()
        return y

    compiled = nnmpi.compile(step)
    for factor in (1.0, 3.0, 5.0):
        x = Tensor(np.arange(6.0).reshape(2, 3) * factor)
        right, grad = step(x).item(), leaf.grad
        assert compiled(x).item() == right
        np.testing.assert_array_equal(leaf.grad, grad)
    assert on_device() or compiled.recordings == 1


@pytest.mark.parametrize(
    "model",
    [
        models.gpt(11, context=16, features=16, layers=1, heads=2),
        nn.Sequential(nn.Embedding(11, 6), nn.LSTM(6, 5), nn.Linear(5, 11)),
    ],
    ids=["gpt", "lstm"],
)
@pytest.mark.parametrize("again", [False, True])
def test_texts_do_not_leak_into_one_another(model, again):
    """With dictionaries of their own, or with one that is cleared."""
    model.initialize(seed=1)
    compiled, kept = nnmpi.compile(lambda tokens: model(tokens)), {}

    def text(run, tokens, memory):
        with nnmpi.no_grad(), nn.continued(memory):
            return [run(np.array([item])).data.copy() for item in tokens]

    for tokens in ([[1], [7], [2]], [[4], [7], [3]], [[1, 2], [7], [7], [5]], [[4, 5], [7], [1]]):
        kept.clear()
        ours = text(compiled, tokens, kept if again else {})
        for mine, right in zip(ours, text(model, tokens, {}), strict=True):
            np.testing.assert_array_equal(mine, right)


class Reading(Function):
    """An operation of one's own that decides by a value."""

    def forward(self, x):
        return x * 2 if x.sum() > 0 else x * 3

    def backward(self, grad):
        return (grad,)


@pytest.mark.host_only("on a device a step that reads values is not captured")
def test_a_step_that_decides_by_a_value_is_done_eagerly():
    step = nnmpi.compile(lambda x: Reading()(x))
    for x in (np.ones(3), -np.ones(3), np.ones(3)):
        assert step(x).numpy().tolist() == (2 * x if x.sum() > 0 else 3 * x).tolist()
        assert (step.recordings, step.refusal) == (0, "Python reads a value (bool)")
    assert step.program is None


@pytest.mark.host_only("a device's step is made of graphs")
def test_a_program_can_be_read():
    step = nnmpi.compile(lambda x: ops.relu(x * 2).sum())
    step(np.ones((2, 3)))
    lines = str(step.program).splitlines()
    assert lines[0].endswith("multiply(array[2 3], 2, out=%0[2 3])")
    assert len(lines) == step.calls + 1
    assert lines[-1] == f"{step.calls} calls, 128 bytes for results"


class Made(Function):
    """An operation of functions; `table` is an array of its own."""

    def __init__(self, forward, backward=None, table=None):
        self.by, self.back, self.table = forward, backward, table

    def forward(self, *inputs):
        return self.by(self, *inputs)

    def backward(self, grad):
        return self.back(self, grad)


class Whole(Made):
    is_call = True


def reads_memory(_, x):
    return np.frombuffer(memoryview(x), x.dtype).reshape(x.shape) * 2  # type: ignore[arg-type]


def counts(operation, x):
    operation.table += 1
    return x * operation.table


def raises_in_place(_, x):
    y = x * 1.0
    view = y[:2]
    y **= 2
    return view + y[1:]


def chosen(_, x):
    """Decides by a value whether it gives its input or a new array."""
    return x if x[0] < 1 else x * 2


OWN = {
    "compiled code's": lambda table: lambda x: Made(reads_memory)(x),
    "reads its table": lambda table: (
        lambda x: Made(lambda o, x: x * np.exp(o.table), None, table)(x)
    ),
    "writes its table": lambda table: lambda x: Made(counts, None, table)(x),
    "a power in place": lambda table: lambda x: Made(raises_in_place)(x),
}


@ON_HOST
@pytest.mark.parametrize("name", OWN)
def test_arrays_of_operations_of_ones_own(name):
    """What is not recorded drops the recording; the table changes between steps, too."""
    tables = np.ones(3), np.ones(3)
    step, compiled = (
        wrap(OWN[name](table)) for wrap, table in zip((eager, nnmpi.compile), tables, strict=True)
    )
    for number in range(1, 5):
        x = np.arange(3.0) + number
        np.testing.assert_array_equal(compiled(x).data, step(x).data)
        for table in tables:
            table += number


@ON_HOST
def test_backward_of_compiled_code_is_right():
    leaf = Tensor(np.ones(3), requires_grad=True)

    def step(x):
        leaf.grad = None
        y = Made(lambda o, a: a * 2, lambda o, grad: (reads_memory(o, grad),))(leaf * x)
        y.backward(np.arange(3.0))
        return y

    compiled = nnmpi.compile(step)
    for x in (np.ones(3), np.arange(3.0), np.full(3, 2.0)):
        compiled(x)
        np.testing.assert_array_equal(leaf.grad, 2 * np.arange(3.0) * x)
    assert compiled.refusal == "Made.backward raised TypeError"


@ON_HOST
@pytest.mark.parametrize("values", [(0.0, 1.5, 0.0), (1.5, 0.0, 1.5)])
def test_a_call_whose_result_is_its_input_does_not_overwrite_it(values):
    """Neither that of a step, nor a parameter."""
    weight = Tensor(np.ones(3))

    def step(x):
        y = x * 1
        return Whole(chosen)(y), y, Whole(lambda o, w, x: w if x[0] < 0.2 else w * 2)(weight, x)

    compiled = nnmpi.compile(step)
    for value in values:
        x = np.array([value, 5, 6])
        for ours, right in zip(compiled(x), step(Tensor(x)), strict=True):
            np.testing.assert_array_equal(ours.data, right.data)
    assert weight.data.tolist() == [1, 1, 1]


@ON_HOST
def test_a_call_whose_result_is_another_part_of_its_input():
    step = nnmpi.compile(lambda x: Whole(lambda o, x: x[int(x[0]) :][:2])(x * 1))
    for start in (0, 1, 2, 0):
        assert step(np.array([start, 5.0, 6, 7])).numpy().tolist() == [start, 5, 6, 7][start:][:2]


@pytest.mark.parametrize(
    "draw",
    [
        RNG.normal,
        np.random.rand,  # noqa: NPY002
        random.random,
        np.random.RandomState(0).random_sample,
        random.Random(0).random,
        np.random.PCG64(0).random_raw,
    ],
)
def test_random_numbers_of_a_step_are_not_repeated(draw):
    """Of any generator; also if they decide, and most often in one way."""
    step = nnmpi.compile(lambda x: x * (3.0 if draw() > -9 else 1.0))
    for _ in range(40):
        assert step(np.ones(2)).data.tolist() == [3, 3]
        assert not step.recordings
    assert "draws random numbers, which replays would repeat" in step.refusal


@pytest.mark.host_only("a device's step is made of graphs")
@pytest.mark.parametrize("assigned", [True, False])
def test_gradients_that_a_step_reads_or_assigns_are_its_own(assigned):
    """An update by hand is right."""
    found = []
    for wrap in (eager, nnmpi.compile):
        model = nn.Sequential(nn.Linear(3, 2)).initialize(seed=0)

        def step(x, model=model):
            model.zero_grad()
            (model(x) * model(x)).sum().backward()
            for parameter in model.parameters():
                if assigned:
                    parameter.grad = np.ones_like(parameter.data)
                else:
                    parameter.data[...] -= 0.1 * parameter.grad

        wrapped = wrap(step)
        for number in range(3):
            wrapped(X + number)
        found.append([model[0].weight.data.copy(), model[0].weight.grad.copy()])
    np.testing.assert_array_equal(*found)
    refusal = "the step assigns another array to x.grad" if assigned else ""
    assert (wrapped.refusal, wrapped.recordings) == (refusal, not assigned)


def counting(step, size):
    """Return a step that counts in an array of its own."""
    number = np.zeros(size)

    def counted(x):
        number[:] += 1
        return step(x) * float(number[0])

    return counted


@NOT_CAPTURED
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("size", [3, 3000])
def test_arrays_that_python_reads_are_followed(size, inside):
    """Whether the step changes them or its caller does."""
    tables = [(np.ones(size), np.ones(size)) for _ in range(2)]
    recorded, ones = Tally(), np.ones((2, size))

    def step_of(read, used, seen):
        def step(x):
            seen()
            return x * Tensor(np.exp(read)) + Tensor(used)

        return counting(step, size) if inside else step

    step, compiled = (
        eager(step_of(*tables[0], Tally())),
        nnmpi.compile(step_of(*tables[1], recorded)),
    )
    for number in range(6):
        np.testing.assert_array_equal(compiled(ones).numpy(), step(ones).numpy())
        for read, used in tables:
            used += 1
            read += number % 2
    assert recorded.call_count == 6


def test_a_device_is_found_by_the_inputs():
    """A step that brings arrays to a device by itself stays eager."""
    kinds = [np.float32, np.float64]  # a step may name classes
    doubles = nnmpi.compile(lambda x: x * len(kinds))
    brings = nnmpi.compile(lambda: Tensor(np.ones(3)) * 2)
    for number in range(4):
        np.testing.assert_array_equal(doubles(here(X + number)).numpy(), 2 * (X + number))
        assert brings().numpy().tolist() == [2, 2, 2]
    assert doubles.recordings == 1
    assert bool(brings.refusal) == on_device()


@pytest.mark.host_only("a device's memory is a pool of CuPy's")
def test_results_that_do_not_live_at_one_time_share_memory():
    """Layers of nearly equal width, which fit badly by their size."""
    model = models.mlp((784,), 10, (128, 127, 126)).initialize(seed=0)
    step = nnmpi.compile(step_of(model))
    for _ in range(5):  # the first call also inspects the model, the fourth is compared
        step(np.ones((128, 784), "float32"), np.arange(128) % 10)
    assert 0 < step.pool.size_bytes < 300_000


@pytest.mark.host_only("a device's memory is a pool of CuPy's")
def test_a_comparison_has_no_results_in_memory_twice():
    """Those of replays are given back before it, and taken again after it: same numbers."""
    rows, sizes = np.ones((64, 512), "float32"), []
    step = nnmpi.compile(lambda x: (x * 3.0 + 1.0).sum())
    do = step._do

    def noting(*args):
        sizes.append(step.pool.size_bytes)
        return do(*args)

    step._do = noting
    results = [step(number * rows).item() for number in range(10)]
    assert results == [float((number * rows * 3 + 1).sum()) for number in range(10)]
    assert sizes == [0, 0, 0, 0]  # of calls 1, 2, 4 and 8
    assert step.pool.size_bytes >= rows.nbytes
