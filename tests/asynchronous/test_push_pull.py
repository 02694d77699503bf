"""Push and pull: in step equal to sequence, out of step every task once, ends properly."""

import gc
import hashlib
import sys

import numpy as np
import pytest

from nnmpi import models, ops, simulate
from nnmpi.asynchronous.consistency import Task
from nnmpi.asynchronous.server import MessageBuffer, ParameterServer, Push, PushPull
from nnmpi.backend.backend import numpy_backend
from nnmpi.base import clock
from nnmpi.base.errors import CommError
from nnmpi.base.shard import part
from nnmpi.comm import buffers
from nnmpi.comm.synchrony.sync import Bound
from nnmpi.tensor import Tensor
from tests.device.library import device_backend
from tests.harness.refusals import refuses
from tests.worker_options import sgd

SEGMENTS = ((0, 3), (3, 4), (4, 4), (4, 6))


def new_model(backend=None, hidden=7):
    return models.mlp((5,), 3, hidden=(hidden,)).initialize(
        seed=0, dtype="float64", backend=backend
    )


def rows_of(batch):
    """Return the size of a batch: the parts differ, and on many ranks some are empty."""
    return 13 if batch % 3 else 5


def push_of(model, task, parts, backend, **more):
    """Let `storage.grads` be the gradient of a task; return what comes with it."""
    draw, rows = np.random.default_rng(task.batch), rows_of(task.batch)
    x, y = draw.standard_normal((rows, 5)), draw.integers(0, 3, rows)
    mine = part(rows, parts, task.part)
    model.zero_grad()
    if mine:
        taken = slice(mine.start, mine.stop)
        logits = model(Tensor(backend.asarray(x[taken])))
        ops.cross_entropy(logits, backend.asarray(y[taken]), reduction="sum").backward(
            np.full((), 1 / rows)
        )
    model.storage.finish_gradients()
    lr = 0.1 / (1 + task.batch)
    about = {"samples": len(mine), "targets": len(mine), "global_targets": rows, "lr": lr, **more}
    return Push(batch=task.batch, part=task.part, **about)


def serial_weights(batches, hidden=7):
    """Return the weights after so many updates, each with a whole batch's gradient."""
    model = new_model(hidden=hidden)
    optimizer = sgd(model, momentum=0.9)
    for batch in range(batches):
        optimizer.lr = push_of(model, Task(batch, 0), 1, numpy_backend()).lr
        optimizer.step()
    return model.storage.data[0].copy()


class Run:
    """Training in segments. `early` says what is the matter with the last rank's gradient of a
    step.

    Attributes:
        weights: at the end, on the host.
        arrivals: on rank 0, (worker, task) of every gradient in the order in which it got them, by
            segment.
        traffic: (messages, bytes) that this rank sent, by segment.
        updates: on rank 0, by segment.
        leads: the longest, by segment.
    """

    def __init__(
        self, group, bound, segments=SEGMENTS, delays=0, early=None, backend=None, hidden=7
    ):
        backend, early = numpy_backend() if backend is None else backend, early or {}
        model, self.arrivals = new_model(backend, hidden), []
        optimizer = sgd(model, momentum=0.9)
        server = ParameterServer(model.storage, optimizer, group.size) if group.is_root else None

        def note(worker, push):
            self.arrivals[-1].append((worker, Task(push.batch, push.part)))

        talk = PushPull(group, model.storage, server, note, backend)
        self.traffic, self.updates, self.leads = [], [], []
        step, draw = 0, np.random.default_rng((delays, group.rank))
        for span in model.storage.spans:
            span.parameter.hook = lambda parameter: talk.poll() and None
        for first, stop in segments:
            self.arrivals.append([])
            talk.open(first, stop, None if bound is None else Bound(bound))
            while (task := talk.pull()) is not None:
                more = early.get(step, {}) if group.rank == group.size - 1 else {}
                push = push_of(model, task, group.size, backend, **more)
                if delays and draw.random() < 0.5:
                    talk.serve_until(clock.now() + draw.exponential(0.002))
                talk.push(push)
                step += 1
            talk.finish()
            self.traffic.append((talk.messages, talk.bytes))
            if server is not None:
                self.updates.append(server.version - sum(self.updates))
                self.leads.append(server.controller.longest_lead)
        talk.free()
        self.weights = np.array(backend.to_host(model.storage.data[0]))
        digests = group.gather(hashlib.blake2b(self.weights.tobytes()).hexdigest())
        assert len(set(digests)) == 1
        self.digest = digests[0]


def all_tasks(first, stop, parts):
    return [Task(batch, number) for batch in range(first, stop) for number in range(parts)]


def everywhere(group, right):
    return all(group.gather(bool(right)))


@pytest.mark.both_worlds(max_size=8)
def test_in_step_it_is_the_serial_run(group):
    """However slow the ranks are, the weights are the same bits, and those of whole batches but for
    rounding.
    """
    runs = [Run(group, 0, delays=delays) for delays in (0, 1)]
    assert len({run.digest for run in runs}) == 1
    assert everywhere(
        group, np.allclose(runs[0].weights, serial_weights(6), rtol=1e-11, atol=1e-13)
    )
    assert runs[0].updates == ([3, 1, 0, 2] if group.is_root else [])


@pytest.mark.both_worlds(max_size=8)
@pytest.mark.parametrize("bound", [1, 3, None])
def test_every_task_is_used_once_and_nobody_is_too_far_ahead(group, bound):
    run = Run(group, bound, delays=1 if bound is None else bound)
    right = True
    if group.is_root:
        result = [sorted(task for _, task in segment) for segment in run.arrivals]
        right = result == [all_tasks(*segment, group.size) for segment in SEGMENTS]
        right = right and (bound is None or max(run.leads) <= bound)
    assert everywhere(group, right)


UP_TO_8 = pytest.mark.simulated(max_size=8)


@UP_TO_8
@pytest.mark.parametrize("early", [{"signal": 15}, {"broken": True}], ids=str)
@pytest.mark.parametrize("bound", [0, 1, None])
def test_a_segment_that_ends_early_ends_for_everybody(group, early, bound):
    """At a step of the last rank: what was assigned arrives, a signal ends a whole batch, the next
    segment works.
    """
    run = Run(group, bound, ((0, 9), (9, 11)), delays=3, early={2: early})
    right = bool(np.isfinite(run.weights).all())
    if group.is_root:
        first, second = (sorted(task for _, task in segment) for segment in run.arrivals)
        full = -(-len(first) // group.size)
        right = (
            right
            and first == all_tasks(0, full, group.size)[: len(first)]
            and len(first) < 9 * group.size
        )
        right = right and second == all_tasks(9, 11, group.size)
        right = right and ("broken" in early or len(first) == full * group.size)
        right = right and (bound != 0 or len(first) == 3 * group.size)
    assert everywhere(group, right)


@UP_TO_8
def test_messages_and_bytes_are_those_of_the_formula(group):
    """Per step 2 (N-1) of header and weights, and one reply more to begin with."""
    run = Run(group, 0, ((0, 4), (4, 5)), delays=3)
    nbytes, others = new_model().storage.data[0].nbytes, group.size - 1
    header = {"push": 15 * 8, "reply": 3 * 8}
    for number, steps in enumerate((4, 1)):
        messages, sent = (
            sum(item[number][i] for item in group.gather(run.traffic)) for i in range(2)
        )
        pushes, replies = others * steps, others * (steps + 1)
        assert messages == pushes + replies
        assert sent == pushes * (nbytes + header["push"]) + replies * (nbytes + header["reply"])


@pytest.mark.simulated(max_size=4)
def test_on_a_device_it_goes_through_the_host(group):
    host, device = (
        Run(group, 0, backend=backend).weights for backend in (numpy_backend(), device_backend())
    )
    assert everywhere(group, np.allclose(host, device, rtol=1e-12, atol=1e-14))


@pytest.mark.mpi
def test_long_messages_do_not_overtake_one_another(group, monkeypatch):
    """Messages that no MPI buffers, in pieces."""
    monkeypatch.setattr(buffers, "MAX_MESSAGE_BYTES", 100_000)
    run = Run(group, 0, ((0, 4),), delays=5, hidden=9000)
    assert everywhere(
        group, np.allclose(run.weights, serial_weights(4, 9000), rtol=1e-9, atol=1e-12)
    )


def test_messages_leave_no_memory_behind():
    """Nor in Python's lists of free tuples, which a full collection empties."""
    buffer, push = (
        MessageBuffer(Push, [], numpy_backend()),
        Push(batch=7, part=0, samples=7, targets=7, global_targets=9, lr=0.5),
    )
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(500):
        buffer.write(push, [])
        assert buffer.read() == (push, [])
    assert sys.getallocatedblocks() - before < 200


def test_a_segment_that_an_error_ended_is_not_followed_by_another():
    def main(group):
        model = new_model()
        talk = PushPull(group, model.storage, ParameterServer(model.storage, sgd(model), 1))
        talk.open(0, 3, Bound(0))
        assert talk.pull() == Task(0, 0)
        refuses(CommError, "an error ended the last segment", talk.open, 0, 3, Bound(0))

    simulate(main, 1, check=False)
