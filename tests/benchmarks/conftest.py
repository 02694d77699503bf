"""Benchmarks choose their backend themselves: what `--backend` says is for the engine's tests."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of this folder on the host; some of them use the double of a device by its name."""
    folder = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.host_only("a benchmark chooses its backend itself"))
