"""Runs for commands, and what these print."""

import re

import pytest

from nnmpi.train.cli import main as train
from tests.harness.commands import on_ranks


@pytest.fixture
def run(tmp_path, capfd):
    """Return the folder of a short run, and its test accuracy and loss as they were printed."""

    def trained(words, folder=tmp_path):
        on_ranks(train, [*words.split(), "--epochs", "1", "--out", str(folder / "run")], 2)
        (printed,) = re.findall(r"^test ((?:accuracy|RMSE).*?\))", capfd.readouterr().out, re.M)
        return folder / "run", printed

    return trained


@pytest.fixture
def said(capfd):
    """Return what a command prints."""

    def printed(main, words, ranks=1):
        capfd.readouterr()
        on_ranks(main, words, ranks)
        return str(capfd.readouterr().out)

    return printed
