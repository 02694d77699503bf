"""Pipelines, shards and fixed sums on a stand-in device: the host's numbers, with messages through host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nnmpi import models, optim
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Loader
from nnmpi.nn.chain import open_chain
from nnmpi.shard import split
from tests.device.library import device_backend
from tests.equivalence.reference import digits
from tests.worker_options import grouped


def train(group: Group, backend: Backend, build: Any, layout: Layout) -> dict[str, Any]:
    """Return losses, norms, weights and evaluation of one epoch."""
    dataset = digits()
    model = build(dataset.sample_shape, dataset.classes)
    if (
        layout.asynchronous
    ):  # where weights are out of date, the numbers depend on the cuts, which are not to be measured
        links = len(open_chain(model))
        layout = replace(layout, split=[len(each) for each in split(links, group.size)])
    where = arrange(model, group, layout, np.zeros((4, *dataset.sample_shape)), "float64", backend)
    model = where.model.initialize(seed=0, dtype="float64", backend=backend)
    clip = None if layout.asynchronous else 1.0
    options: dict[str, Any] = {"backend": backend, "clip": clip, "check": True, "arrangement": where}
    worker = Worker(model, optim.Adam(model.storage, lr=1e-3), group, **grouped(**options))
    place = {"rank": where.data_rank, "world": where.data_ranks, "whole": layout.fixed}
    loader = Loader(dataset, 31, microbatches=4, dtype="float64", **place)
    reports = [worker.step(batch) for batch in loader.epoch(0)]
    test = Loader(dataset, 17, rank=where.data_rank, world=where.data_ranks, dtype="float64")
    evaluation = worker.evaluate(test.epoch(0))
    state = worker.state()[0].to_dict(everywhere=True)
    worker.release()
    norms = np.nan_to_num([report.grad_norm for report in reports])
    return {
        "losses": np.array([report.loss for report in reports]),
        "norms": norms,
        "evaluation": np.array([evaluation.loss, evaluation.accuracy]),
        **state,
    }


def layouts(size: int) -> list[Layout]:
    """Return layouts for a number of ranks."""
    found = [
        Layout(pp=size, dp=1, schedule="zero-bubble"),
        Layout(tp=size, dp=1),
        Layout(reduction="fixed"),
        Layout(pp=size, dp=1, schedule="pipedream"),
    ]
    if size % 2 == 0:
        found += [Layout(pp=2, tp=size // 2, recompute="always"), Layout(dp=size // 2, pp=2, reduction="fixed")]
    return found


@pytest.mark.mpi
@pytest.mark.parametrize(
    "number", [*range(4), *(pytest.param(n, marks=pytest.mark.needs_ranks(2, 4, 6, 8)) for n in (4, 5))]
)
@pytest.mark.parametrize("build", [models.cnn, models.resnet], ids=["cnn", "resnet"])
def test_layouts_on_a_device_are_layouts_on_the_host(group: Group, build: Any, number: int) -> None:
    """A NumPy array that meets a device array would raise."""
    if number >= len(layouts(group.size)):
        return
    layout = layouts(group.size)[number]
    device = train(group, device_backend(), build, layout)
    host = train(group, numpy_backend(), build, layout)
    different = [name for name in host if not np.allclose(device[name], host[name], rtol=1e-7, atol=1e-9)]
    assert not any(group.gather(different)), (layout, different)
