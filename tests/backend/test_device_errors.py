"""What errors of CUDA and CuPy are turned into, each made as the libraries make it: what is wrong,
what helps.
"""

from types import SimpleNamespace

import pytest

from nnmpi.backend.device import (
    REMEDY,
    DeviceBackend,
    explain_error,
    explain_import,
    explain_start,
    installed_wheels,
)
from nnmpi.backend.memory import MemoryUse
from tests.device.library import load

GIB = 2**30
RUNTIME = SimpleNamespace(memGetInfo=lambda: (9 * GIB, 140 * GIB))
LOST = "libnvrtc.so.13: cannot open shared object file"


class Card(DeviceBackend):
    """A device of which much is in use."""

    def memory(self):
        return MemoryUse(100 * GIB, 120 * GIB, None, 120 * GIB, "its own")


CARD = Card(
    "cupy",
    SimpleNamespace(cuda=SimpleNamespace(runtime=RUNTIME)),
    "NVIDIA H200, device 0",
    *(None, None),
)


def named(name, module, text="", **attributes):
    """Return an error as a library has it."""
    return type(name, (RuntimeError,), {"__module__": module, **attributes})(text)


def cuda(status):
    """Return an error of CUDA's by number."""
    return named(
        "CUDARuntimeError", "cupy_backends.cuda.api.runtime", f"cudaError{status}", status=status
    )


@pytest.mark.parametrize(
    "installed, error, words",
    [
        ([], ModuleNotFoundError("No module named 'cupy'"), "pip install 'cupy-cuda12x[ctk]' or"),
        (["cupy-cuda12x", "cupy-cuda13x"], ImportError("failed"), "both installed"),
        (["cupy-cuda13x"], ImportError(LOST), "pip install 'cupy-cuda13x[ctk]'"),
        (["cupy-cuda13x"], ImportError(""), "(ImportError)"),
    ],
)
def test_why_cupy_cannot_be_imported(installed, error, words):
    assert words in explain_import(error, lambda: installed)


@pytest.mark.parametrize(
    "error, driver, words",
    [
        (cuda(35), 0, "no CUDA driver"),
        (cuda(35), 12040, "CUDA up to 12.4"),
        (cuda(2), 13000, "memory is taken by other processes"),
        (cuda(100), 13000, "CUDA_VISIBLE_DEVICES='none'"),
        (None, 13000, "finds no CUDA device"),
        (cuda(999), 13000, "cudaError999"),
        (
            named("CompileException", "cupy.cuda.compiler", "cannot open cuda_fp16.h"),
            13000,
            "cuda_fp16.h",
        ),
    ],
)
def test_why_there_is_no_device(error, driver, words, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "none")
    assert words in explain_start(error, driver, 13020)


@pytest.mark.parametrize(
    "error, words",
    [
        (cuda(700), "CUDA_LAUNCH_BLOCKING=1"),
        (cuda(2), "has no room for some memory more"),
        (named("cuBLASError", "nvmath.bindings.cublas", "EXECUTION_FAILED"), "EXECUTION_FAILED"),
        (named("DynamicLibNotFoundError", "cuda.pathfinder", LOST), "[ctk]"),
        (ValueError("of others"), None),
    ],
)
def test_what_errors_mean(error, words):
    result = explain_error(error, CARD)
    assert result is None if words is None else words in str(result)


def test_out_of_memory():
    """What was asked for, who has what, and what to lower."""
    error = load().cuda.memory.OutOfMemoryError(20 * GIB, 100 * GIB, 0)
    words = str(explain_error(error, CARD))
    assert (
        "has no room for 20" in words and "this process use 100" in words and words.endswith(REMEDY)
    )


def test_which_wheels_are_installed(tmp_path):
    """Of those that bring cupy, wherever Python looks for packages; the libraries beside it do not
    count.
    """
    for name in ("cupy_cuda13x-14.2.0", "cupy_cuda12x-13.6.0", "cupy_xarray-0.1", "numpy-2.4.6"):
        (tmp_path / f"{name}.dist-info").mkdir()
    assert installed_wheels([str(tmp_path), str(tmp_path / "missing")]) == [
        "cupy-cuda12x",
        "cupy-cuda13x",
    ]
