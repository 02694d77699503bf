"""Tokens on a stand-in device: sentences of many lengths, uploaded as they are, give the host's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnmpi import models, optim
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.world import simulate
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Loader
from nnmpi.data.text import load_text
from nnmpi.data.token_file import TextSource, prepare_tokens
from nnmpi.data.upload import batches
from tests.device.library import device_backend


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
        with batches(held_out, 0, backend) as given:
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
