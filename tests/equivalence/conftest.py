"""What the tests of this folder share."""

from collections.abc import Iterator

import pytest

from nnmpi import Group


@pytest.fixture
def alone(group: Group) -> Iterator[Group]:
    """Every rank for itself."""
    local = group.split(group.rank)
    yield local
    local.free()
