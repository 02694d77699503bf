"""What a step computes with in Python, and what of it replays repeat: no step repeats an old value
beyond the next audit, wherever it lies; what is recorded twice is compared.
"""

import gc
import random
import warnings
from copy import deepcopy
from functools import partial

import numpy as np
import pytest

import nnmpi
from nnmpi import models, nn, ops, optim
from nnmpi.base.errors import UsageError
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor
from tests.harness.slow import MORE_SEEDS
from tests.nn.idioms import CHANGES, USES, Reads, all_idioms, sources
from tests.nn.tally import Tally
from tests.worker_options import sgd, work

pytestmark = [
    pytest.mark.host_only("a device's graphs cannot be compared"),
    pytest.mark.filterwarnings("ignore:the (step|model) computes with:UserWarning"),
]

CALLS = 20


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """What is found when a step is dropped; `test_ending` is about it."""
    errors = []
    monkeypatch.setattr("nnmpi.nn.compiled.fail_at_end", lambda error: errors.append(str(error)))
    yield errors
    gc.collect()  # a Worker and its passes refer to each other


AUDITS = {2, 4, 8, 15, 16}


def check_idiom(idiom, folder):
    """Compare each call with the eager one: a wrong one is named by the next audit."""
    read, put = sources(folder)[idiom.source]
    use, change = USES[idiom.use], CHANGES[idiom.change]

    def step(x):
        return use(x, read())

    compiled, wrong, failed = nnmpi.compile(step), [], 0
    for call in range(1, CALLS + 1):
        put(change(call))
        x = np.arange(4.0) + 1 + call
        right = step(Tensor(x)).data
        try:
            came = compiled(x).data
        except UsageError as error:
            assert "may have used an old value" in str(error)
            failed = call
            since = int(str(error).partition("since number ")[2].split()[0])
            if idiom.change != "in each call":  # one that is seen in every fifth call has no first
                assert all(since <= number < call for number in wrong), (wrong, since)
            wrong = []
            continue
        if came.shape != right.shape or not np.array_equal(came, right):
            wrong.append(call)
            assert call not in AUDITS, "an audit computes eagerly"
    assert not wrong, f"calls {wrong} were silently wrong"
    if idiom.change in ("never", "at call 2"):
        assert not failed
    if idiom.change == "never" and idiom.use != "decided by the input":
        reads_in_use = idiom.use == "a tensor's array"
        assert compiled.recordings == 1 or reads_in_use or compiled.refusal.startswith("Python")


SEEDS = [
    pytest.param(seed, marks=pytest.mark.slow(MORE_SEEDS)) if seed else seed for seed in range(8)
]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_idiom_is_silently_wrong_beyond_an_audit(seed, tmp_path):
    """An eighth of 1,400 idioms for each seed."""
    idioms = [*all_idioms(tmp_path)]
    random.Random(0).shuffle(idioms)
    for idiom in idioms[seed::8]:
        try:
            check_idiom(idiom, tmp_path)
        except BaseException as error:
            error.add_note(idiom.text)
            raise


WORKER_USES = ["a factor", "a branch", "a constant", "a loop"]


def train(group, read, put, use, change, replayable):
    """Return the losses of some updates, None for one that ended in the error of an audit."""
    kind = type("Reading", (Reads,), {"replayable": replayable})
    model = nn.Sequential(kind(read, use), nn.Linear(4, 2)).initialize(seed=0, dtype="float64")
    worker = work(model, group)
    rows = np.random.default_rng(0).normal(size=(6, 4))
    x, y = rows[group.rank :: group.size], np.arange(6)[group.rank :: group.size] % 2
    losses = []
    for step in range(14):
        group.barrier()
        put(change(step + 1))
        group.barrier()
        try:
            losses.append(worker.step(x, y).loss)
        except UsageError as error:
            assert "may have used an old value" in str(error)
            losses.append(None)
            break
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_idiom_is_silently_wrong_in_a_worker(ranks, tmp_path):
    """All ranks raise the error of an audit at the same update; nobody waits for ever."""
    idioms = [item for item in all_idioms(tmp_path) if item.use in WORKER_USES]
    random.Random(1).shuffle(idioms)
    for idiom in idioms[: 24 // ranks]:
        read, put = sources(tmp_path)[idiom.source]
        use, change = USES[idiom.use], CHANGES[idiom.change]
        run = partial(train, read=read, put=put, use=use, change=change)
        found = [nnmpi.simulate(partial(run, replayable=way), ranks) for way in (False, True)]
        for right, came in zip(*found, strict=True):
            at = came.index(None) if None in came else len(came)
            assert all(one == other for one, other in zip(right, came[: at // 2], strict=False))
            assert None in came or came == right, idiom.text


def test_one_rank_that_differs_is_told_to_all():
    """One rank's environment changes: the error of its audit is raised on both."""

    def program(group):
        number = Tally()  # which nobody watches

        def read():
            return 1.0 + (number.call_count > 5 and group.rank == 1)

        def put(_):
            number()

        return train(group, read, put, USES["a factor"], CHANGES["never"], True)

    ended = nnmpi.simulate(program, 2)
    assert [losses[-1] for losses in ended] == [None, None]
    assert len(ended[0]) == len(ended[1])


# ---- what was silent, one by one ----


def calls(step, inputs, compiled):
    """Return what some calls give."""
    run = nnmpi.compile(step) if compiled else lambda *xs: step(*map(Tensor, xs))
    return [run(*xs).data.copy() for xs in inputs], run


def trained(update):
    """Return a step with an update by hand, and its model."""
    model = nn.Linear(3, 2).initialize(seed=0, dtype="float64")
    optimizer, update = sgd(model, 0.5), deepcopy(update)

    def step(x, y):
        model.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        update(model, optimizer, x, y)
        return loss

    return model, step


def clips(model, optimizer, *_):
    optimizer.step()
    for parameter in model.parameters():
        np.clip(parameter.data, -0.1, 0.1, out=parameter.data)


def shrinks_gradients(model, optimizer, *_):
    for grads in model.storage.grads:
        grads *= 0.1
    optimizer.step()


def by_hand(model, *_):
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad


def on_storage(model, *_):
    storage = model.storage
    storage.finish_gradients()
    for data, grads in zip(storage.data, storage.grads, strict=True):
        data[...] = data * 0.9 - 0.1 * np.sign(grads)


def scales(model, optimizer, *_):
    model.weight.grad *= 0.5
    optimizer.step()


def averages(model, optimizer, *_):
    optimizer.step()
    model.weight.data[...] = 0.5 * (model.weight.data + model.weight.data.mean(axis=0))


def assigns(model, *_):
    model.weight.data[...] = model.weight.data - 0.1
    model.bias.grad = np.ones(2)


def decides(model, optimizer, x, _):
    if x.data.max() > 1:
        optimizer.step()


class Decays:
    """A velocity, which NumPy changes without an array of the step, and then with one."""

    def __init__(self, rows):
        self.velocity = np.zeros((rows, 2))

    def __call__(self, model, *_):
        self.velocity *= 0.9
        self.velocity[:3] += 0.1 * model.weight.grad
        model.weight.data -= self.velocity[:3]


@pytest.mark.parametrize(
    "update, replayed",
    [
        *(
            (item, True)
            for item in (clips, shrinks_gradients, by_hand, on_storage, scales, averages)
        ),
        *((item, False) for item in (assigns, decides, Decays(3), Decays(5000))),
    ],
)
def test_what_a_step_does_to_weights_and_gradients_is_repeated(update, replayed):
    """By NumPy, in place; what Python decides or rebinds makes the step eager."""
    found = []
    for compiled in (False, True):
        model, step = trained(update)
        rng = np.random.default_rng(1)
        inputs = [(rng.normal(size=(6, 3)), rng.integers(0, 2, 6)) for _ in range(7)]
        losses, run = calls(step, inputs, compiled)
        found.append([*losses, model.weight.data.copy(), model.bias.data.copy()])
    for right, came in zip(*found, strict=True):
        np.testing.assert_array_equal(came, right)
    assert run.recordings == replayed
    assert bool(run.refusal) is not replayed


def one_hot(x, y):
    return (ops.log_softmax(x) * Tensor(np.eye(3)[y.data])).sum()


def normalized(x, y):
    return (x * Tensor(x.data / x.data.sum(axis=0))).sum() + Tensor(y.data * 0.5).sum()


def selected(x, y):
    return x[np.array([int(y.data[0])])].sum()


@pytest.mark.parametrize(
    "step, replayed", [(one_hot, False), (normalized, True), (selected, False)]
)
def test_the_arrays_of_tensors_record(step, replayed):
    rng = np.random.default_rng(0)
    inputs = [(rng.normal(size=(6, 3)), rng.integers(0, 3, 6)) for _ in range(6)]
    right, _ = calls(lambda x, y: step(x, y), inputs, False)
    came, run = calls(lambda x, y: step(x, y), inputs, True)
    np.testing.assert_array_equal(came, right)
    assert run.recordings == replayed


class Centered(nn.Module):
    """A buffer that forward changes, as in docs/model.md."""

    def __init__(self, features):
        self.mean = nn.Buffer((features,), 0.0)

    def forward(self, x):
        """Return x less the running mean."""
        shift, mode = Tensor(self.mean.data.copy()), nn.current()
        if mode.training and not mode.recomputing:
            sums = np.append(x.data.sum(0), len(x)).astype("float64")
            self.mean.data += 0.1 * (sums[:-1] / sums[-1] - self.mean.data)
        return x - shift


def test_a_buffer_that_forward_changes():
    means = []
    for compiled in (False, True):
        model = nn.Sequential(Centered(2)).initialize(seed=0, dtype="float64")
        run = nnmpi.compile(lambda x, model=model: model(x).sum()) if compiled else model
        for step in range(7):
            with nn.training(step=step):
                run(np.full((3, 2), step + 1.0))
        means.append(model[0].mean.data.tolist())
    assert means[0] == means[1]
    assert run.recordings == 1


class Annealed(nn.Module):
    """A layer that computes with the number of the update."""

    replayable = True

    def __init__(self):
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        """Return less and less."""
        mode = nn.current()
        return self.layer(x) * (1.0 / (1.0 + mode.step)) + 0.0 * mode.seed * mode.first_row


@pytest.mark.parametrize("first", [1, 2, 5])
def test_the_mode_is_a_value_of_the_call(first):
    """Also if it changes after some replays."""
    found = []
    for compiled in (False, True):
        model = nn.Sequential(Annealed()).initialize(seed=0, dtype="float64")
        step = nnmpi.compile(lambda x, model=model: model(x).sum()) if compiled else model
        results = []
        for call in range(9):
            with nn.training(step=max(0, call - first)):
                results.append(step(np.ones((2, 3))).data.sum())
        found.append(results)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)


def test_a_workers_layer_with_its_own_step_is_right():
    def program(group, replayable):
        kind = type("Annealed", (Annealed,), {"replayable": replayable})
        model = nn.Sequential(kind()).initialize(seed=0, dtype="float64")
        worker = work(model, group, lr=0.5)
        x, y = np.random.default_rng(0).normal(size=(6, 3)), np.array([0, 1, 0, 1, 0, 1])
        losses = [worker.step(x, y).loss for _ in range(6)]
        return losses, worker.explain_replay()

    (right, _), (came, reason) = (
        nnmpi.simulate(lambda group, way=way: program(group, way), 1)[0] for way in (False, True)
    )
    assert came == right
    assert reason == "Python reads nn.current().step"


DECIDED = {
    "normalized": lambda x, a: x * a / float(a.sum()),
    "masked": lambda x, a: x * a * Tensor((a > 1).astype("f8")),
    "a branch": lambda x, a: x * a if a[0] > 1 else x - a,
    "by Python alone": lambda x, a: x / float(a.sum()),
    "which is returned": lambda x, a: (x * 1, x * 2, x * 3)[int(a[0]) % 3],
}


@pytest.mark.parametrize("name", DECIDED)
def test_an_array_that_is_an_operand_and_read_by_python(name):
    """Its first change, and later ones of what Python alone reads, are seen at once."""
    a, x = np.array([1.0, 2.0, 3.0]), np.ones(3)
    step = nnmpi.compile(lambda x: DECIDED[name](x, a))
    for first in map(float, (1, 1, 5, 5, 5, 5, 4, 4, 4, 7, 7, 6, 6, 9)):  # not at audits alone
        a[:] = [first, 3.0 - first, 2.0]
        np.testing.assert_array_equal(step(x).data, DECIDED[name](Tensor(x), a).data)


# ---- what a step does to Python's objects ----


def counter(x, state):
    state["n"] += 1
    return x * state["n"]


def history(x, past):
    past.append(1)
    return x * len(past)


def forgets(x, items):
    del items["b"]
    return x * 1


def writes(x, mean):
    mean.data[...] += 1
    return x * mean


@pytest.mark.parametrize(
    "step, state",
    [(counter, {"n": 0}), (history, []), (forgets, {"a": 1, "b": 2}), (writes, np.zeros(1))],
)
def test_a_step_that_changes_its_arguments_is_refused(step, state):
    with pytest.raises(UsageError, match="changes one of its arguments, but works on copies"):
        nnmpi.compile(step)(np.ones(1), state)


def test_a_step_that_always_changes_something_becomes_eager():
    """It is right at every call, and not recorded for ever."""
    seen = []

    def step(x):
        seen.append(len(seen))
        return x * len(seen)

    compiled = nnmpi.compile(step)
    assert [compiled(np.ones(1)).item() for _ in range(40)] == [*range(1, 41)]
    assert compiled.refusal == "the step changes what it computes with"
    assert not compiled.recordings


# ---- strangers ----


class ByItem(dict):
    """A dictionary with attributes."""

    __getattr__ = dict.__getitem__


class ByGet(dict):
    """One that answers every name."""

    __getattr__ = dict.get


class Any_:
    """An object that answers every name with itself."""

    scale = 2.0

    def __getattr__(self, name):
        return self


class Unready:
    """An object that raises when it is asked."""

    scale = 2.0

    @property
    def data(self):
        """Raise."""
        raise RuntimeError("not loaded yet")

    shape = dtype = __array_namespace__ = data


class Elsewhere:
    """An array of another library, as JAX's."""

    scale = 2.0

    def __array_namespace__(self):
        raise RuntimeError("of another library")

    __cuda_array_interface__ = property(lambda _: {})


@pytest.mark.parametrize("kind", [ByItem, ByGet, Any_, Unready, Elsewhere])
def test_strangers_are_asked_for_their_type(kind):
    thing = kind(scale=2.0) if issubclass(kind, dict) else kind()

    class Net(nn.Module):
        replayable = True

        def __init__(self):
            self.config, self.layer = thing, nn.Linear(3, 2)

        def forward(self, x):
            """Return the layer's result times a number of the stranger's."""
            return self.layer(x) * self.config.scale

    model = nn.Sequential(Net()).initialize(seed=0, dtype="float64")
    step, x = nnmpi.compile(lambda x: model(x) * thing.scale), np.ones((2, 3))
    for _ in range(3):
        np.testing.assert_array_equal(step(x).data, (model(Tensor(x)) * 2.0).data)
    worker = work(model, nnmpi.start())
    assert all(worker.step(x, np.array([0, 1])).loss > 0 for _ in range(4))


class Drawing(nn.Module):
    """A layer that takes its factors from an iterator, and one that says that this is no matter."""

    def __init__(self, items):
        self.layer, self.items = nn.Linear(3, 2), items

    def forward(self, x):
        """Return a multiple of the layer's result."""
        return self.layer(x) * next(self.items)


def test_a_worker_with_an_iterator_in_its_model_takes_each_item():
    """Also one of which its class says that it may be replayed."""
    losses = []
    for replayable in (False, True):
        kind = type("Drawing", (Drawing,), {"replayable": replayable})
        for items in (iter(range(1, 9)), (n for n in range(1, 9)), map(abs, range(1, 9))):
            model = nn.Sequential(kind(items)).initialize(seed=0, dtype="float64")
            worker = work(model, nnmpi.start())
            x, y = np.ones((2, 3)), np.array([0, 1])
            losses.append([worker.step(x, y).loss for _ in range(8)])
            assert worker.explain_replay()
    assert all(came == losses[0] for came in losses)


# ---- comparing ----


class Whole(Function):
    """An operation that is one call, with a setting."""

    is_call = True

    def __init__(self, factor, table=None):
        self.factor, self.table = factor, table

    def forward(self, x):
        """Return a multiple."""
        return x * self.factor

    def backward(self, grad):
        """Return the gradient."""
        return (grad * self.factor,)


def drawn(ends):
    """Return a number that differs in some calls."""
    ends()
    return float(ends.call_count)


SCRATCH = Tensor(np.zeros(3))  # outlives the steps

DIFFERENT = {
    "a number": lambda x, n: x * n,
    "a function": lambda x, n: x * 2 if n % 2 else x / 0.5,
    "a number of calls": lambda x, n: x * 2 if n % 2 else x * 2 + 0 * x,
    "values of an array": lambda x, n: x + Tensor(np.full(3, n)),
    "a setting of an operation": lambda x, n: Whole(n)(x),
    "an operation's table": lambda x, n: Whole(1.0, np.full(2, n))(x),
    "an operand": lambda x, n: (x * 2) * (x * 3) if n % 2 else (x * 2) * (x * 2) + 0 * (x * 3),
    "part of an array": lambda x, n: x[int(n) % 2 :][:2] * 2,
    "the order of axes": lambda x, n: x.reshape(3, 1) * 2 if n % 2 else x.reshape(1, 3) * 2,
    "a keyword": lambda x, n: x.reshape(3, 1).sum(axis=int(n) % 2),
    "the result": lambda x, n: (x * 1, x * 2)[int(n) % 2],
    "the sign of zero": lambda x, n: x * (0.0 if n % 2 else -0.0),
    "a last call": lambda x, n: (x * 2, None if n % 2 else SCRATCH.data.fill(n))[0],
    "a written array": lambda x, _: Tensor(np.add(x.data, 1, out=np.zeros(3))),
    "an array that adds up": lambda x, _: Tensor(np.copyto(y := np.zeros(3), x.data) or y),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_recordings_that_differ_are_told_apart(name):
    """At the second call, which computes with another number, or writes to another array."""
    ends = Tally()
    compiled = nnmpi.compile(lambda x: DIFFERENT[name](x, drawn(ends)))
    x = np.arange(3.0) + 1
    for call in range(1, 6):
        ends_now = float(ends.call_count + 1)
        np.testing.assert_array_equal(compiled(x).data, DIFFERENT[name](Tensor(x), ends_now).data)
        assert compiled.recordings == (call == 1 and not compiled.refusal)


def test_a_recording_after_a_change_needs_another_one_that_is_the_same():
    """The first call changes what the second one finds, and both compute with other numbers."""
    ends, noted = Tally(), []

    def step(x):
        noted[:] = [1]
        return x * drawn(ends)

    compiled = nnmpi.compile(step)
    assert [compiled(np.ones(1)).item() for _ in range(5)] == [1, 2, 3, 4, 5]


def test_the_difference_is_named_with_the_users_line():
    ends = Tally()

    def step(x):
        return (x + 1) * drawn(ends)

    compiled = nnmpi.compile(step)
    compiled(np.ones(2))
    with pytest.warns(UserWarning, match=r"; it is not replayed$"):
        compiled(np.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        compiled(np.ones(2))
    line = step.__code__.co_firstlineno + 1
    assert compiled.refusal == (
        "the step computes with what changes from call to call: call 1: multiply(%0[2], 1.0,"
        f" out=%1[2]) is now multiply(%0[2], 2.0, out=%1[2]), at tests/nn/test_recorded.py:{line}"
    )


def test_programs_of_two_versions_are_compared():
    """By calls alone: the models are two."""
    programs = []
    for factor in (1.0, 1.0, 2.0):
        model = models.mlp([4], 3, [5]).initialize(seed=int(factor))
        optimizer = optim.Adam(model.storage, lr=0.1)

        def step(x, y, model=model, optimizer=optimizer, factor=factor):
            model.zero_grad()
            loss = ops.cross_entropy(model(x) * factor, y)
            loss.backward()
            optimizer.step()
            return loss

        compiled = nnmpi.compile(step)
        for _ in range(2):
            compiled(np.ones((2, 4), "float32"), np.array([0, 1]))
        programs.append(compiled.program)
    assert programs[0].difference(programs[1]) == ""
    assert ", 1.0, out=" in programs[0].difference(programs[2])
    assert ", 2.0, out=" in programs[0].difference(programs[2])
