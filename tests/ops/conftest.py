"""What the tests of compiled kernels share."""

from importlib import import_module

import pytest


@pytest.fixture
def compiled_calls(monkeypatch):
    """The names of the compiled functions that operations call, in order."""
    names = []
    for name in ("nnmpi.backend.jit.kernels", "nnmpi.ops.conv.algorithm"):
        module = import_module(name)
        monkeypatch.setattr(module, "call", _noting(names, module.call))
    rows = import_module("nnmpi.backend.jit.rows").RowLoop
    call = rows.__call__

    def noting(self, *args):
        names.append(self.kernel.__name__.rpartition("_")[0])  # after it a hash of its text
        return call(self, *args)

    monkeypatch.setattr(rows, "__call__", noting)
    return names


def _noting(names, launch):
    return lambda f, *args: (names.append(f.__name__), launch(f, *args))
