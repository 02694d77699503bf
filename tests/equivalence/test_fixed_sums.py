"""With `reduction="fixed"` a run is the serial run to the last bit, over replicas and pipelines."""

from dataclasses import replace

import numpy as np
import pytest

from nnmpi.comm.group import Group
from nnmpi.compose.layout import Layout
from tests.equivalence import own
from tests.equivalence.cover import MODELS, SCHEDULES, SETUPS, Case, layers, meshes, spread
from tests.equivalence.reference import Run, Setup, run, serial_run


def bits_that_differ(parallel: Run, serial: Run) -> list[str]:
    """Return what is not the same to the last bit."""
    pairs = [
        ("losses", parallel.losses, serial.losses),
        ("norms", parallel.norms, serial.norms),
        *((f"{name}'s gradient", parallel.gradient[name], value) for name, value in serial.gradient.items()),
        *((name, parallel.weights[name], value) for name, value in serial.weights.items()),
    ]
    return [name for name, ours, theirs in pairs if not np.array_equal(ours, theirs)]


def assert_same_bits(group: Group, setup: Setup, layout: Layout, serial: Run | None) -> None:
    """Fail on all ranks if a run under a fixed order of sums has other bits than the one on rank 0 alone."""
    parallel = run(setup, group, layout, synchronous_sends=True)
    found = bits_that_differ(parallel, serial) if serial is not None else []
    everyones = group.gather([found, parallel.losses])
    assert not everyones[0][0], f"{layout} in {setup.microbatches} microbatches: {everyones[0][0]}"
    assert all(theirs[1] == everyones[0][1] for theirs in everyones)


@pytest.mark.simulated
@pytest.mark.parametrize("microbatches", [2, 4, 11])
def test_replicas_and_pipelines_have_the_serial_bits(group: Group, alone: Group, microbatches: int) -> None:
    """Fewer microbatches than replicas, as many, more; the short last batch has 3 of a row each, or 2."""
    layouts = [(dp, pp) for dp, pp, tp in meshes(group.size) if tp == 1]
    for number, (dp, pp) in enumerate(layouts):
        model = MODELS[(number + microbatches) % len(MODELS)]
        setup = replace(SETUPS[model], microbatches=microbatches, worker={"clip": 0.5})
        serial = serial_run(setup, alone, Layout(reduction="fixed")) if group.is_root else None
        schedule = SCHEDULES[(number + microbatches) % len(SCHEDULES)]
        assert_same_bits(group, setup, Case(model, dp, pp, 1, schedule, reduction="fixed").layout, serial)


@pytest.mark.simulated
@pytest.mark.parametrize("model", MODELS)
def test_float32_has_the_serial_bits(group: Group, alone: Group, model: str) -> None:
    """Adam's divisions by small gradients bring the last bit of any sum to light."""
    dp = max(dp for dp, _, tp in meshes(group.size) if tp == 1 and dp <= 4)
    setup = replace(SETUPS[model], dtype="float32", microbatches=5, optimizer_options={"lr": 0.1})
    serial = serial_run(setup, alone, Layout(reduction="fixed")) if group.is_root else None
    for memory in (None, "least"):
        case = Case(model, dp, group.size // dp, 1, "1f1b", reduction="fixed", memory=memory)
        assert_same_bits(group, setup, case.layout, serial)


@pytest.mark.simulated(max_size=8)
def test_ties_over_stages_have_the_serial_bits(group: Group, alone: Group) -> None:
    """A layer in three stages, and a bias in two, of one rank or of several."""
    setup = Setup(own.tied, {}, "adam", {"lr": 0.1}, "float32", microbatches=5, worker={"clip": 0.5})
    serial = serial_run(setup, alone, Layout(reduction="fixed")) if group.is_root else None
    for number, (dp, pp, tp) in enumerate(meshes(group.size, layers(setup))):
        if tp == 1 < pp:
            schedule = SCHEDULES[(number + group.size) % len(SCHEDULES)]
            assert_same_bits(group, setup, spread(setup, (dp, pp, 1), schedule, reduction="fixed"), serial)


@pytest.mark.simulated
def test_the_usual_sums_have_other_bits(group: Group, alone: Group) -> None:
    """Or the tests above would show nothing."""
    setup = replace(SETUPS["cnn"], dtype="float32", microbatches=5)
    serial = serial_run(setup, alone, Layout(reduction="fixed")) if group.is_root else None
    parallel = run(setup, group, Layout(dp=group.size), fused_update=False)
    found = group.gather(serial is not None and bool(bits_that_differ(parallel, serial)))
    assert found[0]
