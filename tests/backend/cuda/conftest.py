"""How kernels run on the emulator."""

import pytest

from tests.device.fake.emulator import guarded


@pytest.fixture
def strict():
    """Every kernel runs twice, between guard pages."""
    with guarded():
        yield
