"""What the tests of compiled kernels share."""

from importlib import import_module

import pytest


@pytest.fixture
def compiled_calls(monkeypatch):
    """The names of the compiled functions that operations call, in order."""
    names = []
    for name in ("nnmpi.backend.jit.kernels", "nnmpi.ops.conv.algorithm"):
        module = import_module(name)
        monkeypatch.setattr(module, "record_call", _noting(names, module.record_call))
    return names


def _noting(names, record_call):
    return lambda f, *args: (names.append(f.__name__), record_call(f, *args))
