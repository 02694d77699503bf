"""Models whose layers are no plain chain, cut anywhere: skip connections, ties, tuples, integers, stages of nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nnmpi.comm.group import Group
from nnmpi.compose.layout import Layout
from nnmpi.errors import LayoutError
from tests.equivalence import own
from tests.equivalence.cover import kinds, layers, meshes, spread
from tests.equivalence.reference import Setup, assert_same, build, release, run, serial_run

pytestmark = pytest.mark.simulated


def assert_every_kind(group: Group, alone: Group, setup: Setup, **options: Any) -> None:
    """Compare a run under each kind of layout with the serial one."""
    serial = serial_run(setup, alone) if group.is_root else None
    for layout in kinds(group.size, setup, **options):
        assert_same(group, run(setup, group, layout, synchronous_sends=True), serial, setup, str(layout))


@pytest.mark.parametrize("model", [own.skipping, own.nested])
def test_skip_connections_go_over_stages(group: Group, alone: Group, model: Any) -> None:
    assert_every_kind(group, alone, Setup(model, microbatches=4))


@pytest.mark.needs_ranks(2, 4, 8)
def test_branches_go_over_ranks(group: Group, alone: Group) -> None:
    """Two towers on ranks of their own, within replicas, stages, and both."""
    setup = Setup(own.branched, microbatches=3, worker={"clip": 0.05})
    serial = serial_run(setup, alone) if group.is_root else None
    size = group.size
    layouts = {2: [{"tp": 2}], 4: [{"tp": 2, "dp": 2}, {"tp": 2, "pp": 2}], 8: [{"tp": 2, "dp": 2, "pp": 2}]}
    for options in layouts.get(size, ()):
        assert_same(group, run(setup, group, Layout(**options)), serial, setup, str(options))


def test_cuts_go_through_residual_blocks_at_every_layer(group: Group, alone: Group) -> None:
    """As many stages as ranks, each cut at a place of its own, so that all layers but one or two are cut before."""
    setup = Setup(own.nested, microbatches=3)
    serial = serial_run(setup, alone) if group.is_root else None
    count, ranks = layers(setup), group.size
    for first in range(1, min(count - ranks + 1, 9), 2) if ranks > 1 else ():
        split = (first, *[1] * (ranks - 2), count - first - (ranks - 2))
        parallel = run(setup, group, Layout(pp=ranks, split=split), synchronous_sends=True)
        assert_same(group, parallel, serial, setup, f"split {split}")


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "adamw", "optimizer_options": {"weight_decay": 0.1}, "worker": {"clip": 0.05}}],
    ids=["plain", "clipped and decayed"],
)
def test_tied_weights_go_over_stages(group: Group, alone: Group, options: dict[str, Any]) -> None:
    """Their gradients are added once over stages and replicas, and count once in the norm."""
    assert_every_kind(group, alone, Setup(own.tied, microbatches=4, **options))


def test_the_state_holds_tied_weights_once(group: Group) -> None:
    for layout in kinds(group.size, Setup(own.tied)):
        worker = build(Setup(own.tied), group, layout)
        model, optimizer = worker.state()
        expected = [f"{layer}.{part}" for layer in (1, 3, 5, 9, 13) for part in ("weight", "bias")]
        expected.remove("9.bias")  # which is 5.bias
        assert list(model.specs()) == expected
        assert len(optimizer.specs()) == 2 * len(expected)
        release(worker)


def test_ties_over_stages_are_refused_where_they_would_be_wrong(group: Group) -> None:
    """On all ranks, also those that have no part in it. In one stage they are right."""
    setup = Setup(own.tied)
    for pp in sorted({1, 2 if group.size % 2 == 0 else 1, min(group.size, layers(setup))}):
        if group.size % pp:
            continue
        layout = spread(setup, (group.size // pp, pp, 1), "pipedream")
        if pp == 1:
            release(build(setup, group, layout))
            continue
        with pytest.raises(LayoutError, match=r"^(3|5)\.\w+ stands in the stages 0?.*\d, which does not go with"):
            build(setup, group, layout)


def test_tuples_pass_between_stages(group: Group, alone: Group) -> None:
    assert_every_kind(group, alone, Setup(own.tupled, microbatches=4))


def test_integers_come_in(group: Group, alone: Group) -> None:
    """The first layer is an embedding: nothing before it needs a gradient, and batches are of integers."""
    assert_every_kind(group, alone, Setup(own.words, microbatches=4, prepare=own.integers))


def test_stages_may_have_no_parameters(group: Group, alone: Group) -> None:
    """The first stage flattens, another one is an activation alone, and so on."""
    setup = Setup(own.noisy, microbatches=3, worker={"clip": 0.3})
    serial = serial_run(setup, alone) if group.is_root else None
    for dp, pp, _ in (mesh for mesh in meshes(group.size, layers(setup)) if mesh[1] > 1 and mesh[2] == 1):
        layout = Layout(dp, pp, 1, split=(*[1] * (pp - 1), layers(setup) - pp + 1))
        assert_same(group, run(setup, group, layout, synchronous_sends=True), serial, setup, str(layout))


def test_weights_are_the_serial_runs_from_the_start(group: Group, alone: Group) -> None:
    """Before any step: each layout's parts make up the values that the whole model draws."""
    for model in (own.skipping, own.tied, own.words):
        setup = replace(Setup(model), prepare=own.integers if model is own.words else (lambda x: x))
        serial = build(setup, alone).model.state()
        for layout in kinds(group.size, setup):
            worker = build(setup, group, layout)
            found = worker.state()[0].to_dict(everywhere=True)
            assert all(np.array_equal(found[name], value) for name, value in serial.items())
            release(worker)
