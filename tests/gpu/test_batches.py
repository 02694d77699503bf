"""Batches on a device are the host's: copied ahead of the steps, of images and of sentences of many
lengths.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnmpi import models, optim
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Loader
from nnmpi.data.text import TextSource, load_text, prepare_tokens
from nnmpi.data.transform import Compose, Flip, Normalize, Shift
from tests.equivalence.reference import digits


@pytest.mark.parametrize(
    "transform", [None, Compose(Shift(1), Flip(), Normalize.fit(digits()))], ids=["none", "all"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_batches_on_a_device_are_the_hosts(device: Backend, transform: Any, dtype: str) -> None:
    """Bit for bit, the last short one and an empty part too, while the next one is on its way."""
    for rank, world in ((0, 1), (2, 3)):
        loader = Loader(digits(), 28, rank=rank, world=world, transform=transform, dtype=dtype)
        with loader.epoch(1) as host, loader.epoch(1, backend=device) as there:
            count = 0
            for ours, theirs in zip(there, host, strict=True):
                np.testing.assert_array_equal(device.to_host(ours.x), theirs.x)
                np.testing.assert_array_equal(device.to_host(ours.y), theirs.y)
                np.testing.assert_array_equal(ours.labels, theirs.y)
                assert ours.cuts == theirs.cuts and ours.x.dtype == dtype
                count += 1
        assert count == loader.batches_per_epoch


def test_a_transform_of_ones_own_is_done_on_the_host(device: Backend) -> None:
    """It gets floats, scaled, as everywhere."""
    loader = Loader(digits(), 28, transform=lambda x, indices, epoch, seed: x + 1)
    ours, theirs = next(loader.epoch(0, backend=device)), next(loader.epoch(0))
    np.testing.assert_array_equal(device.to_host(ours.x), theirs.x)


@pytest.mark.parametrize("sentences", [False, True], ids=["blocks", "sentences"])
def test_padded_batches_give_the_hosts_numbers(
    device: Backend, sentences: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path))
    random = np.random.default_rng(0)
    (tmp_path / "a.txt").write_text(
        "\n".join("".join(random.choice(list("abc "), n)) + "d" for n in range(1, 24))
    )
    source = TextSource(tmp_path / "a.txt", sentences=sentences)
    prepare_tokens(source)
    train, test = load_text(source, 9)

    def main(group: Group, backend: Backend) -> dict[str, Any]:
        model = models.gpt(train.classes, 9, 6, 1, 2).initialize(
            seed=0, dtype="float64", backend=backend
        )
        worker = Worker(model, optim.SGD(model.storage, lr=0.1), group, backend=backend)
        loader = Loader(
            train, 5, rank=group.rank, world=group.size, microbatches=2, dtype="float64"
        )
        report = worker.run(loader, 0, 0, loader.batches_per_epoch, 0, lambda step: 0.1)
        held_out = Loader(test, 5, rank=group.rank, world=group.size, shuffle=False)
        with held_out.epoch(0, backend=backend) as given:
            tested = worker.evaluate(given)
        state = worker.state()[0].to_dict(everywhere=True)
        worker.release()
        numbers = [
            report.totals.loss_sum,
            report.totals.targets,
            tested.loss,
            tested.accuracy,
            tested.targets,
        ]
        return {**state, "numbers": np.array(numbers)}

    host, there = (
        simulate(lambda group, backend=backend: main(group, backend), 2)[0]
        for backend in (numpy_backend(), device)
    )
    assert host["numbers"][1] == train.targets.sum() and host["numbers"][4] == test.targets.sum()
    for name, values in host.items():
        np.testing.assert_allclose(there[name], values, rtol=1e-9, atol=1e-11, err_msg=name)
