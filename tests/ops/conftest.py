"""What the tests of compiled kernels share."""

from importlib import import_module

import pytest


@pytest.fixture
def compiled_calls(monkeypatch):
    """The names of the compiled functions that operations call, in order."""
    names = []
    for name in ("nnmpi.backend.jit.kernels", "nnmpi.ops.conv.depthwise"):
        module = import_module(name)
        monkeypatch.setattr(module, "perform", _noting(names, module.perform))
    return names


def _noting(names, perform):
    return lambda f, *args: (names.append(f.__name__), perform(f, *args))
