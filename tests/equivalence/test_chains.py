"""Weights of models whose layers are no plain chain, before any step, and ties that stand in
several stages.
"""

from dataclasses import replace

import numpy as np
import pytest

from nnmpi.base.errors import LayoutError, UsageError
from tests.equivalence import own
from tests.equivalence.cover import kinds, layers, spread
from tests.equivalence.reference import Setup, build, release

pytestmark = pytest.mark.simulated


def test_the_state_holds_tied_weights_once(group):
    for layout in kinds(group.size, Setup(own.tied)):
        worker = build(Setup(own.tied), group, layout)
        model, optimizer = worker.state()
        expected = [f"{layer}.{part}" for layer in (1, 3, 5, 9, 13) for part in ("weight", "bias")]
        expected.remove("9.bias")  # which is 5.bias
        assert list(model.specs()) == expected
        assert len(optimizer.specs()) == 2 * len(expected)
        release(worker)


def test_ties_over_stages_are_refused_where_they_would_be_wrong(group):
    """On all ranks, also those that have no part in it. One stage alone never updates."""
    setup = Setup(own.tied)
    for pp in sorted({1, 2 if group.size % 2 == 0 else 1, min(group.size, layers(setup))}):
        if group.size % pp:
            continue
        layout = spread(setup, (group.size // pp, pp, 1), "pipedream")
        if pp == 1:
            with pytest.raises(UsageError, match="pipedream needs two stages or more"):
                build(setup, group, layout)
            continue
        with pytest.raises(
            LayoutError, match=r"^(3|5)\.\w+ is in stages 0?.*\d, which cannot be combined with"
        ):
            build(setup, group, layout)


def test_weights_are_the_serial_runs_from_the_start(group, alone):
    """Before any step: each layout's parts make up the values that the whole model draws."""
    for model in (own.skipping, own.tied, own.words):
        setup = replace(Setup(model), prepare=own.integers if model is own.words else (lambda x: x))
        serial = build(setup, alone).model.state()
        for layout in kinds(group.size, setup):
            worker = build(setup, group, layout)
            np.testing.assert_equal(worker.state()[0].to_dict(everywhere=True), serial)
            release(worker)
