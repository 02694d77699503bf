"""Optimizers' state and weights out of memory: bits of the run in memory, bytes as predicted,
checkpoints, limits.
"""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

import nnmpi
from nnmpi import Layout, models, optim, simulate
from nnmpi.base.errors import DeviceError, UsageError
from nnmpi.data import Dataset
from nnmpi.memory.ledger import ACTIVATIONS, KINDS, PARAMETERS, STATE
from tests.equivalence.reference import Setup, batches, build
from tests.memory.test_recompute import store_here

ON_HOST = pytest.mark.host_only("a device's arrays go to the host's memory")


def numbers():
    x = np.random.default_rng(0).normal(size=(8, 9)).astype("f4")
    return Dataset("numbers", x, np.arange(8) % 3, 3)


def steps(group, layout):
    """Return the ledger's report after some steps, all arrays, and the worker's line about
    memory.
    """
    setup = Setup(
        models.mlp, {"hidden": (64,) * 9}, "adamw", dtype="float32", data=numbers, batch_size=4
    )
    options = {"allreduce": "native", "fused_update": False, "check": False}
    worker = build(setup, group, layout, counts=True, **options)
    for batch in islice(batches(setup, worker), 2):
        worker.step(batch)
    state = [item.to_dict(everywhere=True) for item in worker.state()]
    report, line = nnmpi.memory.report(), worker.memory()[0]
    worker.release()
    return report, state, line


@ON_HOST
def test_a_model_that_does_not_fit_trains(tmp_path):
    """Of 16 P bytes with Adam, 8 P are there with its state out, and with weights out 4 P and
    units.
    """
    elements = sum(
        -(-parameter.size // 16) * 16 for parameter in models.mlp((9,), 3, (64,) * 9).parameters()
    )
    out = {"offload": str(tmp_path), "offload_state": "optimizer"}
    near = 9 * elements
    message = (
        r"rank 0 needs .* offload the optimizer's state with offload-state optimizer, which then"
        r" needs \d"
    )
    with pytest.raises(DeviceError, match=message):
        simulate(lambda group: steps(group, Layout(memory_limit=near)), 1)
    plain = simulate(lambda group: steps(group, Layout(memory_limit=2**40)), 1)[0]
    for limit, layout in (
        (near, Layout(**out)),
        (6 * elements, Layout(zero=3, unit_bytes=1, **out | {"offload_state": "all"})),
    ):
        limited = replace(layout, memory_limit=limit)
        report, state, line = simulate(lambda group, at=limited: steps(group, at), 1)[0]
        assert report.peaks[STATE] == report.predicted[STATE] == 0
        assert (
            report.peaks[PARAMETERS]
            == report.predicted[PARAMETERS]
            == (0 if layout.zero else 4 * elements)
        )
        # the batch, too
        assert sum(report.peaks[kind] for kind in KINDS if kind != ACTIVATIONS) <= limit + 2**12
        assert "as predicted" in line
        np.testing.assert_equal([*state], [*plain[1]])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_updates_what_comes(momentum, tmp_path):
    """On a device, too; with frozen parameters, and without any state."""
    store, backend = store_here(tmp_path)
    runs = []
    for away in (False, True):
        model = models.mlp((9,), 3, (20, 20)).initialize(seed=0, backend=backend)
        list(model.parameters())[0].requires_grad = False
        model.storage.state_store = store if away else None
        optimizer = optim.SGD(model.storage, lr=0.1, momentum=momentum)
        for _ in range(3):
            model.zero_grad()
            model(nnmpi.Tensor(backend.asarray(np.ones((2, 9), "float32")))).sum().backward()
            optimizer.step()
        assert (optimizer.state_bytes > 0) == (momentum > 0 and not away)
        slots = [
            backend.to_host(array) for arrays in optimizer.slots().values() for array in arrays
        ]
        runs.append([*slots, *model.state().values()])
    for ours, theirs in zip(*runs, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    store.close()


@ON_HOST
def test_what_does_not_go_is_refused(tmp_path):
    """In a sentence."""
    out = {"offload": str(tmp_path), "offload_state": "optimizer"}
    for options, message in (
        ({"offload_state": "optimizer"}, "needs a target; give offload, too"),
        ({**out, "offload_state": "weights"}, "it must be one of optimizer, all"),
        ({**out, "offload_state": "all", "zero": 2}, "give zero 3, or offload_state optimizer"),
        ({**out, "pipeline": "pipedream"}, "pipedream"),
    ):
        with pytest.raises(UsageError, match=message):
            Layout(**options)
