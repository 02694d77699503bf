"""Measures what each rank of a tensor group keeps: parameters with gradients and state, activations at their peak."""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.memory import traced
from benchmarks.tensor.networks import Network
from nnmpi import optim, timeline
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from nnmpi.parallel.sharded.collectives import CATEGORY


def measure(group: Group, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each network and rank, with the bytes that a step's collectives were called with. Collective.

    Args:
        settings: "networks", each as the arguments of a `Network`.
    """
    rows = []
    for fields in settings["networks"]:
        network = Network(**fields)
        batch, model = network.batch(), network.build()
        with traced() as building:
            where = arrange(model, group, Layout(1, 1, group.size))
            where.model.initialize(seed=1)
            optimizer = optim.build("adam", where.model.storage, lr=1e-4)
        worker = Worker(where.model, optimizer, group, arrangement=where)
        worker.step(batch)
        with traced() as step:
            worker.step(batch)
        own = {
            "parameter_bytes": building.kept_bytes,
            "building_bytes": building.peak_bytes,
            "activation_bytes": step.peak_bytes,
            "exchanged_bytes": exchanged(worker, batch),
        }
        worker.release()
        case = {"network": network.name, "tp": group.size}
        rows += [{**case, "rank": rank, **each} for rank, each in enumerate(group.gather(own))]
    return rows


def exchanged(worker: Worker, batch: Any) -> dict[str, int]:
    """Return the bytes of the arrays that a step's collectives were given in the layers, by collective."""
    found: dict[str, int] = {}
    with timeline.recording(timeline.Timeline()) as mine:
        worker.step(batch)
    for event in mine.events:
        if event.category == CATEGORY and event.args is not None:
            found[event.name] = found.get(event.name, 0) + int(event.args["bytes"])
    return found
