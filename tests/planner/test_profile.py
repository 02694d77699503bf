"""What is measured of a model's layers is what a pipeline's stages take, by times that are slept."""

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.plan.paced import paired
from nnmpi import clock, nn
from nnmpi.backend.backend import numpy_backend
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import Messages
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Batch
from nnmpi.nn.module import Module
from nnmpi.ops.loss import cross_entropy
from nnmpi.optim.sgd import SGD
from nnmpi.parallel.pipeline.profile import LayerProfile
from nnmpi.planner import profile
from nnmpi.planner.profile import Profile, Workload
from nnmpi.schedule.instruction import Kind
from nnmpi.tensor.tensor import Tensor

LAYER_S, LOSS_S, END_S = 0.02, 0.2, 0.003


class Slow(nn.Linear):
    """A layer that takes its time."""

    def forward(self, x: Tensor) -> Tensor:
        clock.sleep(LAYER_S)
        return super().forward(x)


def slow_loss(logits: Tensor, labels: Any) -> Tensor:
    clock.sleep(LOSS_S)
    return cross_entropy(logits, labels, reduction="sum")


def test_the_last_layer_takes_the_time_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "MEASURE_S", 0.0)
    samples = Dataset("made up", np.ones((4, 3), np.float32), np.zeros(4, np.int64), 3)

    def build() -> Module:
        return nn.Sequential(Slow(3, 3), Slow(3, 3), Slow(3, 3))

    work = Workload(build, lambda s: SGD(s, 0.1), lambda where: {"loss": slow_loss}, samples, 4, 0)
    alone = profile._measure_layers(work, 2, numpy_backend())
    *others, last = profile._in_stages(work, alone, 2, numpy_backend())
    assert last.forward_s > LAYER_S + LOSS_S
    assert all(LAYER_S < layer.forward_s < LOSS_S for layer in others)


def test_layers_share_what_their_stage_took() -> None:
    layers = [LayerProfile("a", 4.0, 1, 1.0, 8, 1.0, 1.0), LayerProfile("b", 8.0, 1, 3.0, 8, 1.0, 3.0)]
    times = {(Kind.F, 1): 8.0, (Kind.B, 1): 4.0, (Kind.I, 1): 6.0, (Kind.W, 1): 2.0, (Kind.F, 0): 99.0}
    first, second = profile._as_stage(layers, times, 1)
    assert (first.forward_s, first.backward_s, first.input_s, first.weights_s) == (2.0, 1.5, 3.0, 0.5)
    assert (second.forward_s, second.backward_s, second.input_s, second.weights_s) == (6.0, 2.5, 3.0, 1.5)
    assert first.value_bytes == 8
    assert list(profile._as_stage(layers, {}, 0)) == layers  # what was not measured stays


def test_what_pipelines_take_besides_computing_is_measured_by_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By seconds that are slept: those of layers and updates are not in it. Of 3 ranks one looks on."""
    samples = Dataset("made up", np.ones((4, 3), np.float32), np.zeros(4, np.int64), 3)
    send, ready, late_s = Messages.send, profile.ready_worker, 0.5

    def slow_send(self: Messages, *args: Any) -> Any:
        clock.sleep(2 * END_S)
        return send(self, *args)

    def late(*args: Any) -> Any:
        worker = ready(*args)
        step, update = worker.step, worker.optimizer.step

        def slow_step(batch: Batch) -> Any:
            found = step(batch)
            clock.sleep(late_s)
            return found

        def slow_update(*args: Any) -> Any:
            clock.sleep(LOSS_S)
            return update(*args)

        worker.step, worker.optimizer.step = slow_step, slow_update
        return worker

    monkeypatch.setattr(Messages, "send", slow_send)
    monkeypatch.setattr(profile, "ready_worker", late)

    def measured(layers: int) -> list[Any]:
        def build() -> Module:
            return nn.Sequential(*(Slow(3, 3) for _ in range(layers)))

        work = Workload(build, lambda s: SGD(s, 0.1), lambda where: {"loss": slow_loss}, samples, 4, 0)
        run = partial(profile._measure_around, workload=work, rows=2, backend=numpy_backend())
        return simulate(run, 3, cpu_factor=0.0)

    assert measured(layers=1) == [None] * 3  # there is nothing to cut
    found = measured(layers=4)
    assert found == [found[0]] * 3
    assert found[0] == pytest.approx((END_S, late_s), rel=1e-6)


def test_ends_of_messages_are_told_for_any_number_of_rows() -> None:
    assert Profile({}, {}, {}, ends_s={8: 1.0, 16: 2.0}).end_s(12) == 1.5
    assert Profile({}, {}, {}, ends_s={8: 1.0}).end_s(64) == 1.0


@pytest.mark.host_only("the time of processors")
def test_a_crowd_is_measured_by_the_processors_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks without a core each; how long they wait for one is kept beside it."""
    monkeypatch.setattr(profile, "MEASURE_S", 0.0)
    samples = Dataset("made up", np.ones((4, 3), np.float32), np.zeros(4, np.int64), 3)
    work = Workload(lambda: nn.Sequential(Slow(3, 3)), lambda s: SGD(s, 0.1), lambda where: {}, samples, 4, 0)
    found = {}
    for crowding in (1.0, 3.0):
        monkeypatch.setattr(profile, "_measure_crowding", lambda group, crowding=crowding: crowding)
        (found[crowding],) = simulate(lambda group: profile.measure(work, group, 1, (), numpy_backend(), rounds=1), 1)
        assert Profile.from_json(found[crowding].to_json()).crowding == crowding
    assert found[1.0].seconds((1, 1), 4) > LAYER_S > found[3.0].seconds((1, 1), 4)


@pytest.mark.host_only("the time of processors")
def test_one_rank_alone_is_no_crowd_and_threads_on_one_core_are() -> None:
    alone: Any = SimpleNamespace(size=1, barrier=lambda: None, sum_floats=lambda values: values)
    assert profile._measure_crowding(alone) == 1.0
    ended = threading.Event()
    others = [threading.Thread(target=spin, args=(ended,), daemon=True) for _ in range(2)]
    for each in others:
        each.start()
    try:
        assert profile._measure_crowding(alone) > 2  # as each has the interpreter for a third of the time
    finally:
        ended.set()
        for each in others:
            each.join()
    assert simulate(profile._measure_crowding, 2) == [1.0, 1.0]  # which can be repeated


def spin(ended: threading.Event) -> None:
    while not ended.is_set():
        pass


def test_a_machine_that_changes_between_rounds_is_no_error() -> None:
    rounds = [{"step_s": 1.1 * speed, "took_s": speed} for speed in (1.0, 7.0, 3.0)]
    assert paired(rounds) == pytest.approx(0.1)


def test_rounds_end_for_all_ranks_where_one_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "PATIENCE_S", 10.0)

    def count(group: Group) -> tuple[int, int]:
        done = [0, 0]
        for which, always in enumerate((1, 4)):
            for _ in profile._rounds(group, 6, always):
                clock.sleep(4.0 if group.rank == 1 else 0.1)
                done[which] += 1
        return done[0], done[1]

    assert simulate(count, 3, cpu_factor=0.0) == [(3, 4)] * 3
    assert simulate(count, 1, cpu_factor=0.0) == [(6, 6)]


def test_a_slow_model_is_measured_for_few_rows_on_simulated_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewest rows, and the most that are not slow; what else pipelines' layers take is told from these."""
    monkeypatch.setattr(profile, "MEASURE_S", 0.0)
    monkeypatch.setattr(profile, "PATIENCE_S", 0.0)
    samples = Dataset("made up", np.ones((16, 4), np.float32), np.zeros(16, np.int64), 4)

    def build() -> Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        model.sharding = {"0": nn.Sharding.COLUMN, "2": nn.Sharding.ROW}
        return model

    work = Workload(build, lambda s: SGD(s, 0.1), lambda where: {}, samples, 16, 0)

    def look(group: Group) -> Profile:
        return profile.measure(work, group, 2, [(2, 1)], numpy_backend())

    (found,) = simulate(look, 1)
    assert sorted(found.steps[1, 1]) == [1, 2, 4, 8, 16]
    assert sorted(found.layers) == sorted(found.steps[2, 1]) == [1, 16]
    assert set(found.zero_s) == {1, 2, 3}
