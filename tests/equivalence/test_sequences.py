"""Language models under every layout: sentences that end anywhere, batches, heads and stages that divide nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from nnmpi import models
from nnmpi.comm.group import Group
from nnmpi.compose.layout import Layout
from nnmpi.nn.chain import open_chain
from nnmpi.nn.module import Module
from tests.equivalence.cover import MEMORIES, SCHEDULES, meshes
from tests.models.sequence_runs import TIME, TOKENS, compare, train

MODELS: dict[str, Callable[[], Module]] = {
    "gpt": lambda: models.gpt(TOKENS, TIME + 2, features=12, layers=3, heads=3, dropout=0.1),
    "lstm": lambda: models.lstm(TOKENS, features=10, layers=3, dropout=0.1),
    "lstm-untied": lambda: models.lstm(TOKENS, features=9, layers=2, dropout=0.1, tied=False),
}


def layouts(model: str, ranks: int) -> list[Layout]:
    """Return a layout for each (dp, pp, tp), with the schedules in turn."""
    most = len(open_chain(MODELS[model]()))
    found = []
    for number, mesh in enumerate(meshes(ranks, most)):
        schedule = SCHEDULES[(number + ranks) % len(SCHEDULES)] if mesh[1] > 1 else "1f1b"
        virtual = 2 if schedule == "interleaved" and 2 * mesh[1] <= most else 1
        memory = MEMORIES[(number + ranks) % 2] if mesh[1] > 1 else None
        count = mesh[1] * virtual
        split = [most // count + (stage < most % count) for stage in range(count)]
        layout = Layout(*mesh, schedule, virtual, tuple(split) if mesh[1] > 1 else "auto")
        found.append(replace(layout, activation_memory=memory))
    return found


@pytest.mark.simulated(max_size=8)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_is_the_serial_run(group: Group, alone: Group, model: str) -> None:
    """With dropout, clipped gradients and 3 microbatches; more ranks than heads, and than rows, too."""
    serial = train(alone, MODELS[model], Layout()) if group.is_root else None
    for layout in layouts(model, group.size):
        found = train(group, MODELS[model], layout)
        relative, absolute = compare(found, serial) if serial is not None else (0.0, 0.0)
        assert relative < 1e-11 and absolute < 1e-11, f"{layout}: {relative}, {absolute}"
