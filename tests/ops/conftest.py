"""What the tests of compiled kernels share."""

from importlib import import_module

import pytest


@pytest.fixture
def compiled_calls(monkeypatch):
    """The names of the compiled functions that operations call, in order."""
    module = import_module("nnmpi.backend.jit.kernels")
    names, perform = [], module.perform
    monkeypatch.setattr(
        module, "perform", lambda f, *args: (names.append(f.__name__), perform(f, *args))
    )
    return names
