"""Runs with the fused update: the same weights as through shared sums, also when they are resumed."""

from pathlib import Path

import pytest

from tests.train.jobs import train
from tests.train.test_resume import last_checkpoint

pytestmark = pytest.mark.timeout(300)

WORDS = "--model mlp --dropout 0.2 --batch-size 20 --optimizer adamw --schedule constant"


def checkpoint(run: Path) -> list[bytes]:
    """Return the weights and the optimizer's state."""
    return [(last_checkpoint(run) / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


def test_it_ends_with_the_weights_of_shared_sums_and_goes_on_where_it_was(tmp_path: Path) -> None:
    ending = train(tmp_path, f"{WORDS} --max-steps 6 --fused-update --out fused", ranks=2)
    assert ending.status == 0
    assert "fused with the update, through shared memory" in ending.output
    assert train(tmp_path, f"{WORDS} --max-steps 6 --allreduce shared --out plain", ranks=2).status == 0
    assert checkpoint(tmp_path / "fused") == checkpoint(tmp_path / "plain")
    assert train(tmp_path, f"{WORDS} --max-steps 4 --fused-update --out broken", ranks=2).status == 0
    assert train(tmp_path, "--resume broken --max-steps 6", ranks=2).status == 0
    assert checkpoint(tmp_path / "broken") == checkpoint(tmp_path / "fused")
