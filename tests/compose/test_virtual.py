"""Many workers in virtual time have the weights of the runs that they stand for, the same ones each time."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nnmpi import models
from nnmpi.backend.array import Array
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.comm.group import Group
from nnmpi.compose.asynchronous import AsynchronousWorker
from nnmpi.compose.replicas import LocalGradient
from nnmpi.compose.simulated_cluster import WorkerStatistics
from nnmpi.compose.trainer import Progress, Throttle
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.errors import CheckpointError, DivergenceError, UsageError
from nnmpi.ops.loss import cross_entropy
from nnmpi.synchrony.network import LinkSpeed
from nnmpi.synchrony.sync import Sync
from tests.compose.virtual_runs import (
    BATCH,
    BATCHES,
    EVERY_MODE,
    ROWS,
    SPEED,
    build,
    dataset,
    make,
    optimizer_of,
    run,
    same,
    serial,
    state,
    weights,
)
from tests.device.library import device_backend


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_synchronous_run_is_the_serial_one_bit_for_bit(group: Group, name: str, dtype: str) -> None:
    options = {"dtype": dtype, "norm": True, "dropout": 0.2}
    worker = make(group, Sync(), name=name, model=build(**options), clip=0.5)
    run(worker, 2)
    expected = serial(group, name, 2, build(**options), clip=0.5)
    assert all(np.array_equal(values, expected.state()[key]) for key, values in worker.model.state().items())


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_ssp_of_0_is_bsp_for_any_speeds_and_the_serial_run_but_for_rounding(group: Group, name: str) -> None:
    bsp = make(group, Sync("bsp", servers=1), name=name)
    ssp = make(
        group, Sync("ssp", staleness=0), name=name, straggler="rank=2,factor=2.5;random,probability=0.4,factor=3"
    )
    cut = make(group, Sync("bsp", servers=3, dedicated=True), name=name, network=SPEED)
    for each in (bsp, ssp, cut):
        assert all(report.staleness is not None and report.staleness.largest() == 0 for report in run(each, 2))
    assert np.array_equal(weights(bsp.model), weights(ssp.model))
    assert np.array_equal(weights(bsp.model), weights(cut.model))
    np.testing.assert_allclose(weights(bsp.model), weights(serial(group, name, 2)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_asp_with_one_worker_is_the_serial_run_bit_for_bit(group: Group, name: str) -> None:
    worker = make(group, Sync("asp"), 1, name, network=SPEED, model=build(norm=True, dropout=0.2))
    run(worker, 2)
    expected = serial(group, name, 2, build(norm=True, dropout=0.2)).state()
    assert all(np.array_equal(values, expected[key]) for key, values in worker.model.state().items())
    assert worker.optimizer.steps == 2 * BATCHES and worker.now_s == 2 * BATCHES


def test_workers_that_see_the_same_do_the_same(group: Group) -> None:
    """Each with an optimizer's state of its own: as one, whatever the others do."""
    data = dataset(BATCH)
    alike = Dataset("alike", np.repeat(data.x[:1], 5 * BATCH, axis=0), np.repeat(data.y[:1], 5 * BATCH), 3)
    loader = Loader(alike, BATCH, dtype="float64", workers=0)
    one, many = make(group, Sync(), 1, "adam"), make(group, Sync("local", local_steps=3), 4, "adam")
    for worker in (one, many):
        worker.run(loader, 0, 0, 5, 0, lambda step: 0.05)
    for mine, theirs in zip(state(many)[:3], state(one)[:3], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-15)


def test_a_worker_computes_with_the_weights_that_were_sent(group: Group) -> None:
    """Also if the server has newer ones when they arrive.

    worker 0, at home     0 |== 0.0 ==| 1 |== 1.0 ==| 2 |== 2.0 ==| 3 |== 2.1 ==| 4      end, with 1.1
    worker 1              0 |== 0.1 ==| 1 -->1.6-->2.2 |== 1.1 ==| 3.2 --> 3.8 nothing is left for it
    versions              0             1     2     3               4       5            6
    """
    worker = make(group, Sync("asp"), 2, network=LinkSpeed(0.6, 0.0))
    loader = Loader(dataset(60), BATCH, dtype="float64", workers=0)
    report = worker.run(loader, 0, 0, 3, 0, lambda step: 0.2)
    model, parts = build(), loader.parts(0)
    local = LocalGradient(model, worker.loss, worker.backend, 0)

    def gradient(batch: int, part: int, version: Array) -> Array:
        model.storage.data[0][...] = version
        local.run(parts(batch, part, 2), 0)
        return model.storage.grads[0].copy()

    v0 = model.storage.data[0].copy()
    v1 = v0 - 0.2 * gradient(0, 0, v0)
    v2 = v1 - 0.2 * gradient(0, 1, v0)
    v3 = v2 - 0.2 * gradient(1, 0, v1)
    v4 = v3 - 0.2 * gradient(2, 0, v3)
    v5 = v4 - 0.2 * gradient(1, 1, v2)
    v6 = v5 - 0.2 * gradient(2, 1, v4)
    np.testing.assert_allclose(worker.model.storage.data[0], v6, rtol=1e-9, atol=1e-12)
    assert report.updates == 6
    assert [report.staleness.histogram(number) for number in range(2)] == [{0: 2, 1: 2}, {1: 1, 2: 1}]
    assert worker.now_s == pytest.approx(4.6)


def test_a_warm_up_is_synchronous_in_every_mode(group: Group) -> None:
    expected = weights(serial(group, "sgd", 1))
    for sync in (Sync("asp"), Sync("ssp"), Sync("local"), Sync("gossip")):
        worker = make(group, sync, straggler="rank=1,factor=3")
        run(worker, 1, bsp=True)
        np.testing.assert_allclose(weights(worker.model), expected, rtol=1e-9, atol=1e-12)


def test_averaging_after_every_step_is_the_synchronous_run(group: Group) -> None:
    """Also of the last batch, in which some workers have no rows."""
    worker = make(group, Sync("local", local_steps=1))
    reports = run(worker, 2)
    assert [report.disagreement for report in reports] == [0.0, 0.0]
    np.testing.assert_allclose(weights(worker.model), weights(serial(group, "sgd", 2)), rtol=1e-9)
    assert worker.optimizer.steps == 2 * BATCHES


@pytest.mark.parametrize("sync", EVERY_MODE, ids=str)
def test_every_run_is_the_same_and_observing_it_changes_nothing(group: Group, sync: Sync) -> None:
    loader = Loader(dataset(), ROWS, dtype="float64", workers=0)
    seen: list[tuple[float, float]] = []
    last: list[Array] = []

    def observe(now_s: float, worker: VirtualWorker) -> None:
        seen.append((now_s, worker.evaluate(loader.epoch(0)).loss))
        last[:] = [weights(worker.model), worker.model.state()["1.running_mean"]]

    def trained(watched: bool) -> Any:
        options = {"network": SPEED, "model": build(norm=True, dropout=0.1), "clip": 0.5}
        worker = make(group, sync, name="adam", straggler="rank=3,factor=3;random,probability=0.3,factor=2", **options)
        worker.observe = observe if watched else None
        worker.reports = run(worker, 2)
        return worker

    one, other, watched = trained(False), trained(False), trained(True)
    assert same(one, other) and same(one, watched)
    assert [replace(report, staleness=None) for report in one.reports] == [
        replace(report, staleness=None) for report in watched.reports
    ]
    times = [now_s for now_s, _ in seen]
    assert times == sorted(times) and times[-1] <= watched.now_s
    assert len(seen) >= sum(report.batches for report in watched.reports)
    assert seen[-1][1] < seen[0][1]
    np.testing.assert_allclose(last[0], weights(watched.model), rtol=1e-12)
    np.testing.assert_allclose(last[1], watched.model.state()["1.running_mean"], rtol=1e-12)


@pytest.mark.parametrize("sync", EVERY_MODE, ids=str)
def test_a_run_goes_on_from_its_state_as_if_there_had_been_no_break(group: Group, sync: Sync) -> None:
    rows, rates = 60, lambda step: 0.05  # noqa: E731
    loader = Loader(dataset(rows), BATCH, dtype="float64", workers=0)

    def fresh() -> Any:
        options = {"network": SPEED, "model": build(norm=True)}
        return make(group, sync, name="adam", straggler="random,probability=0.5,factor=3", **options)

    whole, first, second = fresh(), fresh(), fresh()
    for worker in (whole, first):
        worker.run(loader, 0, 0, 3, 0, rates)
    second.model.load_state(first.model.state())
    for name, arrays in first.optimizer.slots().items():
        for mine, theirs in zip(second.optimizer.slots()[name], arrays, strict=True):
            mine[...] = theirs
    second.optimizer.steps = first.optimizer.steps
    second.load_clock_state(first.clock_state())
    for worker in (whole, second):
        worker.run(loader, 0, 3, 5, 3, rates)
    assert same(whole, second)


def test_a_state_of_other_workers_is_refused(group: Group) -> None:
    other = make(group, Sync("asp", servers=2), 3).clock_state()
    with pytest.raises(CheckpointError, match="3 workers and 2 servers does not fit 4 workers and 0 servers"):
        make(group, Sync("local")).load_clock_state(other)


def test_workers_normalize_by_their_own_statistics_which_are_averaged(group: Group) -> None:
    """After one step of each the mean over equal parts is the synchronous one's."""
    model, twin = build(norm=True), build(norm=True)
    worker = make(group, Sync("local", local_steps=9), model=model)
    loader = Loader(dataset(60), BATCH, dtype="float64", workers=0)
    worker.run(loader, 0, 0, 1, 0, lambda step: 0.1)
    make(group, Sync(), model=twin).run(loader, 0, 0, 1, 0, lambda step: 0.1)
    mean, expected = model.state()["1.running_mean"], twin.state()["1.running_mean"]
    np.testing.assert_allclose(mean, expected, rtol=1e-9)
    variance, whole = model.state()["1.running_variance"], twin.state()["1.running_variance"]
    assert not np.allclose(variance, whole)  # of parts of three rows, and of twelve


def test_statistics_count_by_the_gradients_that_they_saw() -> None:
    model = build(norm=True)
    statistics = WorkerStatistics(model, 3)
    mean = model.get("1").running_mean.data
    statistics.begin()
    for worker, value, rows in ((0, 1.0, 4), (1, 5.0, 4), (1, 7.0, 4), (2, 100.0, 0)):
        statistics.load(worker)
        mean[...] = value
        statistics.keep(worker, rows)
    statistics.load(0)
    assert mean[0] == 1
    statistics.show()
    assert mean[0] == pytest.approx((1 + 2 * 7) / 3)
    statistics.begin()
    statistics.load(2)
    statistics.show()
    assert mean[0] == pytest.approx(5)


@pytest.mark.parametrize("sync", EVERY_MODE, ids=str)
def test_frozen_parameters_stay_as_they_are(group: Group, sync: Sync) -> None:
    model = build("float32")
    before = model.state()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith("0")
    run(make(group, sync, name="adam", model=model), 1)
    after = model.state()
    assert {name for name in before if np.array_equal(before[name], after[name])} == {"0.weight", "0.bias"}


@pytest.mark.parametrize("sync", EVERY_MODE, ids=str)
def test_a_signal_ends_a_segment_after_whole_batches(group: Group, sync: Sync) -> None:
    calls = iter([0] * 5 + [15] * 1000)
    worker = make(group, sync, straggler="rank=2,factor=2")
    told: list[Progress] = []
    loader = Loader(dataset(240), BATCH, dtype="float64", workers=0)
    report = worker.run(loader, 0, 0, 20, 0, lambda step: 0.1, progress=told.append, poll_signal=lambda: next(calls))
    assert report.signal == 15 and 0 < report.batches < 20
    assert {each.batch for each in told} == set(range(report.batches))
    if not sync.backup:
        assert report.totals.samples == report.batches * BATCH == sum(each.totals.samples for each in told)


@pytest.mark.parametrize("sync", [Sync(), Sync("asp"), Sync("local")], ids=str)
def test_a_loss_that_is_not_finite_is_explained(group: Group, sync: Sync) -> None:
    model = build()
    model.load_state({**model.state(), "2.bias": np.array([0, np.nan, 0])})
    with pytest.raises(DivergenceError, match=r"^step 1: .* are in the weights '2\.bias' on (worker 0|the workers)"):
        run(make(group, sync, model=model))


@pytest.mark.mpi
@pytest.mark.parametrize(
    "sync",
    [
        Sync("bsp", servers=1),
        Sync("ssp", staleness=0),
        Sync("local", local_steps=2),
        Sync("gossip"),
        Sync("gossip", neighbours="random"),
    ],
    ids=str,
)
def test_it_does_what_as_many_ranks_do(group: Group, sync: Sync) -> None:
    """Where what ranks do does not depend on their speeds."""
    if sync.mode == "gossip" and group.size == 1:
        return
    alone = group.split(group.rank)
    model = build(norm=True, dropout=0.1)
    asynchronous = AsynchronousWorker(model, optimizer_of(model, "momentum"), group, sync, seed=5)
    loader = Loader(dataset(), BATCH, dtype="float64", workers=0, rank=group.rank, world=group.size)
    real = asynchronous.run(loader, 0, 0, BATCHES, 0, lambda step: 0.1 / (1 + step))
    asynchronous.release()
    played = make(alone, sync, group.size, "momentum", model=build(norm=True, dropout=0.1), seed=5)
    report = played.run(loader, 0, 0, BATCHES, 0, lambda step: 0.1 / (1 + step))
    alone.free()
    close = np.allclose(weights(played.model), weights(model), rtol=1e-9)
    told = [(each.batches, each.totals.samples, each.updates, each.lead) for each in (real, report)]
    apart = abs(real.disagreement - report.disagreement) < 1e-9
    losses = abs(real.totals.loss_sum - report.totals.loss_sum) < 1e-9 * report.totals.loss_sum
    found = group.gather([close, told[0] == told[1], apart, losses])
    assert found == [[True] * 4] * group.size, (found, told)


@pytest.mark.parametrize("sync", EVERY_MODE, ids=str)
def test_a_device_gives_the_same_numbers(group: Group, sync: Sync) -> None:
    def trained(backend: Backend) -> Any:
        worker = make(group, sync, name="adam", model=build(norm=True, backend=backend), backend=backend, clip=0.5)
        run(worker)
        return worker.model.state()

    device, host = trained(device_backend()), trained(numpy_backend())
    assert all(np.allclose(device[name], host[name], rtol=1e-9, atol=1e-11) for name in host)


def test_64_workers_with_weights_and_momenta_of_their_own(group: Group) -> None:
    model = models.mlp((6,), 3, hidden=(100, 50)).initialize(0)
    worker = make(group, Sync("gossip", neighbours="random"), 64, "adam", model=model)
    (report,) = run(worker, rows=5 * 64)
    assert report.totals.samples == 5 * 64 and report.disagreement > 0


def test_impossible_workers_are_refused(group: Group) -> None:
    model = build()
    options: Any = (model, optimizer_of(model), group)
    with pytest.raises(UsageError, match="0 virtual workers cannot compute anything; give 1 or more"):
        VirtualWorker(*options, Sync("asp"), 0)
    with pytest.raises(UsageError, match="a virtual step of 0 s is not possible; give a number above 0"):
        VirtualWorker(*options, Sync("asp"), 2, throttle=Throttle(0.0))
    with pytest.raises(UsageError, match="gossip on one rank"):
        VirtualWorker(*options, Sync("gossip"), 1)
    with pytest.raises(UsageError, match="a straggler has the rank 4, which is none of the workers"):
        make(group, Sync("asp"), 4, straggler="rank=4,factor=2")
    with pytest.raises(UsageError, match="a straggler has the rank 0, which"):  # it is the server
        make(group, Sync("asp", dedicated=True), 4, straggler="rank=0,factor=2")
    with pytest.raises(UsageError, match="the loss has reduction='mean'"):
        VirtualWorker(*options, Sync("asp"), 2, evaluation_loss=cross_entropy)
    with pytest.raises(UsageError, match="the optimizer works on other arrays"):
        VirtualWorker(build(), options[1], group, Sync("asp"), 2)
