"""What CUDA's and CuPy's errors mean for the person who runs the program, and what would help."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nnmpi.backend.memory import MemoryUse
from nnmpi.errors import DeviceError
from nnmpi.units import format_bytes as words

_INSUFFICIENT_DRIVER, _NO_DEVICE, _OUT_OF_MEMORY = 35, 100, 2
# Errors after which CUDA answers to nothing in this process: a kernel went wrong, earlier than the call that says so.
_FATAL = range(700, 720)
_COMPILER_ERRORS = ("CompileException", "NVRTCError", "JitifyException")
REMEDY = (
    "make the batch smaller, compute it in more parts, recompute activations, use precision bf16, or spread the model "
    "over more ranks"
)


@dataclass(frozen=True)
class Facts:
    """What a device's memory looks like.

    Attributes:
        device: in words.
        use: what this process uses.
        free_bytes, total_bytes: of the device's memory, whoever uses it.
    """

    device: str
    use: MemoryUse
    free_bytes: int
    total_bytes: int


def installed_wheels(paths: Sequence[str] = sys.path) -> list[str]:
    """Return the names of the installed packages that bring cupy; more than one get in one another's way.

    (Python's own importlib.metadata would tell too, but takes a tenth of the time that nnmpi takes to start.)
    """
    found = {folder.name for path in paths for folder in Path(path or ".").glob("cupy*.dist-info")}
    names = {name.partition("-")[0].lower().replace("_", "-") for name in found}
    return sorted(name for name in names if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm")))


def expects_device() -> bool:
    """Return whether a device could be meant to be used here: cupy is installed, or NVIDIA's driver shows a card."""
    return bool(installed_wheels()) or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()  # the latter: WSL


def explain_import(error: Exception, wheels: Callable[[], list[str]] = installed_wheels) -> str:
    """Return why cupy cannot be imported, in words."""
    installed = wheels()
    if len(installed) > 1:
        both = " and ".join(installed)
        return f"cupy cannot be imported ({_short(error)}): {both} are both installed; uninstall both, then install one"
    if _misses_library(error):
        return f"{_short(error)}; install CUDA's libraries with `pip install '{(*installed, 'cupy')[0]}[ctk]'`"
    return f"cupy cannot be imported ({_short(error)}); install nnmpi[cuda12] or nnmpi[cuda13], as the driver needs it"


def explain_start(error: Exception | None, driver: int, runtime: int) -> str:
    """Return why cupy sees no device, in words.

    Args:
        error: of the question how many devices there are; None if the answer was 0.
        driver, runtime: the CUDA versions of the driver (0 without one) and of cupy, as 13020 for 13.2.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    status = getattr(error, "status", _NO_DEVICE if error is None else None)
    if status == _INSUFFICIENT_DRIVER and driver == 0:
        return "cupy finds no CUDA driver on this machine; install NVIDIA's driver, or use the backend numpy"
    if status == _INSUFFICIENT_DRIVER:
        return (
            f"cupy is built for CUDA {_version(runtime)}, but the driver knows CUDA up to {_version(driver)}; install "
            "nnmpi's extra for that, or a newer driver, or use the backend numpy"
        )
    if status == _NO_DEVICE:
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        return f"cupy finds no CUDA device{hidden}: nvidia-smi lists those that are there; use the backend numpy"
    if status == _OUT_OF_MEMORY or isinstance(error, MemoryError):
        return "the device's memory is taken by other processes, which nvidia-smi lists; use another device"
    if error is not None and (_misses_library(error) or type(error).__name__ in _COMPILER_ERRORS):
        return f"cupy cannot compile a kernel for the device ({_short(error)}); install CUDA's libraries: cupy's [ctk]"
    return f"cupy cannot start CUDA ({_short(error)}); try nvidia-smi, or use the backend numpy"


def explain_error(error: BaseException, facts: Callable[[], Facts]) -> DeviceError | None:
    """Return a library's error in a sentence that says what would help; None if it is no error of the device.

    Args:
        facts: gives what the device's memory looks like; it may fail where the device answers no more.
    """
    name, module = type(error).__name__, type(error).__module__.partition(".")[0]
    status = getattr(error, "status", None)
    if isinstance(error, MemoryError) and module.startswith("cupy"):
        return _out_of_memory(getattr(error, "_size", None), error, facts)
    if isinstance(error, ImportError | RuntimeError) and _misses_library(error):
        return DeviceError(f"{_short(error)}; install CUDA's libraries with cupy's extra [ctk]")
    if module not in ("cupy", "cupy_backends"):
        return None
    if name == "CUDARuntimeError" and status == _OUT_OF_MEMORY or "ALLOC_FAILED" in str(error):
        return _out_of_memory(None, error, facts)
    if name in ("CUDARuntimeError", "CUDADriverError") and status in _FATAL:
        return DeviceError(
            f"a kernel failed on the device ({_short(error)}), some time before the call that says so, and this "
            "process can use the device no more; CUDA_LAUNCH_BLOCKING=1 shows the call that is to blame"
        )
    return DeviceError(f"{name} on the device: {_short(error)}")


def _out_of_memory(asked: int | None, error: BaseException, facts: Callable[[], Facts]) -> DeviceError:
    wanted = "some memory" if asked is None else words(asked)
    try:
        now = facts()
    except Exception:  # CUDA may answer to nothing any more
        return DeviceError(f"the device has no room for {wanted} more ({_short(error)}); {REMEDY}")
    use = now.use
    others = max(now.total_bytes - now.free_bytes - use.pool_bytes, 0)
    limit = "" if use.limit_bytes is None else f" of the {words(use.limit_bytes)} that it may ({use.note})"
    return DeviceError(
        f"{now.device} has no room for {wanted} more: arrays of this process use {words(use.used_bytes)}, its pool "
        f"holds {words(use.pool_bytes)}{limit}, other processes and CUDA itself use {words(others)} and "
        f"{words(now.free_bytes)} of {words(now.total_bytes)} are free; {REMEDY}"
    )


def _misses_library(error: BaseException) -> bool:
    """Return whether CuPy does not find one of CUDA's libraries."""
    texts = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        texts.append(str(error))
    lacking, ours = ("cannot open shared object", "Failure finding", "failed to load"), ("libcu", "libnv")
    return any(any(map(text.__contains__, lacking)) and any(map(text.__contains__, ours)) for text in texts)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _short(error: BaseException | None) -> str:
    """Return the last line with words of the error's text: CuPy puts what happened there, below much advice."""
    lines = [line.strip() for line in str(error).splitlines() if any(c.isalnum() for c in line)]
    return lines[-1] if lines else type(error).__name__
