"""What the tests of this folder share."""

import pytest

from nnmpi.train.cli import main
from tests.harness.commands import over


@pytest.fixture
def train(group, tmp_path, monkeypatch):
    """Runs the command on the group, for a small net on iris unless told otherwise; returns the
    run's folder.
    """
    monkeypatch.chdir(tmp_path)
    numbers = iter(range(1000))

    def run(words):
        resumed = words.partition("--resume ")[2]
        if resumed:
            main(words.split(), group)
            return tmp_path / resumed.split()[0]
        if "--model" not in words:
            words = over("--model mlp --dataset iris --batch-size 64", words)
        out = tmp_path / f"run{next(numbers)}"
        main([*words.split(), "--out", str(out)], group)
        return out

    return run
