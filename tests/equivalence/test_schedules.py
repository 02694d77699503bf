"""Every schedule that flushes gives the serial run's numbers; those of the contract's cover, which
meet more there, are left out here. Of stages there and back the first and the last are on one rank.
"""

from dataclasses import replace

import numpy as np
import pytest

from nnmpi import Layout, arrange
from nnmpi.backend.backend import numpy_backend
from nnmpi.compose.inference import Inference
from nnmpi.models import mlp
from nnmpi.schedule.schedules import TRAINING, example_of
from tests.equivalence import own
from tests.equivalence.cover import SCHEDULES, SETUPS, spread
from tests.equivalence.reference import Setup, assert_same, run, serial_run

OTHERS = [name for name in TRAINING if name not in SCHEDULES and not example_of(name).asynchronous]
CASES = {
    "mlp": SETUPS["mlp"],
    "tied": Setup(own.tied, microbatches=5),
    "words": replace(Setup(own.words, microbatches=4), prepare=own.integers),
}


@pytest.mark.both_worlds(min_size=2, max_size=4)
@pytest.mark.parametrize("name", CASES)
def test_other_schedules_give_the_serial_run(group, alone, name):
    setup = CASES[name]
    serial = serial_run(setup, alone) if group.is_root else None
    for number, schedule in enumerate(OTHERS):
        mesh = (2, 2, 1) if group.size == 4 and number == 1 else (1, group.size, 1)
        layout = spread(setup, mesh, schedule, activation_memory="least" if number == 1 else None)
        assert layout.pipeline == schedule
        parallel = run(setup, group, layout, synchronous_sends=True, replays=number == 0)
        assert_same(group, parallel, serial, setup, f"{name} {layout}")


@pytest.mark.simulated(min_size=2, max_size=3)
def test_outputs_come_from_the_rank_of_the_last_stage(group):
    x = np.random.default_rng(0).normal(size=(7, 5))

    def outputs(ranks):
        layout = Layout(pp=ranks.size, pipeline="zb-v" if ranks.size > 1 else "1f1b")
        where = arrange(mlp([5], 3, [8] * 6), ranks, layout, x[:4], "float64")
        where.model.initialize(seed=0, dtype="float64")
        return Inference(where, numpy_backend())(x)

    np.testing.assert_allclose(outputs(group), outputs(group.split(group.rank)), rtol=1e-12)
