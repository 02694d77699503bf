"""Measures what each rank of a pipeline keeps: parameters with gradients and state, and activations at their peak."""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.memory import traced
from benchmarks.pipeline.network import EvenMlp
from nnmpi import optim
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker


def measure(group: Group, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each case and rank. Collective.

    Args:
        settings: "network", and "cases": the schedule and the recomputation of each.
    """
    network = EvenMlp(**settings["network"])
    batch = network.batch()
    rows = []
    for schedule, recompute in settings["cases"]:
        model = network.build()
        pp = group.size
        layout = Layout(
            1, pp, 1, schedule, split=network.cut(pp), activation_memory="least" if recompute == "always" else None
        )
        with traced() as building:
            where = arrange(model, group, layout)
            where.model.initialize(seed=1)
            optimizer = optim.build("adam", where.model.storage, lr=1e-4)
        worker = Worker(where.model, optimizer, group, arrangement=where)
        worker.step(batch)  # agrees on shapes, and makes what is made once
        with traced() as step:
            worker.step(batch)
        worker.release()
        own = {"parameter_bytes": building.kept_bytes, "building_bytes": building.peak_bytes}
        own["activation_bytes"] = step.peak_bytes
        case = {"pp": pp, "schedule": schedule, "recompute": recompute}
        rows += [{**case, "stage": rank, **each} for rank, each in enumerate(group.gather(own))]
    return rows
