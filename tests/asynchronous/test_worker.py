"""Ranks that need not be in step: where the modes meet, they are the synchronous run."""

import numpy as np
import pytest

import nnmpi.base.timeline as timeline
from nnmpi import AsynchronousWorker, Sync
from nnmpi.base.errors import CommError
from nnmpi.ops import cross_entropy
from tests.asynchronous.runs import (
    EVERY_MODE,
    SEGMENTS,
    all_reduced,
    equal_on_all,
    everything,
    loader_of,
    make,
    name_of,
    rate,
    skip_unless_fitting,
    train,
)
from tests.compose.small_runs import BATCH, BATCHES, ROWS, build, optimizer_of, weights
from tests.equivalence.reference import tolerance
from tests.harness.refusals import refuses, usage_error

# whole trainings; test_seeds and push_pull have 33 ranks
pytestmark = pytest.mark.simulated(max_size=16)


def frozen(**options):
    """Return a model with a parameter that is not trained."""
    model = build(**options)
    next(iter(model.parameters())).requires_grad = False
    return model


MODELS = {
    "sgd": build,
    "momentum": lambda: build(dropout=0.3),
    "adam": frozen,  # with weight decay
}


def limit(name):
    return tolerance("float64", 2 * BATCHES, "adam" if name == "adam" else "sgd")


@pytest.mark.parametrize("name", MODELS)
def test_in_step_it_is_the_synchronous_run(group, name):
    """In segments, with batches that no number of ranks divides, dropout, weight decay, a frozen
    parameter.
    """
    slow = "ms=0.3;probability=0.3,factor=3"
    worker = make(group, Sync("ssp", staleness=0), name, slow, model=MODELS[name]())
    reports = train(worker)
    error = float(np.abs(weights(worker.model) - all_reduced(group, name, MODELS[name]())).max())
    assert max(group.gather(error)) <= limit(name)
    assert equal_on_all(group, weights(worker.model))
    for report, (_, first, stop) in zip(reports, SEGMENTS, strict=True):
        assert (report.batches, report.updates, report.lead) == (stop - first, stop - first, 0)
        assert report.staleness.largest() == 0
        # Ranks without rows do their part as well.
        assert [histogram.total() for histogram in report.staleness.histograms] == [
            stop - first
        ] * group.size
    assert sum(report.totals.samples for report in reports) == 2 * ROWS
    assert worker.optimizer.steps == 2 * BATCHES
    worker.release()


@pytest.mark.simulated(max_size=3)
def test_a_trace_may_end_while_passes_are_replayed(group):
    """A pass that is traced does more, which its recording has as well."""
    worker = make(group, Sync("local", local_steps=2), model=build())
    with timeline.tracing(timeline.Timeline()):
        train(worker)
    train(worker, [(epoch, 0, BATCHES) for epoch in range(2, 8)])
    ours, plain = weights(worker.model), make(group, Sync("local", local_steps=2), model=build())
    train(plain)
    train(plain, [(epoch, 0, BATCHES) for epoch in range(2, 8)])
    np.testing.assert_array_equal(ours, weights(plain.model))


@pytest.mark.parametrize("sync", EVERY_MODE, ids=name_of)
def test_ranks_meet_with_the_same_weights_and_have_used_every_sample_once(group, sync):
    skip_unless_fitting(group, sync)
    slow = "ms=0.3;probability=0.3,factor=5"
    worker = make(group, sync, "momentum", slow, clip=1.0)
    before = weights(worker.model)
    text = []
    reports = train(worker, progress=lambda item: text.append(item.totals.samples))
    values = everything(worker)
    assert equal_on_all(group, values)
    assert np.isfinite(values).all()
    assert np.abs(weights(worker.model) - before).max() > 1e-3
    rows = [report.totals.samples for report in reports]
    assert group.gather(rows) == [[48, 14, 12, 50]] * group.size
    if sync.has_server:
        assert sum(text) == (sum(rows) if group.is_root else 0)
    assert [report.batches for report in reports] == [stop - first for _, first, stop in SEGMENTS]
    worker.release()


@pytest.mark.parametrize("sync", EVERY_MODE, ids=name_of)
def test_running_statistics_are_averaged(group, sync):
    """Each rank has two rows of a batch, or more."""
    skip_unless_fitting(group, sync)
    if group.size <= BATCH // 2:
        worker = make(group, sync, model=build(norm=True))
        train(worker, ((0, 0, 4),))
        values = everything(worker)
        assert equal_on_all(group, values) and np.isfinite(values).all()
        assert all(
            buffer.data.any() for name, buffer in worker.model.named_buffers() if "mean" in name
        )
        worker.release()


def test_a_clipped_gradient_moves_the_weights_no_further_than_its_bound(group):
    clip, lr = 0.01, 0.5
    for sync in (Sync("ssp", staleness=0), Sync("local", local_steps=1)):
        moved = []
        for options in ({}, {"clip": clip}):
            worker = make(group, sync, **options)
            before = weights(worker.model)
            train(worker, ((0, 0, 1),), lr=lambda step: lr)
            moved.append(float(np.linalg.norm(weights(worker.model) - before)))
            worker.release()
        assert moved[0] > 3 * clip * lr
        assert clip * lr / 10 < moved[1] <= clip * lr * (1 + 1e-9)


def test_wrong_use_is_refused_on_all_ranks(group):
    model = build()
    usage_error(
        "done by nnmpi.Worker",
        lambda: AsynchronousWorker(model, optimizer_of(model), group, Sync()),
    )
    usage_error(
        "make it for model.storage",
        lambda: AsynchronousWorker(model, optimizer_of(build()), group, Sync("asp")),
    )
    usage_error(
        f"rank {group.size} does not exist",
        lambda: make(group, Sync("asp"), slow=f"rank={group.size},factor=2"),
    )
    usage_error(
        "the loss has reduction='mean'", lambda: make(group, Sync("asp"), loss=cross_entropy)
    )
    worker = make(group, Sync("local"))
    if group.size > 1:
        local = group.split(group.rank)
        usage_error(
            r"call data.Loader\(dataset, batch_size, group\)",
            lambda: worker.run(loader_of(local, worker.model), 0, 0, 1, 0, lambda step: 0.1),
        )
        local.free()
        next(iter(worker.model.parameters())).requires_grad = group.is_root
        refuses(CommError, "frozen", train, worker)
    usage_error("release", lambda: make(group, Sync("asp"), model=_taken(group)))
    worker.release()


def _taken(group):
    """Return a model that another worker has."""
    return make(group, Sync("asp")).model


@pytest.mark.simulated(max_size=4)
@pytest.mark.parametrize(
    "sync",
    [*EVERY_MODE, Sync("local", local_steps=2, outer_lr=0.7, outer_momentum=0.9)],
    ids=lambda sync: f"{name_of(sync)}-{sync.outer_momentum}",
)
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_what_is_done_to_frozen_weights_between_two_runs_survives(group, sync, name):
    skip_unless_fitting(group, sync)
    worker = make(group, sync, name)
    loader = loader_of(group, worker.model)
    worker.run(loader, 0, 0, BATCHES - 1, 0, rate)
    parameter = next(iter(worker.model.parameters()))
    parameter.requires_grad = False
    parameter.data[...] = 0.25
    storage = worker.model.storage
    (_, where), *_ = storage.frozen()
    before = [arrays[0][where].copy() for arrays in storage.extra_slots.values()]
    worker.run(loader, 1, 0, BATCHES - 1, BATCHES - 1, rate)
    after = [arrays[0][where] for arrays in storage.extra_slots.values()]
    kept = all(np.allclose(now, then, atol=1e-15) for now, then in zip(after, before, strict=True))
    worker.release()
    assert all(group.gather(kept and bool((parameter.data == 0.25).all())))


@pytest.mark.simulated(max_size=4)
def test_what_is_done_to_weights_between_two_runs_is_no_step_of_diloco(group):
    worker = make(group, Sync("local", local_steps=2, outer_lr=0.7))
    loader, parameter = loader_of(group, worker.model), next(iter(worker.model.parameters()))
    worker.run(loader, 0, 0, 4, 0, rate)
    parameter.data[...] = 0.25
    worker.run(loader, 0, 4, 6, 4, lambda step: 0.0)
    worker.release()
    assert all(group.gather(bool(np.allclose(parameter.data, 0.25, rtol=1e-12, atol=0))))
