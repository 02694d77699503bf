"""The contract: with the global batch fixed, each row of `rows.py` is the serial run, under every
layout it names.

`check` compares the ranks' weights after every step; rank 0 compares losses, gradients, weights and
evaluation with the serial run's, within a tolerance of rounding, or to the last bit. Passes are
replayed under one layout of each row; `compose/test_replayed.py` compares replays with passes.
"""

from dataclasses import replace
from math import prod

import pytest

from nnmpi import Layout, simulate
from tests.equivalence.cover import SETUPS
from tests.equivalence.reference import Setup, assert_same, differences, run, serial_run
from tests.equivalence.rows import FIXED, GPT, LIMITED, ROWS, SINGLE
from tests.harness.simulated import MOST_OF_A_TRAINING
from tests.harness.slow import cases


@pytest.mark.simulated
@pytest.mark.parametrize("name", ROWS)
def test_it_is_the_serial_run(group, alone, name):
    row = ROWS[name]
    serial = serial_run(row.alone or row.setup, alone, row.serial) if group.is_root else None
    layouts = row.layouts(group.size, row.setup)
    for number, layout in enumerate(layouts):
        options = {"replays": number == group.size % len(layouts), **row.options}
        parallel = run(row.setup, group, layout, synchronous_sends=True, **options)
        assert_same(
            group, parallel, serial, row.setup, f"{name}, {layout}", exact=row.serial is not None
        )


def name(case):
    if isinstance(case, Setup):
        return case.model.__name__
    axes = [
        f"{axis} {size}"
        for axis in ("dp", "pp", "tp", "sp")
        if (size := getattr(case, axis)) not in (1, "auto")
    ]
    return f"{' '.join(axes)} {case.sp_attention} zero {case.zero}"


@pytest.fixture(scope="module")
def serials():
    """Of each setup of `SINGLE` the serial run, once it was asked for."""
    return {}


@pytest.mark.host_only(
    "the device's double takes long, and runs the same kernels in the rows above"
)
@pytest.mark.parametrize(
    "setup, layout",
    cases(SINGLE, lambda _, layout: prod(layout.shape) <= MOST_OF_A_TRAINING),
    ids=name,
)
def test_a_layout_is_the_serial_run(setup, layout, serials):
    if id(setup) not in serials:
        (serials[id(setup)],) = simulate(lambda group: serial_run(setup, group), 1)
    ranks = prod(layout.shape)
    parallel = simulate(lambda group: run(setup, group, layout, replays=setup is not GPT), ranks)
    assert not differences(parallel[0], serials[id(setup)], setup)
    assert all(
        (item.losses, item.norms) == (parallel[0].losses, parallel[0].norms) for item in parallel
    )


@pytest.mark.simulated
def test_the_usual_sums_have_other_bits(group, alone):
    """Or the rows of a fixed order would show nothing."""
    setup = replace(SETUPS["cnn"], dtype="float32", microbatches=5)
    parallel = run(setup, group, Layout(dp=group.size), fused_update=False)
    assert not group.is_root or differences(
        parallel, serial_run(setup, alone, FIXED), setup, exact=True
    )


@pytest.mark.host_only("the device's double takes long")
def test_a_rank_that_counts_meets_the_others_as_often_as_those_that_replay():
    """In the second halves of experts' backward, which is a pass through graphs of their own: the
    ranks have different rows, so that some count a pass, eagerly, while others replay theirs.
    """
    layout = Layout(dp=2, pp=2, split=(1, 1, 5, 1), zero=3, expert_parallel=True, pipeline="v-min")
    (serial,) = simulate(lambda group: serial_run(LIMITED, group), 1)
    parallel = simulate(lambda group: run(LIMITED, group, layout, counts=True), 4)
    assert not differences(parallel[0], serial, LIMITED)
