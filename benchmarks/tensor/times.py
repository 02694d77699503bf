"""Measures steps with layers divided among two ranks, and steps on one, interleaved."""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.turns import StepContestant, ratio, summary, take_turns
from benchmarks.tensor.networks import Network
from nnmpi import optim
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker


def measure(group: Group, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each network, the same on all ranks. Collective.

    Args:
        group: the ranks.
        settings: "networks", each as the arguments of a `Network`, and "rounds".
    """
    alone = group.split(group.rank)
    networks = [Network(**fields) for fields in settings["networks"]]
    shared = [StepContestant(each.name, _worker(each, group), each.batch()) for each in networks]
    serial = [StepContestant(each.name, _worker(each, alone), each.batch(), group.is_root) for each in networks]
    take_turns([*shared, *serial], group, settings["rounds"])
    rows = []
    for both, one in zip(shared, serial, strict=True):
        step_s, serial_s = both.seconds(group), one.seconds(group)
        row = {"network": both.name, "tp": group.size, "steps": len(step_s)}
        rows.append(row | summary("step", step_s) | summary("serial", serial_s) | ratio("speed", serial_s, step_s))
    for contestant in (*shared, *serial):
        contestant.worker.release()
    return rows


def _worker(network: Network, ranks: Group) -> Worker:
    """Return a worker that shares a network among some ranks. Collective over them."""
    where = arrange(network.build(), ranks, Layout(1, 1, ranks.size))
    where.model.initialize(seed=1)
    return Worker(where.model, optim.build("sgd", where.model.storage, lr=1e-3), ranks, arrangement=where)
