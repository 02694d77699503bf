"""What the tests of this folder share."""

import pytest


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event files, which take longer than a small run; a test that is about them undoes it."""
    monkeypatch.setattr("nnmpi.train.metrics.can_write", lambda: False)
