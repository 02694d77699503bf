"""A run that changes its layout halfway, by the state of the whole model, goes on as the serial run
does.
"""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from nnmpi import Layout, models
from tests.equivalence import own
from tests.equivalence.cover import kinds
from tests.equivalence.reference import Setup, batches, build, release, tolerance
from tests.equivalence.rows import DECAY, MOMENTUM, NOISY
from tests.harness.slow import MORE_LAYOUTS, once_more

pytestmark = pytest.mark.simulated

BEFORE, STEPS = 2, 5  # steps under the first layout, and altogether
SETUPS = {
    "tied": Setup(own.tied, microbatches=2),
    "noisy": replace(NOISY, **DECAY),
    "resnet": Setup(models.resnet, {"width": 3}, microbatches=2, **MOMENTUM),
}


def steps(setup, worker, first, last):
    """Do these steps of the run, and return their losses."""
    return [worker.step(batch).loss for batch in islice(batches(setup, worker), first, last)]


def arrays(worker):
    """Return the whole model's arrays and the optimizer's, on rank 0."""
    model, optimizer = worker.state()
    return model.to_dict() | {
        f"optimizer {name}": array for name, array in optimizer.to_dict().items()
    }


def serial(setup, group, alone, layout=None):
    """Return the losses of the run of one rank, and its last arrays on rank 0, which does it."""
    if not group.is_root:
        return group.share(None), {}
    worker = build(setup, alone, layout)
    return group.share(steps(setup, worker, 0, STEPS)), arrays(worker)


def move(old, new):
    """Give one worker's state to another, through the whole arrays on rank 0."""
    for mine, theirs in zip(old.state(), new.state(), strict=True):
        full = {}
        mine.gather(lambda name, array, into=full: into.update({name: array.copy()}))
        theirs.scatter(full.__getitem__)
    new.optimizer.steps = old.optimizer.steps


@pytest.mark.parametrize(
    "name", [once_more(name, name != "tied", MORE_LAYOUTS) for name in sorted(SETUPS)]
)
def test_any_layout_goes_on_where_any_other_stopped(group, alone, name):
    """Each kind of layout is once the first and once the second; the second starts with other
    weights.
    """
    setup = SETUPS[name]
    losses, expected = serial(setup, group, alone)
    limit = tolerance(setup.dtype, STEPS, setup.optimizer)
    chosen = kinds(group.size, setup)
    for first, second in zip(chosen, chosen[1:] + chosen[:1], strict=True):
        before = build(setup, group, first, replays=False)
        result = steps(setup, before, 0, BEFORE)
        after = build(setup, group, second, replays=False)
        for array in after.model.storage.data:
            array[...] = 9.0
        move(before, after)
        release(before)
        result += steps(setup, after, BEFORE, STEPS)
        assert np.allclose(result, losses, rtol=limit, atol=0)
        mine = arrays(after)
        release(after)
        wrong = [
            key
            for key, array in mine.items()
            if not np.allclose(array, expected[key], rtol=limit, atol=limit)
        ]
        wrong += sorted(mine.keys() ^ expected.keys()) if group.is_root else []
        assert not any(group.gather(wrong)), (first, second)


def test_under_fixed_sums_it_goes_on_with_the_same_bits(group, alone):
    setup = replace(SETUPS["noisy"], dtype="float32")
    losses, _ = serial(setup, group, alone, Layout(reduction="fixed"))
    layout = Layout(dp=group.size, reduction="fixed")
    before, after = build(setup, group, layout), build(setup, group, layout)
    result = steps(setup, before, 0, BEFORE)
    move(before, after)
    assert result + steps(setup, after, BEFORE, STEPS) == losses
    release(before)
    release(after)
