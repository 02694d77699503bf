"""The double of CuPy as this process's `cupy`, and that of NVIDIA's bindings as its `nvmath`, so
that device code runs where there is no device.
"""

import importlib
import sys
from pathlib import Path

from nnmpi.backend.device import cupy_backend

FOLDER = Path(__file__).parent / "fake"
PACKAGES = ("cupy", "cupyx", "cupy_backends", "nvmath", "cudnn")


def load():
    """Return the double, as the module `cupy` from now on; a real CuPy that is loaded makes way."""
    result = sys.modules.get("cupy")
    if result is None or not _is_double(result):
        for name in [module for module in sys.modules if module.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
        sys.path.insert(1, str(FOLDER))  # the first is for programs, some of which replace it
        for name in ("cupyx", "nvmath.bindings.cublas", "cudnn", "cupy"):
            # all of them now: a test may put the path back later
            result = importlib.import_module(name)
        result.cuda.runtime.settings().hidden = True  # other tests of this process have no device
    return result


def _is_double(module):
    return Path(module.__file__ or "").is_relative_to(FOLDER)


def device_backend(local_rank=0):
    """Return nnmpi's own backend for CuPy, on the double."""
    settings = load().cuda.runtime.settings()
    hidden, settings.hidden = settings.hidden, False
    try:
        return cupy_backend(local_rank)
    finally:
        settings.hidden = hidden
