"""Measures steps with layers shared out over two ranks, and steps on one, interleaved."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.pipeline.quiet import rest_until
from benchmarks.pipeline.times import quartiles
from benchmarks.tensor.networks import Network
from nnmpi import optim
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker

WARM_UP = 2


class Contestant:
    """A network on some ranks. Making one is collective over them."""

    def __init__(self, network: Network, ranks: Group, runs: bool) -> None:
        self.network, self.ranks, self.runs, self.batch = network, ranks, runs, network.batch()
        where = arrange(network.build(), ranks, Layout(1, 1, ranks.size))
        where.model.initialize(seed=1)
        optimizer = optim.build("sgd", where.model.storage, lr=1e-3)
        self.worker = Worker(where.model, optimizer, ranks, arrangement=where)
        self.steps_s: list[list[float]] = []  # begin and end

    def step(self, keep: bool) -> None:
        """Do a step."""
        begin = time.perf_counter()
        self.worker.step(self.batch)
        if keep:
            self.steps_s.append([begin, time.perf_counter()])


def measure(group: Group, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each network. Collective.

    Args:
        settings: "networks", each as the arguments of a `Network`, and "rounds".
    """
    alone = group.split(group.rank)
    networks = [Network(**given) for given in settings["networks"]]
    shared = [Contestant(network, group, True) for network in networks]
    serial = [Contestant(network, alone, group.is_root) for network in networks]
    contestants = [*shared, *serial]
    for number in range(-WARM_UP, settings["rounds"]):
        for contestant in random.Random(number).sample(contestants, len(contestants)):
            rest_until(group)
            group.barrier()
            if contestant.runs:
                contestant.step(keep=number >= 0)
            rest_until(group)
    rows = [_row(group, *pair) for pair in zip(shared, serial, strict=True)]
    for contestant in contestants:
        contestant.worker.release()
    return rows


def _row(group: Group, shared: Contestant, serial: Contestant) -> dict[str, Any]:
    """Return one network's times, the same on all ranks."""
    both_s, alone_s = _seconds(group, shared), _seconds(group, serial)
    ratios = alone_s / both_s
    return {
        "network": shared.network.name,
        "tp": group.size,
        "steps": len(both_s),
        "step_s": median(both_s),
        "step_quartiles_s": quartiles(both_s),
        "serial_s": median(alone_s),
        "serial_quartiles_s": quartiles(alone_s),
        "speed": median(ratios),
        "speed_quartiles": quartiles(ratios),
    }


def _seconds(group: Group, contestant: Contestant) -> np.ndarray[Any, Any]:
    """Return the steps' times, from when the last rank began to when the last one ended."""
    stamps: Sequence[Any] = [each for each in group.gather(contestant.steps_s) if each]
    begins, ends = np.array(stamps)[..., 0].max(axis=0), np.array(stamps)[..., 1].max(axis=0)
    return np.asarray(ends - begins)
