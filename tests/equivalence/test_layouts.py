"""The contract: under every layout, schedule and all-reduce a run is the serial run, whatever MPI
buffers or does not.

Each test runs the cases of its number of ranks (see `cover.py`) with synchronous sends; `check`
compares the ranks' weights after every step, rank 0 compares losses, gradients, weights and
evaluation with the serial run's.
"""

from dataclasses import replace

import pytest

from tests.equivalence.cover import MODELS, SETUPS, cases
from tests.equivalence.reference import assert_same, run, serial_run


@pytest.mark.both_worlds
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_gives_the_serial_run(group, alone, model):
    """In buckets small enough that several are in flight."""
    setup = SETUPS[model]
    serial = serial_run(setup, alone) if group.is_root else None
    for number, case in enumerate(item for item in cases(group.size) if item.model == model):
        options = {"allreduce": case.allreduce, "bucket_bytes": 2000, "replays": number == 0}
        parallel = run(setup, group, case.layout, synchronous_sends=True, **options)
        assert_same(group, parallel, serial, setup, str(case))


@pytest.mark.both_worlds
def test_every_kind_of_layout_gives_the_serial_run_in_float32(group, alone):
    """SGD with momentum: Adam would blow rounding up where gradients are almost 0."""
    kinds = {case.kind: case for case in cases(group.size)}
    for number, case in enumerate(kinds.values()):
        model = MODELS[number % len(MODELS)]
        setup = replace(
            SETUPS[model],
            optimizer="sgd",
            optimizer_options={"momentum": 0.9, "nesterov": True},
            dtype="float32",
        )
        case = replace(case, model=model)
        serial = serial_run(setup, alone) if group.is_root else None
        options = {"synchronous_sends": True, "replays": number == 1}
        parallel = run(setup, group, case.layout, **options)
        assert_same(group, parallel, serial, setup, str(case))
