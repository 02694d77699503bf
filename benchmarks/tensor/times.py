"""Measures steps with layers sharded over two ranks, and steps on one, interleaved."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.harness.turns import StepContestant, ratio, summary, take_turns
from nnmpi import nn, optim
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Batch, Loader
from nnmpi.models.cnn import cnn
from nnmpi.models.mlp import mlp

CLASSES = 10
IMAGE = (28, 28, 1)


def build(name: str, width: int = 0, layers: int = 0) -> nn.Sequential:
    """Return a network, not initialized.

    Args:
        name: "mlp", "cnn", or "towers": two equal branches of two convolutions, one on each rank.
        width: of the MLP's hidden layers.
        layers: number of the MLP's hidden layers; odd, so that the last layer ends a pair.
    """
    if name == "cnn":
        return cnn(IMAGE, CLASSES)
    if name == "towers":
        towers = nn.Branches(
            *(nn.Sequential(*list(cnn(IMAGE, 64))[:7], nn.Linear(3136, 64)) for _ in range(2))
        )
        return nn.Sequential(towers, nn.ReLU(), nn.Linear(128, CLASSES))
    return mlp((width,), CLASSES, (width,) * layers)


def batch(rows: int, shape: tuple[int, ...]) -> Batch:
    """Return a batch of noise, the same on every rank."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((rows, *shape), np.float32)
    with Loader(
        Dataset("noise", x, generator.integers(0, CLASSES, rows), CLASSES), rows, workers=0
    ).epoch(0) as result:
        return next(result)


def measure(group: Group, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each network, the same on all ranks. Collective.

    Args:
        group: the ranks.
        settings: "rounds", and by the name of each network its "rows", "width" and "layers".
    """
    alone = group.split(group.rank)
    networks, rows = {name: sizes for name, sizes in settings.items() if name != "rounds"}, []
    shared, serial = (
        [_contestant(ranks, group, name, **sizes) for name, sizes in networks.items()]
        for ranks in (group, alone)
    )
    take_turns([*shared, *serial], group, settings["rounds"])
    for both, item in zip(shared, serial, strict=True):
        step_s, serial_s = both.seconds(group), item.seconds(group)
        row = {"network": both.name, "tp": group.size, "steps": len(step_s)}
        rows.append(
            row
            | summary("step", step_s)
            | summary("serial", serial_s)
            | ratio("speed", serial_s, step_s)
        )
    for contestant in (*shared, *serial):
        contestant.worker.release()
    return rows


def _contestant(
    ranks: Group, group: Group, name: str, rows: int, width: int = 0, layers: int = 0
) -> StepContestant:
    """Return a worker whose network is sharded over `ranks`. Collective over them."""
    where = arrange(build(name, width, layers), ranks, Layout(1, 1, ranks.size))
    where.model.initialize(seed=1)
    worker = Worker(
        where.model, optim.build("sgd", where.model.storage, lr=1e-3), ranks, arrangement=where
    )
    return StepContestant(
        name, worker, batch(rows, (width,) if width else IMAGE), ranks is group or group.is_root
    )
