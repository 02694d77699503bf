"""Many workers in virtual time: the weights of a run on ranks, and times that a formula gives."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi import models, nn, optim
from nnmpi.backend.array import Array
from nnmpi.comm.cost import parameter_server, ring_all_reduce
from nnmpi.comm.group import Group
from nnmpi.compose.pace import Pace
from nnmpi.compose.relaxed import RelaxedWorker
from nnmpi.compose.segment import Progress, SegmentReport
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.errors import CheckpointError, DivergenceError, UsageError
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.synchrony.network import LinkSpeed
from nnmpi.synchrony.slowdown import Slowdown
from nnmpi.synchrony.sync import Sync

ROWS, BATCH = 62, 12  # five batches of 12 rows and one of 2, which is less than there are workers
BATCHES = -(-ROWS // BATCH)
SPEED = LinkSpeed(0.01, 1e-5)
EVERY_MODE = (
    Sync("bsp"),
    Sync("bsp", servers=2),
    Sync("bsp", backup=1),
    Sync("asp"),
    Sync("asp", servers=3, adapt=True),
    Sync("ssp", staleness=1),
    Sync("ssp", staleness=2, servers=2, dedicated=True),
    Sync("local", local_steps=2),
    Sync("gossip"),
    Sync("gossip", neighbours="random"),
)


def dataset(rows: int = ROWS) -> Dataset:
    draw = np.random.default_rng(3)
    x = draw.normal(size=(rows, 6)).astype(np.float32)
    return Dataset("drawn", x, (x[:, :3].argmax(axis=1)).astype(np.int64), 3)


def build(dtype: str = "float64", norm: bool = False, dropout: float = 0.0) -> Module:
    body: list[Module] = [nn.Linear(6, 7), *([nn.BatchNorm(7)] if norm else []), nn.ReLU()]
    if dropout:
        body.append(nn.Dropout(dropout))
    return nn.Sequential(*body, nn.Linear(7, 3)).initialize(0, dtype)


def optimizer_of(model: Module, name: str = "sgd") -> Optimizer:
    if name == "adam":
        return optim.Adam(model.storage, lr=0.01, weight_decay=0.01)
    return optim.SGD(model.storage, lr=0.1, momentum=0.9 if name == "momentum" else 0.0)


def make(group: Group, sync: Sync, workers: int = 4, name: str = "sgd", straggler: str = "", **options: Any) -> Any:
    """Return a virtual worker, its steps 1 s long."""
    model = options.pop("model", None) or build()
    pace = Pace(1.0, Slowdown.parse(straggler, seed=7))
    return VirtualWorker(model, optimizer_of(model, name), group, sync, workers, pace=pace, **options)


def run(worker: Any, epochs: int = 1, rows: int = ROWS, **options: Any) -> list[SegmentReport]:
    """Train epoch by epoch, each a segment."""
    dtype = worker.model.storage.data[0].dtype
    loader = Loader(dataset(rows), BATCH, dtype=dtype, workers=0)
    count = loader.batches_per_epoch
    rate = worker.optimizer.lr
    return [
        worker.run(loader, epoch, 0, count, epoch * count, lr=lambda step: rate / (1 + step / 10), **options)
        for epoch in range(epochs)
    ]


def serial(group: Group, name: str, epochs: int, model: Module | None = None, clip: float | None = None) -> Module:
    """Return the model that one process has trained."""
    model = build() if model is None else model
    worker = Worker(model, optimizer_of(model, name), group, clip=clip)
    rate = worker.optimizer.lr
    for epoch in range(epochs):
        for batch in Loader(dataset(), BATCH, dtype=model.storage.data[0].dtype, workers=0).epoch(epoch):
            worker.step(batch, lr=rate / (1 + worker.optimizer.steps / 10))
    worker.release()
    return model


def weights(model: Module) -> Array:
    return np.concatenate([np.ravel(array) for array in model.storage.data])


def state(worker: Any) -> Sequence[Array]:
    """Return all that a run has changed."""
    slots = [array for arrays in worker.optimizer.slots().values() for array in arrays]
    buffers = [buffer.data for _, buffer in worker.model.named_buffers()]
    return [weights(worker.model), *slots, *buffers, np.array([worker.now_s, worker.optimizer.steps])]


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(state(one), state(other), strict=True))


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


def nbytes(worker: Any) -> int:
    return int(weights(worker.model).nbytes)


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("dedicated", [False, True])
@pytest.mark.parametrize("factor", [1, 3])
def test_a_step_through_servers_takes_the_pace_and_what_the_formula_says(
    group: Group, servers: int, dedicated: bool, factor: int
) -> None:
    """With several servers the longest shard counts; a dedicated one has a message more."""
    sync = Sync("bsp", servers=servers, dedicated=dedicated)
    ranks = 4 + dedicated * servers
    worker = make(group, sync, network=SPEED, straggler=f"rank={ranks - 1},factor={factor}")
    reports = run(worker, 2)
    shards = [server.shard.nbytes(worker.model.storage.data) for server in worker._player.servers]
    far = 4 if dedicated else 3  # a worker needs no messages to the server on its own rank
    comm_s = parameter_server(far + 1, max(shards), SPEED.alpha_s, SPEED.beta_s_per_byte)
    if factor > 1:  # the straggler comes last, when the link is free again: its bytes alone pass before the update
        comm_s = 2 * SPEED.alpha_s + (1 + far) * max(shards) * SPEED.beta_s_per_byte
    assert worker.now_s == pytest.approx(2 * BATCHES * (factor + comm_s), rel=1e-9)
    assert [report.messages for report in reports] == [2 * far * servers * BATCHES] * 2
    assert reports[0].bytes == 2 * far * nbytes(worker) * BATCHES
    assert all(report.seconds == pytest.approx(BATCHES * (factor + comm_s)) for report in reports)


@pytest.mark.parametrize("factor", [1, 3])
def test_a_step_with_an_all_reduce_takes_the_slowest_pace_and_a_ring(group: Group, factor: int) -> None:
    worker = make(group, Sync(), network=SPEED, straggler=f"rank=2,factor={factor}")
    (report,) = run(worker)
    ring_s = ring_all_reduce(4, nbytes(worker), SPEED.alpha_s, SPEED.beta_s_per_byte)
    assert worker.now_s == pytest.approx(BATCHES * (factor + ring_s), rel=1e-9)
    assert report.compute_s == pytest.approx((3 + factor) / 4)
    assert report.compute_s + report.wait_s == pytest.approx(factor + ring_s)
    assert (report.messages, report.bytes) == (BATCHES * 2 * 3 * 4, BATCHES * 2 * 3 * nbytes(worker))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_local_steps_pay_the_ring_once_in_so_many(group: Group, every: int) -> None:
    worker = make(group, Sync("local", local_steps=every), network=SPEED)
    (report,) = run(worker)
    ring_s = ring_all_reduce(4, nbytes(worker), SPEED.alpha_s, SPEED.beta_s_per_byte)
    assert worker.now_s == pytest.approx(BATCHES * (1 + ring_s / every), rel=1e-9)
    assert report.messages == BATCHES // every * 2 * 3 * 4
    assert report.staleness is not None and report.staleness.largest() == every - 1


def test_a_meeting_between_two_averages_costs_one(group: Group) -> None:
    worker = make(group, Sync("local", local_steps=4), network=SPEED)
    (report,) = run(worker)
    ring_s = ring_all_reduce(4, nbytes(worker), SPEED.alpha_s, SPEED.beta_s_per_byte)
    assert worker.now_s == pytest.approx(BATCHES + 2 * ring_s) and report.disagreement > 0


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("neighbours", ["ring", "random"])
def test_gossip_pays_for_its_neighbours_alone(group: Group, neighbours: str, workers: int) -> None:
    worker = make(group, Sync("gossip", neighbours=neighbours), workers, network=SPEED)
    (report,) = run(worker)
    message_s = SPEED.seconds(nbytes(worker))
    ring_s = ring_all_reduce(workers, nbytes(worker), SPEED.alpha_s, SPEED.beta_s_per_byte)
    talks = min(workers - 1, 2) if neighbours == "ring" else 1
    ring_s = ring_s if workers > 2 else 0.0  # two agree after every step, and need no meeting
    most_s = BATCHES * (1 + talks * message_s) + ring_s
    if neighbours == "ring" or workers == 2:
        assert worker.now_s == pytest.approx(most_s, rel=1e-9)
    else:  # one is left out each time, and has its step earlier; the others may wait for it or not
        assert BATCHES + ring_s < worker.now_s <= most_s * (1 + 1e-12)
    sent = workers * talks - (neighbours == "random") * workers % 2
    assert report.messages == BATCHES * sent + (2 * workers * (workers - 1) if workers > 2 else 0)
    assert report.staleness is None and (report.disagreement > 0) == (workers > 2)


def test_a_straggler_slows_gossip_down_no_faster_than_word_of_it_spreads(group: Group) -> None:
    """On a ring of 16, after 6 steps only those within 6 places of it have waited."""
    worker = make(group, Sync("gossip"), 16, straggler="rank=0,factor=3")
    told: list[Progress] = []
    run(worker, progress=told.append)
    last = {each.worker: each.at_s for each in told if each.batch == BATCHES - 1}
    assert [last[number] for number in range(16)] == [
        BATCHES + 2 * max(BATCHES - min(number, 16 - number), 0) for number in range(16)
    ]


@pytest.mark.parametrize("factor", [2, 8])
def test_asp_has_the_throughput_of_all_its_workers(group: Group, factor: int) -> None:
    """In the long run (N - 1 + 1/f) / N of what equal workers do, if messages take no time."""
    rows, workers = 100 * BATCH, 4
    slow = make(group, Sync("asp"), workers, straggler=f"rank=1,factor={factor}")
    equal = make(group, Sync("asp"), workers)
    counts = Counter[int]()
    run(slow, rows=rows, progress=lambda each: counts.update([each.worker]))
    run(equal, rows=rows)
    assert equal.now_s == 100
    assert equal.now_s / slow.now_s == pytest.approx((workers - 1 + 1 / factor) / workers, rel=0.03)
    assert sum(counts.values()) == 400 and counts[0] / counts[1] == pytest.approx(factor, rel=0.1)


def test_staleness_of_equal_asp_workers_is_the_number_of_the_others(group: Group) -> None:
    worker = make(group, Sync("asp"), 5)
    (report,) = run(worker, rows=40 * BATCH)
    assert report.staleness is not None
    assert report.staleness.mean() == pytest.approx(4, rel=0.03) and report.staleness.largest() == 4
    assert report.staleness.count() == 40 * 5
    assert report.updates == 39 * 5 + 1  # nobody goes on from the last ones, which make one update


def test_a_stale_synchronous_run_waits_for_a_straggler_in_the_end(group: Group) -> None:
    """At any moment nobody is more than S steps ahead, so that in the long run all go at its pace."""
    worker = make(group, Sync("ssp", staleness=2), straggler="rank=1,factor=4")
    done, leads = [0] * 4, []

    def note(each: Progress) -> None:
        done[each.worker] += 1
        leads.append(max(done) - min(done))

    (report,) = run(worker, rows=50 * BATCH, progress=note)
    assert report.lead == 2 and max(leads) == 3  # done: S ahead when begun, and one more
    assert report.seconds == pytest.approx(50 * 4, rel=0.06)


@settings(max_examples=25)
@given(
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(1, 3),
    st.lists(st.sampled_from([1, 1.5, 2, 3.7]), min_size=6, max_size=6),
    st.integers(0, 3),
)
def test_the_bound_holds_for_any_speeds_and_every_part_is_done_once(
    group: Group, bound: int, workers: int, servers: int, factors: list[float], seed: int
) -> None:
    rules = [f"rank={rank},factor={factor}" for rank, factor in enumerate(factors[:workers])]
    slowdown = Slowdown.parse(";".join([*rules, "random,probability=0.3,factor=4"]), seed)
    model = build("float32")
    sync = Sync("ssp", staleness=bound, servers=min(servers, workers))
    pace = Pace(0.5, slowdown)
    worker = VirtualWorker(model, optimizer_of(model), group, sync, workers, pace=pace, network=SPEED)
    rows, steps, leads = list[tuple[int, int]](), [0] * workers, [0]

    def note(each: Progress) -> None:
        rows.append((each.batch, each.rows))
        steps[each.worker] += 1
        leads.append(max(steps) - min(steps) - 1)

    reports = run(worker, 2, progress=note)
    assert max(leads) <= bound and max(report.lead for report in reports) <= bound
    expected = [(number, min(BATCH, ROWS - number * BATCH)) for number in range(BATCHES)] * 2
    done = Counter[int]()
    for number, count in rows:
        done[number] += count
    assert len(rows) == 2 * BATCHES * workers
    assert done == Counter({number: 2 * count for number, count in expected})
    assert [report.rows for report in reports] == [ROWS] * 2


def test_backup_workers_save_the_time_of_the_slowest(group: Group) -> None:
    worker = make(group, Sync("bsp", backup=1), straggler="rank=3,factor=2.5")
    used = Counter[int]()
    (report,) = run(worker, rows=60, progress=lambda each: used.update([each.worker]))
    assert worker.now_s < 5 * 2.5
    assert report.dropped + report.undealt == 5 and report.dropped > 0
    assert sum(used.values()) == 15 and report.updates == 5 and report.rows == 45


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
    report = worker.run(loader, 0, 0, 20, 0, lambda step: 0.1, progress=told.append, asked=lambda: next(calls))
    assert report.signal == 15 and 0 < report.batches < 20
    assert {each.batch for each in told} == set(range(report.batches))
    if not sync.backup:
        assert report.rows == report.batches * BATCH == sum(each.rows for each in told)


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
    relaxed = RelaxedWorker(model, optimizer_of(model, "momentum"), group, sync, seed=5)
    loader = Loader(dataset(), BATCH, dtype="float64", workers=0, rank=group.rank, world=group.size)
    real = relaxed.run(loader, 0, 0, BATCHES, 0, lambda step: 0.1 / (1 + step))
    relaxed.release()
    played = make(alone, sync, group.size, "momentum", model=build(norm=True, dropout=0.1), seed=5)
    report = played.run(loader, 0, 0, BATCHES, 0, lambda step: 0.1 / (1 + step))
    alone.free()
    close = np.allclose(weights(played.model), weights(model), rtol=1e-9)
    told = [(each.batches, each.rows, each.updates, each.lead) for each in (real, report)]
    apart = abs(real.disagreement - report.disagreement) < 1e-9
    losses = abs(real.loss_sum - report.loss_sum) < 1e-9 * report.loss_sum
    found = group.gather([close, told[0] == told[1], apart, losses])
    assert found == [[True] * 4] * group.size, (found, told)


def test_64_workers_with_weights_and_momenta_of_their_own(group: Group) -> None:
    model = models.mlp((6,), 3, hidden=(100, 50)).initialize(0)
    worker = make(group, Sync("gossip", neighbours="random"), 64, "adam", model=model)
    (report,) = run(worker, rows=5 * 64)
    assert report.rows == 5 * 64 and report.disagreement > 0


def test_impossible_workers_are_refused(group: Group) -> None:
    model = build()
    options: Any = (model, optimizer_of(model), group)
    with pytest.raises(UsageError, match="0 virtual workers cannot compute anything; give 1 or more"):
        VirtualWorker(*options, Sync("asp"), 0)
    with pytest.raises(UsageError, match="a virtual step of 0 s is not possible; give a number above 0"):
        VirtualWorker(*options, Sync("asp"), 2, pace=Pace(0.0))
    with pytest.raises(UsageError, match="--sync gossip on one rank"):
        VirtualWorker(*options, Sync("gossip"), 1)
    with pytest.raises(UsageError, match="--straggler slows rank 4 down, which is none of the workers"):
        make(group, Sync("asp"), 4, straggler="rank=4,factor=2")
    with pytest.raises(UsageError, match="--straggler slows rank 0 down"):  # it is the server
        make(group, Sync("asp", dedicated=True), 4, straggler="rank=0,factor=2")
    with pytest.raises(UsageError, match="the optimizer works on other arrays"):
        VirtualWorker(build(), options[1], group, Sync("asp"), 2)


def test_dedicated_servers_have_the_first_ranks(group: Group) -> None:
    worker = make(group, Sync("asp", dedicated=True), 3, straggler="rank=3,factor=50")
    done = Counter[int]()
    run(worker, progress=lambda each: done.update([each.worker]))
    assert min(done, key=lambda number: done[number]) == 2
