"""Pipelines, shards and fixed sums on a stand-in device: the host's numbers, with messages through host memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnmpi import models, optim
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Loader
from nnmpi.data.text import TextSource, load_text, prepare_tokens
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
        layers = len(open_chain(model))
        layout = replace(layout, split=[len(each) for each in split(layers, group.size)])
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
        found += [Layout(pp=2, tp=size // 2, activation_memory="least")]
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


# Tokens on a stand-in device: sentences of many lengths, uploaded as they are, give the host's numbers.


@pytest.mark.parametrize("sentences", [False, True], ids=["blocks", "sentences"])
def test_padded_batches_give_the_hosts_numbers(
    sentences: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path))
    random = np.random.default_rng(0)
    (tmp_path / "a.txt").write_text("\n".join("".join(random.choice(list("abc "), n)) + "d" for n in range(1, 24)))
    source = TextSource(tmp_path / "a.txt", sentences=sentences)
    prepare_tokens(source)
    train, test = load_text(source, 9)

    def main(group: Group, backend: Backend) -> dict[str, Any]:
        model = models.gpt(train.classes, 9, 6, 1, 2).initialize(seed=0, dtype="float64", backend=backend)
        worker = Worker(model, optim.SGD(model.storage, lr=0.1), group, backend=backend)
        loader = Loader(train, 5, rank=group.rank, world=group.size, microbatches=2, dtype="float64")
        report = worker.run(loader, 0, 0, loader.batches_per_epoch, 0, lambda step: 0.1)
        held_out = Loader(test, 5, rank=group.rank, world=group.size, shuffle=False)
        with held_out.epoch(0, backend=backend) as given:
            tested = worker.evaluate(given)
        state = worker.state()[0].to_dict(everywhere=True)
        worker.release()
        numbers = [report.totals.loss_sum, report.totals.targets, tested.loss, tested.accuracy, tested.targets]
        return {**state, "numbers": np.array(numbers)}

    host, device = (
        simulate(lambda group, backend=backend: main(group, backend), 2)[0]
        for backend in (numpy_backend(), device_backend())
    )
    assert host["numbers"][1] == train.targets.sum() and host["numbers"][4] == test.targets.sum()
    for name, values in host.items():
        np.testing.assert_allclose(device[name], values, rtol=1e-9, atol=1e-11, err_msg=name)
