"""What the tests of this folder share."""

import pytest


@pytest.fixture
def alone(group):
    """Every rank for itself."""
    local = group.split(group.rank)
    yield local
    local.free()
