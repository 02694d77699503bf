"""What has changed since a step's last audit is found when the step is dropped or its program ends,
and finding it leaves nothing behind.
"""

import ctypes
import gc
import random
import sys

import numpy as np
import pytest

import nnmpi
from nnmpi import models, nn, ops, optim
from nnmpi.base import ending
from nnmpi.base.errors import UsageError
from nnmpi.nn import compiled
from tests.harness.job import run
from tests.nn.idioms import Reads, sources
from tests.worker_options import sgd, work

pytestmark = [
    pytest.mark.host_only("a device's graphs cannot be compared"),
    pytest.mark.filterwarnings("ignore:the step computes with:UserWarning"),
]
CHANGED_AT, CALLS = 17, 30  # after the last early audit, before the next one

PROGRAM = """
import atexit, os
import numpy as np
import nnmpi
from nnmpi import nn, ops

os.environ["STEP_RATE"] = "1.0"
atexit.register(print, "the last words")
group = nnmpi.start()
model = nn.Linear(4, 3).initialize(seed=0)
parallel = nnmpi.DataParallel(model, group)


@nnmpi.compile
def step(x, y):
    model.zero_grad()
    loss = ops.cross_entropy(model(x) * float(os.environ["STEP_RATE"]), y, reduction="sum")
    parallel.backward(loss, samples=8 * group.size)
    return loss


for call in range(30):
    if call == CHANGED_AT:
        os.environ["STEP_RATE"] = "2.0"
    step(np.ones((8, 4), "f4"), np.zeros(8, int))
print("the program's end", flush=True)
"""


@pytest.fixture
def said(monkeypatch):
    """What is printed at the end, and would end the program."""
    errors = []
    monkeypatch.setattr(compiled, "fail_at_end", lambda error: errors.append(str(error)))
    yield errors
    gc.collect()  # a Worker and its passes refer to each other


def stepping(read):
    """Return a compiled step that computes with a number, and a function that calls it."""
    model = models.mlp([4], 3, [5]).initialize(seed=0)
    optimizer, rows = optim.Adam(model.storage, lr=0.1), np.random.default_rng(0)

    @nnmpi.compile
    def step(x, y):
        model.zero_grad()
        loss = ops.cross_entropy(model(x) * read(), y)
        loss.backward()
        optimizer.step()
        return loss

    def once():
        with nn.training(step=optimizer.steps):
            return step(rows.normal(size=(6, 4)).astype("f4"), rows.integers(0, 3, 6)).item()

    return step, once, model, optimizer


@pytest.mark.parametrize("drops", [False, True])
def test_what_has_changed_since_the_last_audit_is_said_at_the_end(drops, said, tmp_path):
    """Each source of `idioms`: the number is seen in that call, or the end says so."""
    seen = {}
    gc.collect()
    gc.freeze()  # else the objects of all tests would be searched for cycles, sixty times
    for name in sources(tmp_path):
        found = []
        for way in ("eager", "compiled"):
            read, put = sources(tmp_path)[name]
            step, once, *_ = stepping(read)
            losses = []
            for call in range(1, CALLS + 1):
                put(3.0 if call >= CHANGED_AT else 1.0)
                losses.append(once() if way == "compiled" else eager(step, once))
            found.append(losses)
            said.clear()
            if drops:
                del step, once
                gc.collect()
            else:
                step.compare_at_end()
        seen[name] = bool(said)
        right = found[0] == found[1]
        assert right != bool(said), (name, said)
        if said:
            (sentence,) = said
            assert "calls since number 17 may have used an old value" in sentence
    own = ["a loader", "a variable", "a global", "a dictionary", "an object", "a short array"]
    assert not any(seen[name] for name in own), "these are looked at before each replay"
    assert sum(seen.values()) >= 4


def eager(step, once):
    """Return the loss of a step that is not replayed."""
    step._held.clear()
    step._known.clear()
    return once()


def test_nothing_is_said_where_nothing_has_changed(said):
    step, once, *_ = stepping(lambda: 1.0)
    for _ in range(CALLS):
        once()
    step.compare_at_end()
    del step, once
    assert not said


def test_nothing_is_left_behind(said):
    """Weights, gradients, the optimizer's state and flags, running statistics, the mode."""
    number = ctypes.c_double(1.0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3))
    model.initialize(seed=0)
    optimizer, average = optim.Adam(model.storage, lr=0.1), np.zeros(3, "f4")
    loose = nnmpi.Tensor(np.ones(4, "f4"), requires_grad=True)

    @nnmpi.compile
    def step(x, y):
        loss = ops.cross_entropy(model(x * loose) * number.value, y)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        np.copyto(average, model[3].bias.data)
        return loss

    for _ in range(CALLS):
        loose.grad = None
        with nn.training(step=optimizer.steps):
            step(np.random.default_rng(0).normal(size=(6, 4)).astype("f4"), np.arange(6) % 3)

    def everything():
        slots = [array for arrays in optimizer.slots().values() for array in arrays]
        buffers = [buffer.data for _, buffer in model.named_buffers()]
        arrays = [*model.storage.data, *model.storage.grads, *slots, *buffers, average, loose.grad]
        flags = {n: x for n, x in vars(model.storage).items() if isinstance(x, bool | int | tuple)}
        return [array.tobytes() for array in arrays], optimizer.steps, flags, nn.current()

    before, grad = everything(), loose.grad
    number.value = 2.0
    step.compare_at_end()
    assert len(said) == 1
    assert everything() == before
    assert loose.grad is grad


def test_it_waits_for_no_other_rank(said):
    """Ranks drop their steps at different times, some within another's wait."""

    def program(group):
        number, model = ctypes.c_double(1.0), models.mlp([4], 3, [5]).initialize(seed=0)
        parallel, optimizer = nnmpi.DataParallel(model, group), sgd(model)

        @nnmpi.compile
        def step(x, y):
            model.zero_grad()
            loss = ops.cross_entropy(model(x) * number.value, y, reduction="sum")
            group.barrier()
            parallel.backward(loss, samples=6 * group.size)
            optimizer.step()
            return loss

        for _ in range(CALLS):
            with nn.training(step=optimizer.steps):
                step(np.ones((6, 4), "f4"), np.arange(6) % 3)
        number.value = 2.0
        if group.rank:
            step.compare_at_end()
        group.barrier()
        return step.recordings

    nnmpi.simulate(program, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_whose_layer_is_ones_own(ranks, said, tmp_path):
    read, put = sources(tmp_path)["of C"]

    def program(group):
        model = nn.Sequential(Reads(read, lambda x, n: x * n), nn.Linear(4, 2))
        worker = work(model.initialize(seed=0), group)
        for call in range(CALLS):
            group.barrier()
            put(2.0 if call >= CHANGED_AT + 3 else 1.0)  # a Worker records its third pass
            group.barrier()
            worker.step(np.ones((6, 4), "f4"), np.arange(6) % 2)
        replay = worker.passes.replay
        assert not replay.explain()
        replay.compare_at_end()

    nnmpi.simulate(program, ranks)
    assert said
    assert "the model computes with what changes" in said[0]


def test_a_worker_of_layers_of_nnmpi_alone_is_recorded_twice_and_not_compared(said, monkeypatch):
    made, once = [], compiled.Recording.__init__
    monkeypatch.setattr(
        compiled.Recording, "__init__", lambda *args: (made.append(1), once(*args))[1]
    )

    def program(group):
        worker = work(models.mlp([4], 3, [5]).initialize(seed=0), group)
        for _ in range(40):
            worker.step(np.ones((6, 4), "f4"), np.arange(6) % 3)
        assert worker.passes.replay.replays == 36
        worker.passes.replay.compare_at_end()

    nnmpi.simulate(program, 1)
    assert len(made) == 2


@pytest.mark.parametrize("changed_at", [17, 99])
def test_a_program_ends_with_the_error_and_its_status(changed_at, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.replace("CHANGED_AT", str(changed_at)))
    ended = run([sys.executable, "program.py"], tmp_path / "output", 60, cwd=tmp_path)
    lines = ended.output.splitlines()
    # the last ones are of a function that `atexit` calls later
    assert (lines[0], lines[-1]) == ("the program's end", "the last words")
    if changed_at == 99:
        assert (ended.status, len(lines)) == (0, 2)
        return
    assert ended.status == UsageError.exit_status
    assert ended.output.count("nnmpi: the step computes with what changes from call to call") == 1
    assert ended.output.count("may have used an old value") == 1


def test_an_error_is_printed_once(capsys, monkeypatch):
    class Said:
        said = set()

    monkeypatch.setattr(sys, ending.NAME, Said, raising=False)
    for _ in range(2):
        ending.fail_at_end(UsageError("this is wrong"))
    assert capsys.readouterr().err == "nnmpi: this is wrong\n"


def settings(group):
    """Return objects of nnmpi's own that hold settings: a number of theirs, and what changes it."""
    dataset = nnmpi.data.Dataset("d", np.ones((90, 2), "f4"), np.zeros(90, int), 2)
    loader = nnmpi.data.Loader(dataset, 5, workers=0)
    plateau = optim.ReduceOnPlateau(0.5, factor=0.1, patience=0)
    drop, held = nn.Dropout(0.25), {"schedule": optim.Cosine(0.5, total=40)}
    return {
        "a plateau": (lambda: plateau.lr, lambda: (plateau(1.0), plateau(2.0))),
        "its patience": (lambda: plateau.patience + 1, lambda: setattr(plateau, "patience", 4)),
        "a loader": (lambda: loader.batch_size, lambda: setattr(loader, "batch_size", 7)),
        "its data set": (lambda: len(loader.dataset), lambda: setattr(loader, "dataset", short())),
        "its flag": (lambda: 1 + loader.shuffle, lambda: setattr(loader, "shuffle", False)),
        "its batches": (lambda: len(loader), lambda: setattr(loader, "batch_size", 45)),
        "samples": (lambda: float(dataset.x[3, 1]), lambda: dataset.x.__setitem__(3, 2.0)),
        "labels": (lambda: 1 + int(dataset.y[3]), lambda: dataset.y.__setitem__(3, 1)),
        "a layer": (lambda: drop.p, lambda: setattr(drop, "p", 0.5)),
        "a schedule": (
            lambda: held["schedule"](3),
            lambda: held.update(schedule=optim.ConstantRate(0.1)),
        ),
    }


def short():
    """Return another data set."""
    return nnmpi.data.Dataset("e", np.ones((30, 2), "f4"), np.zeros(30, int), 2)


@pytest.mark.parametrize("name", settings(None))
def test_settings_of_nnmpis_own_objects_are_seen_in_the_call(name, said):
    found = []
    for way in ("eager", "compiled"):
        random.seed(0)
        read, change = settings(None)[name]
        step, once, *_ = stepping(read)
        losses = []
        for call in range(1, CALLS + 1):
            if call == CHANGED_AT:
                change()
            losses.append(once() if way == "compiled" else eager(step, once))
        found.append(losses)
        if way == "compiled":
            assert step.recordings == 1
            assert not step.refusal
            step.compare_at_end()
    assert found[0] == found[1]
    assert not said
