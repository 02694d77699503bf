"""What layers do differently in training: statistics, dropout, recomputation; and what the global batch decides."""

from itertools import islice
from typing import Any

import pytest

from nnmpi import models
from nnmpi.comm.group import Group
from nnmpi.nn.norm import BatchNorm
from tests.equivalence import own
from tests.equivalence.cover import kinds, spread
from tests.equivalence.reference import Setup, assert_same, batches, build, evaluate, release, run, serial_run

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("reduction", ["fast", "fixed"])
def test_batch_statistics_are_those_of_a_microbatch(group: Group, alone: Group, reduction: str) -> None:
    """Of all replicas' rows of it together, and running statistics take in one microbatch after the other."""
    setup = Setup(own.nested, microbatches=3)
    serial = serial_run(setup, alone) if group.is_root else None
    assert serial is None or sum("running" in name for name in serial.weights) == 6
    for layout in kinds(group.size, setup):
        if layout.tp == layout.pp == 1 or reduction == "fast":
            layout = spread(setup, (layout.dp or 1, layout.pp or 1, layout.tp or 1), "gpipe", reduction=reduction)
            assert_same(group, run(setup, group, layout, synchronous_sends=True), serial, setup, str(layout))


def test_recomputing_changes_nothing(group: Group, alone: Group) -> None:
    """Dropout drops the same elements again, and running statistics are updated once."""
    setup = Setup(own.noisy, microbatches=3)
    serial = serial_run(setup, alone) if group.is_root else None
    for layout in kinds(group.size, setup, activation_memory="least"):
        if layout.pp == 1:
            continue
        assert_same(group, run(setup, group, layout, synchronous_sends=True), serial, setup, str(layout))


@pytest.mark.parametrize(
    "setup",
    [
        Setup(own.noisy, worker={"clip": 0.05}, microbatches=2),
        Setup(own.noisy, optimizer="adamw", optimizer_options={"weight_decay": 0.1}, microbatches=2),
        Setup(
            models.resnet,
            {"width": 2},
            optimizer="sgd",
            optimizer_options={"weight_decay": 0.1, "momentum": 0.9},
            worker={"clip": 0.3},
            microbatches=2,
        ),
    ],
    ids=["clip", "decay", "both"],
)
def test_clipping_and_decay(group: Group, alone: Group, setup: Setup) -> None:
    """Norms count every parameter once: sharded, replicated or in another stage."""
    serial = serial_run(setup, alone) if group.is_root else None
    clip = setup.worker.get("clip")
    assert serial is None or clip is None or min(serial.norms) > clip
    for layout in kinds(group.size, setup)[-3:]:
        assert_same(group, run(setup, group, layout, synchronous_sends=True), serial, setup, str(layout))


def test_evaluating_between_steps_changes_nothing(group: Group, alone: Group) -> None:
    """Before, between and after steps, under every kind of layout; batches of 49 and 41 rows, cut into microbatches."""
    setup = Setup(own.noisy, microbatches=3)

    def work(worker: Any) -> list[float]:
        found: list[float] = []
        for batch in islice(batches(setup, worker), 4):
            report = evaluate(setup, worker)
            assert report.samples == 90
            found += [report.loss, report.accuracy, worker.step(batch).loss]
        release(worker)
        return found

    expected = work(build(setup, alone))
    for layout in kinds(group.size, setup):
        found = work(build(setup, group, layout, synchronous_sends=True))
        assert all(group.gather(found == pytest.approx(expected, rel=1e-9))), layout


def test_evaluation_uses_running_statistics_and_leaves_them(group: Group) -> None:
    setup = Setup(own.noisy)
    for layout in kinds(group.size, setup):
        worker = build(setup, group, layout)
        norms = [layer for _, layer in worker.model.named_modules() if isinstance(layer, BatchNorm)]
        before = [norm.running_mean.data.copy() for norm in norms]
        evaluate(setup, worker)
        same = [(norm.running_mean.data == old).all() for norm, old in zip(norms, before, strict=True)]
        assert all(map(all, group.gather(list(map(bool, same)))))
        release(worker)
