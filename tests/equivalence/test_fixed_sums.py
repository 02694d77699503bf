"""With `reduction="fixed"` a run is the serial run to the last bit, on any number of replicas."""

from dataclasses import replace

import numpy as np
import pytest

from nnmpi.comm.group import Group
from nnmpi.compose.layout import Layout
from tests.equivalence.cover import MODELS, SETUPS
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
def test_replicas_have_the_serial_bits(group: Group, alone: Group, microbatches: int) -> None:
    """Fewer microbatches than replicas, as many, more; the short last batch has 3 of a row each, or 2."""
    model = MODELS[(group.size + microbatches) % len(MODELS)]
    setup = replace(SETUPS[model], microbatches=microbatches, worker={"clip": 0.5})
    serial = serial_run(setup, alone, Layout(reduction="fixed")) if group.is_root else None
    assert_same_bits(group, setup, Layout(dp=group.size, reduction="fixed"), serial)


@pytest.mark.simulated
@pytest.mark.parametrize("model", MODELS)
def test_float32_has_the_serial_bits(group: Group, alone: Group, model: str) -> None:
    """Adam's divisions by small gradients bring the last bit of any sum to light."""
    setup = replace(SETUPS[model], dtype="float32", microbatches=5, optimizer_options={"lr": 0.1})
    serial = serial_run(setup, alone, Layout(reduction="fixed")) if group.is_root else None
    assert_same_bits(group, setup, Layout(dp=group.size, reduction="fixed"), serial)


@pytest.mark.simulated
def test_the_usual_sums_have_other_bits(group: Group, alone: Group) -> None:
    """Or the tests above would show nothing."""
    setup = replace(SETUPS["cnn"], dtype="float32", microbatches=5)
    serial = serial_run(setup, alone, Layout(reduction="fixed")) if group.is_root else None
    parallel = run(setup, group, Layout(dp=group.size), fused_update=False)
    found = group.gather(serial is not None and bool(bits_that_differ(parallel, serial)))
    assert found[0]
