"""A run that changes its layout at a checkpoint goes on as the serial run does, and its file is the
serial run's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnmpi import models, optim
from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import GradientExchange, Layout, Numerics
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Loader
from nnmpi.nn.chain import open_chain
from nnmpi.nn.module import Module
from nnmpi.shard import split
from nnmpi.train.checkpoint import RunState, Saver, find, restore, state_values
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import MetricsRecorder
from tests.equivalence.reference import digits

# whole trainings, of which those on 33 ranks took five seconds
pytestmark = pytest.mark.simulated(max_size=12)

STEPS = 4  # two under each layout
MODELS: dict[str, tuple[Callable[..., Module], dict[str, Any]]] = {
    "mlp": (models.mlp, {"hidden": (13, 7)}),
    "resnet": (models.resnet, {"width": 3}),
}


def layouts(world: int, name: str) -> list[Layout]:
    """Return pure and mixed layouts of the world, and one in which a rank has several stages."""
    build, options = MODELS[name]
    layers = len(open_chain(build(digits().sample_shape, 10, **options)))
    meshes = {(world, 1, 1), (1, 1, world)}
    meshes |= {(world // n, n, 1) for n in (2, 3) if world % n == 0}
    meshes |= {(world // 4, 2, 2)} if world % 4 == 0 else set()
    result = [
        Layout(*mesh, split=[len(part) for part in split(layers, mesh[1])])
        for mesh in sorted(meshes)
    ]
    if world % 2 == 0:
        parts = [len(part) for part in split(layers, 4)]
        result.append(
            Layout(world // 2, 2, 1, schedule="interleaved", virtual_stages=2, split=parts)
        )
    return result


class Job:
    """One worker and its data."""

    def __init__(self, group: Group, name: str, layout: Layout | None, seed: int = 5) -> None:
        self.dataset, self.group = digits(), group
        build, options = MODELS[name]
        model = build(self.dataset.sample_shape, self.dataset.classes, **options)
        where = None
        if layout is not None:
            where = arrange(
                model, group, layout, np.zeros((4, *self.dataset.sample_shape)), dtype="float64"
            )
            model = where.model
        model.initialize(seed=seed, dtype="float64")
        optimizer = optim.build("adam", model.storage, lr=1e-2)
        self.worker = Worker(
            model,
            optimizer,
            group,
            arrangement=where,
            exchange=GradientExchange(check=True),
            numerics=Numerics(clip=1.0),
        )
        rank, world = (
            (group.rank, group.size) if where is None else (where.data_rank, where.data_ranks)
        )
        fixed = layout is not None and layout.fixed
        self.loader = Loader(
            self.dataset,
            11,
            rank=rank,
            world=world,
            microbatches=3,
            whole_microbatches=fixed,
            dtype="float64",
        )

    def train(self, first: int, last: int) -> None:
        """Do these steps of the run."""
        with self.loader.epoch(0, start=first) as batches:
            for _ in range(first, last):
                self.worker.step(next(batches))

    def save(self, folder: RunFolder, step: int) -> None:
        """Write a checkpoint."""
        with (
            MetricsRecorder(None) as recorder,
            Saver(folder.checkpoints, recorder, self.group) as saver,
        ):
            values = state_values(self.worker, RunState(step=step, samples=9))
            saver.save(self.worker, step, values)
            saver.wait()

    def restore(self, folder: RunFolder) -> list[str]:
        """Read the last checkpoint, and return what there is to say."""
        return restore(self.worker, find(folder, self.group), folder, RunState(samples=9))[1]

    def close(self) -> None:
        """Give the groups back."""
        self.worker.release()
        self.worker.arrangement.mesh.free()

    def arrays(self) -> dict[str, Array]:
        """Return the whole model's and optimizer's arrays, on every rank."""
        model, optimizer = self.worker.state()
        return model.to_dict(everywhere=True) | optimizer.to_dict(everywhere=True)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_it_goes_on_under_another_layout(group: Group, tmp_path: Path, name: str) -> None:
    folder = RunFolder(Path(group.share(str(tmp_path))))
    alone = group.split(group.rank)
    serial = Job(alone, name, None)
    serial.train(0, STEPS)
    expected = serial.arrays()
    choices = layouts(group.size, name)[:: 1 if name == "mlp" else 2]
    for first, second in zip(choices, choices[1:] + choices[:1], strict=True):
        before = Job(group, name, first)
        before.train(0, 2)
        before.save(folder, step=2)
        after = Job(group, name, second, seed=9)
        after.restore(folder)
        after.train(2, STEPS)
        result = after.arrays()
        wrong = [
            key
            for key, array in expected.items()
            if not np.allclose(result[key], array, rtol=1e-8, atol=1e-10)
        ]
        assert not any(group.gather(wrong)), (first, second, wrong)
        before.close()
        after.close()
    alone.free()


def test_with_a_fixed_order_of_sums_it_goes_on_with_the_same_bits(
    group: Group, tmp_path: Path
) -> None:
    folder = RunFolder(Path(group.share(str(tmp_path))))
    alone = group.split(group.rank)
    serial = Job(alone, "mlp", Layout(reduction="fixed"))
    serial.train(0, STEPS)
    expected = serial.arrays()
    layout = Layout(group.size, 1, 1, reduction="fixed")
    for first, second in ((layout, layout),):
        before, after = Job(group, "mlp", first), Job(group, "mlp", second, seed=9)
        before.train(0, 2)
        before.save(folder, step=2)
        text = after.restore(folder)[1:]
        assert all(item.endswith(": equal bit for bit") for item in text)
        after.train(2, STEPS)
        result = after.arrays()
        wrong = [key for key, array in expected.items() if not np.array_equal(result[key], array)]
        assert not any(group.gather(wrong)), (first, second, wrong)
        before.close()
        after.close()
    alone.free()
