"""Benchmarks choose their backend themselves: what `--backend` says is for the engine's tests."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of this folder on the host; some of them use the double of a device by its name."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.host_only("a benchmark chooses its backend itself"))
