"""How often the host waits for a device in a step: once, where ranks exchange nothing. By CuPy's
own account.
"""

from collections import Counter
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

import nnmpi
from nnmpi import (
    AsynchronousWorker,
    Layout,
    Numerics,
    Sync,
    Tensor,
    Worker,
    arrange,
    jit,
    models,
    nn,
    ops,
    optim,
)
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.errors import DivergenceError, ShapeError
from nnmpi.comm import buffers, execution
from nnmpi.compose import scalars
from nnmpi.data import Loader, Normalize
from nnmpi.nn import training
from nnmpi.optim import clip
from tests.equivalence.reference import digits
from tests.gpu.conftest import is_stand_in
from tests.gpu.play import no_waiting
from tests.harness.refusals import refuses
from tests.nn.test_compiled import step_of
from tests.worker_options import grouped


@contextmanager
def watched(backend, monkeypatch):
    """Count the waits that are asked for, and refuse those that nobody asks for.

    CuPy's switch takes every copy to the host for a wait; what makes such copies without one is
    left out.
    """
    counts = Counter()
    cuda = backend.xp.cuda
    with monkeypatch.context() as patch, no_waiting():
        for place, function in (
            (buffers, "fetch"),
            (execution, "fetch"),
            (scalars, "start_fetch"),
            (clip, "_read"),
        ):
            patch.setattr(place, function, _allowed(getattr(place, function)))
        for name, kind in (("stream", cuda.stream._BaseStream), ("event", cuda.Event)):
            patch.setattr(kind, "synchronize", _counted(counts, name, kind.synchronize))
        yield counts


def _allowed(function):
    def call(*args):
        with no_waiting(False):
            return function(*args)

    return call


def _counted(counts, name, function):
    def synchronize(self):
        counts[name] += 1
        function(self)

    return synchronize


def worker(backend, group, build=models.mlp, **options):
    dataset = digits()
    model = build(dataset.sample_shape, dataset.classes).initialize(seed=0, backend=backend)
    return Worker(model, optim.Adam(model.storage), group, backend=backend, **grouped(**options))


@pytest.mark.parametrize(
    "build", [models.mlp, models.cnn, partial(models.resnet, width=2)], ids=["mlp", "cnn", "resnet"]
)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_few_waits_a_step(real_device, group, monkeypatch, build, microbatches):
    """For its numbers, and for the gradient's norm; not for forward, backward and update."""
    item = worker(real_device, group, build, clip=0.1)
    loader = Loader(digits(), 12, microbatches=microbatches, transform=Normalize.fit(digits()))
    given = loader.epoch(0, backend=item.backend)
    item.step(next(given))
    for _ in range(2):
        with watched(real_device, monkeypatch) as counts:
            report = item.step(next(given))
        assert counts["stream"] <= 3
        assert np.isfinite(report.loss) and 0 <= report.accuracy <= 1 and report.grad_norm > 0
    given.close()


def test_one_wait_an_evaluation(real_device, group, monkeypatch):
    """However many batches it has; the loader waits for its copies, of two batches before."""
    item = worker(real_device, group)
    loader = Loader(digits(), 16, workers=0)
    given = loader.epoch(0, backend=item.backend)
    with watched(real_device, monkeypatch) as counts:
        report = item.evaluate(given)
    assert report.samples == len(digits())
    assert counts["stream"] <= 2  # the other one is the loader's, at its end
    given.close()


def test_one_wait_for_a_gradient_of_ones_own(real_device, group, monkeypatch):
    """Where workers do not go in step."""
    dataset, backend = digits(), real_device
    model = models.mlp(dataset.sample_shape, dataset.classes).initialize(seed=0, backend=backend)
    numerics = Numerics(clip=0.1)
    sgd = optim.SGD(model.storage, 0.1)
    item = AsynchronousWorker(model, sgd, group, Sync("asp"), backend=backend, numerics=numerics)
    batch = next(Loader(dataset, 32, microbatches=2).epoch(0, backend=backend))
    item.compute(batch, 0)
    with watched(real_device, monkeypatch) as counts:
        report = item.compute(batch, 1)
    assert counts["stream"] <= 3 and report.grad_norm > 0


@pytest.mark.mpi
@pytest.mark.parametrize("number", range(4))
def test_nobody_waits_without_a_word(real_device, group, monkeypatch, number):
    """Where ranks exchange arrays, messages wait for their copies, and say so."""
    layout = [
        Layout(),
        Layout(pp=group.size, dp=1),
        Layout(tp=group.size, dp=1),
        Layout(reduction="fixed"),
    ][number]
    dataset, backend = digits(), real_device
    model = models.mlp(dataset.sample_shape, dataset.classes, hidden=(16, 12, 8, 8))
    where = arrange(
        model, group, layout, np.zeros((4, *dataset.sample_shape), "float32"), "float32", backend
    )
    model = where.model.initialize(seed=0, backend=backend)
    item = Worker(
        model,
        optim.Adam(model.storage),
        group,
        backend=backend,
        arrangement=where,
        numerics=Numerics(clip=0.5),
    )
    loader = Loader(
        dataset, 24, where, microbatches=4, whole_microbatches=layout.fixed_order, workers=0
    )
    given = loader.epoch(0, backend=backend)
    item.step(next(given))
    with watched(real_device, monkeypatch) as counts:
        report = item.step(next(given))
    given.close()
    assert np.isfinite(report.loss)
    assert counts["stream"] or not model.storage.grads  # each copy between ranks is waited for
    item.release()


@pytest.mark.parametrize("rows", [6, 0])
def test_statistics_over_ranks_are_the_hosts(real_device, monkeypatch, rows):
    """They are not waited for where the sum does not; an empty batch changes no running
    statistics.
    """
    x = np.random.default_rng(0).standard_normal((rows, 5)).astype("float32")
    result = []
    for backend in (real_device, numpy_backend()):
        model = nn.Sequential(nn.BatchNorm(5)).initialize(backend=backend)
        model[0].all_reduce = lambda array: array * 2  # another rank has the same rows
        given, seed = (
            Tensor(backend.asarray(x), requires_grad=True),
            backend.asarray(x[::-1].copy()),
        )
        with watched(real_device, monkeypatch), training(0, 0, 0):
            y = model(given)
            y.backward(seed)
        arrays = [
            y.data,
            given.grad,
            *(parameter.grad for parameter in model.parameters()),
            *(buffer.data for _, buffer in model.named_buffers()),
        ]
        result.append([backend.to_host(array) for array in arrays])
    for ours, theirs in zip(*result, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    if not rows:
        assert not result[0][-2].any() and (result[0][-1] == 1).all()


def test_a_label_that_is_no_class_is_found_on_the_host(real_device, group):
    """The kernel cannot say so; the error names the row."""
    item = worker(real_device, group)
    batch = next(Loader(digits(), 8).epoch(0, backend=item.backend))
    batch.labels[5] = 11
    refuses(ShapeError, r"label 11 in row 5 of the batch is outside 0\.\.9", item.step, batch)


def test_an_index_without_a_row_is_found_on_the_host(real_device, group):
    """Before it goes to the device."""
    backend = real_device
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3)).initialize(
        backend=backend
    )
    item = Worker(model, optim.SGD(model.storage, lr=0.1), group, backend=backend)
    (batch,) = Loader(digits(), len(digits()), shuffle=False, workers=0).epoch(0)
    indices = np.zeros((len(batch.y), 3), np.int64)
    indices[4, 1] = 7
    object.__setattr__(batch, "x", indices)
    refuses(ShapeError, r"index 7 in row 4 of the batch is outside 0\.\.6", item.step, batch)


def test_a_loss_that_is_not_finite_changes_no_weight(real_device, group):
    """It is found when the step's numbers are read, before the update, and its place is told."""
    item = worker(real_device, group)
    before = item.model.state()
    batch = next(Loader(digits(), 8).epoch(0, backend=item.backend))
    batch.x[3] = float("nan")
    refuses(
        DivergenceError,
        "values that are not finite were first found in the input on rank 0",
        item.step,
        batch,
    )
    np.testing.assert_equal(item.model.state(), before)


def test_an_update_is_not_fused_on_a_device(real_device, group):
    """It works in memory that the ranks of a node share."""
    item = worker(real_device, group, fused_update=True)
    assert "not fused: the weights are on a device" in item.notice


def test_kernels_that_are_switched_off_are_recorded_apart(real_device):
    """As on the host: within `jit(False)` a step is another one."""
    step = nnmpi.compile(lambda x: ops.softmax(x))
    x = real_device.asarray(np.linspace(0, 1, 12, dtype="float32").reshape(3, 4))
    first = [step(x) for _ in range(2)][-1]  # the second call is captured
    with jit(False):
        second = [step(x) for _ in range(2)][-1]
    assert step.recordings == 2
    np.testing.assert_allclose(
        real_device.to_host(first.data), real_device.to_host(second.data), rtol=1e-6
    )


def test_a_replay_makes_few_calls(real_device):
    """It launches graphs and an update, however many kernels they are."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).initialize(
        backend=real_device
    )
    update = optim.Adam(model.storage)

    compiled = nnmpi.compile(step_of(model, update=update.step))
    x, y = (
        real_device.asarray(np.ones((4, 6), "float32")),
        real_device.asarray(np.zeros(4, "int64")),
    )
    compiled(x, y)
    compiled(x, y)  # captured
    with no_waiting():
        compiled(x, y)
    assert 0 < compiled.calls < 15


@contextmanager
def traffic(backend, monkeypatch):
    """Count the copies to and from the stand-in for a device, and the waits for it."""
    counts = Counter()
    xp = backend.xp

    def counted(owner, name, kind, host_only=False):
        function = getattr(owner, name)

        def call(*args, **options):
            if not host_only or isinstance(args[0], np.ndarray):
                counts[kind] += 1
            return function(*args, **options)

        patch.setattr(owner, name, call)

    with monkeypatch.context() as patch:
        for name in ("get", "item", "tolist", "__bool__", "__float__", "__int__"):
            counted(xp.ndarray, name, "read")
        counted(xp, "asnumpy", "read")
        counted(xp.ndarray, "set", "sent")
        for name in ("asarray", "array"):
            counted(xp, name, "sent", host_only=True)
        for kind in (xp.cuda.Stream, xp.cuda.Event):
            counted(kind, "synchronize", "wait")
        yield counts


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("build", [models.mlp, models.cnn], ids=["mlp", "cnn"])
def test_a_step_sends_nothing_and_reads_once(device, group, monkeypatch, build, resident):
    """Of a data set that is there; of any other, its two arrays, not waited for."""
    if not is_stand_in(device):
        pytest.skip("copies are counted on the stand-in")
    monkeypatch.setattr("nnmpi.data.loader.RESIDENT_SHARE", float(resident))
    # where there is a kernel, the Worker checks the labels, on the host
    monkeypatch.setattr("nnmpi.ops.loss._check_labels", lambda *args: None)
    item = worker(device, group, build, clip=0.1)
    loader = Loader(digits(), 16, transform=Normalize.fit(digits()))
    steps = len(loader)

    def epoch(number):
        item.run(loader, number, 0, steps, step=number * steps, lr=lambda step: 0.1)

    for number in range(3):  # the short last batch is captured in the third epoch
        epoch(number)
    with traffic(device, monkeypatch) as counts:
        epoch(3)
    assert counts["read"] == steps
    # besides, for the copy of the third batch before, which is long done
    more = 0 if resident else steps
    assert counts["wait"] == steps + more
    # indices, labels, mean and standard deviation, for twice as many batches each time
    assert counts["sent"] <= (4 * steps.bit_length() if resident else 2 * steps)
    with traffic(device, monkeypatch) as counts:
        item.evaluate(loader.epoch(2, backend=device))
    assert counts["read"] == 1 and counts["wait"] == 1 + more
