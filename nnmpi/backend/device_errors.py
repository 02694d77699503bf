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
# Why a device that is there cannot be used, and what would help.
_REFUSALS = {
    46: "another process has it for itself; let ranks share it (nvidia-smi -c DEFAULT, or NVIDIA's MPS), or start one "
    "rank per device",
    802: "the machine is not ready; where devices are joined by NVSwitch, nvidia-fabricmanager must run",
    803: "the driver's library and its kernel module are of different versions; load the driver anew, or reboot",
    804: "the library of a newer CUDA's compatibility package does not go with it; leave that out of LD_LIBRARY_PATH",
}
# Errors after which CUDA answers to nothing in this process: a kernel went wrong, earlier than the call that says so.
_FATAL = {
    700: "illegal address",
    710: "assertion",
    714: "hardware stack",
    715: "illegal instruction",
    716: "misaligned address",
    717: "address space",
    718: "invalid program counter",
    719: "launch failure",
}
_NO_NUMPY = "needs another NumPy: install one with `pip install 'numpy>=2.0,<2.6'`"
EXTRAS = (12, 13)  # nnmpi's, by the CUDA that they are for
_LIBRARIES = ("libcublas", "libcudart", "libnvrtc", "libcusolver", "libcusparse", "libcurand", "libnvJitLink")
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
    if not installed:
        return (
            f"cupy cannot be imported ({_short(error)}); install nnmpi[cuda12] or nnmpi[cuda13], as the driver needs it"
        )
    if len(installed) > 1:
        return (
            f"cupy cannot be imported ({_short(error)}): {' and '.join(installed)} are both installed and overwrite "
            "one another; uninstall both, then install the one for the driver"
        )
    missing = _missing_library(error)
    if missing is not None:
        return f"{missing}; {_install_libraries(installed)}, or the wheel for the CUDA that is there"
    if "numpy" in _whole(error).lower():
        return f"{installed[0]} {_NO_NUMPY} ({_short(error)})"
    return f"cupy cannot be imported ({_short(error)}); install nnmpi[cuda12] or nnmpi[cuda13] anew"


def explain_start(
    error: Exception | None, driver: int, runtime: int, wheels: Callable[[], list[str]] = installed_wheels
) -> str:
    """Return why cupy sees no device, in words.

    Args:
        error: of the question how many devices there are; None if the answer was 0.
        driver, runtime: the CUDA versions of the driver (0 without one) and of cupy, as 13020 for 13.2.
    """
    installed = wheels()
    both = f" (and {' and '.join(installed)} are both installed: keep one)" if len(installed) > 1 else ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    status = getattr(error, "status", _NO_DEVICE if error is None else None)
    if status == _INSUFFICIENT_DRIVER and driver == 0:
        return f"cupy finds no CUDA driver on this machine{both}; install NVIDIA's driver, or use the backend numpy"
    if status == _INSUFFICIENT_DRIVER:
        other = f"nnmpi[cuda{driver // 1000}] in its place, or " if driver // 1000 in EXTRAS else ""
        return (
            f"cupy is built for CUDA {_version(runtime)}, but the driver knows CUDA up to {_version(driver)}{both}; "
            f"install {other}a newer driver, or use the backend numpy"
        )
    if status == _NO_DEVICE and visible is not None:
        return (
            f"cupy finds no CUDA device: CUDA_VISIBLE_DEVICES={visible!r} shows it none of this machine's; unset it, "
            "or name one that nvidia-smi lists, or use the backend numpy"
        )
    if status == _NO_DEVICE:
        return f"cupy finds no CUDA device: the driver sees none (try nvidia-smi){both}; use the backend numpy"
    if status in _REFUSALS:
        return f"cupy cannot use the device: {_REFUSALS[status]}"
    if status == _OUT_OF_MEMORY or isinstance(error, MemoryError):
        return (
            "the device's memory is taken by other processes, which nvidia-smi lists; end them, or use another device"
        )
    missing = None if error is None else _missing_library(error)
    if missing is not None or type(error).__name__ in _COMPILER_ERRORS:
        return f"{missing or _no_kernel(error)}; {_install_libraries(installed)}"
    return f"cupy cannot start CUDA{both} ({_short(error)}); try nvidia-smi, or use the backend numpy"


def explain_error(error: BaseException, facts: Callable[[], Facts]) -> DeviceError | None:
    """Return a library's error in a sentence that says what would help; None if it is no error of the device.

    Args:
        facts: gives what the device's memory looks like; it may fail where the device answers no more.
    """
    name, module = type(error).__name__, type(error).__module__.partition(".")[0]
    status = getattr(error, "status", None)
    if isinstance(error, MemoryError) and module.startswith("cupy"):
        return _out_of_memory(getattr(error, "_size", None), error, facts)
    missing = _missing_library(error) if isinstance(error, ImportError | RuntimeError) else None
    if missing is not None:
        return DeviceError(f"{missing}; install them with cupy's extra [ctk]")
    if module not in ("cupy", "cupy_backends"):
        return None
    if name == "CUDARuntimeError" and status == _OUT_OF_MEMORY or "ALLOC_FAILED" in str(error):
        return _out_of_memory(None, error, facts)
    if name in ("CUDARuntimeError", "CUDADriverError") and status in _FATAL:
        return DeviceError(
            f"a kernel failed on the device ({_FATAL[status]}: {_short(error)}), some time before the call that says "
            "so, and this process can use the device no more; CUDA_LAUNCH_BLOCKING=1 shows the call that is to blame"
        )
    if name in _COMPILER_ERRORS:
        return DeviceError(f"{_no_kernel(error)}; are CUDA's libraries those that cupy's extra [ctk] brings?")
    if name == "CUBLASError":
        return DeviceError(f"cuBLAS failed ({_short(error)})")
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


def _missing_library(error: BaseException) -> str | None:
    """Return half a sentence on the library of CUDA that CuPy does not find, None if it is something else."""
    text = _whole(error)
    found = next((name for name in _LIBRARIES if name in text), None)
    lacking = any(words in text for words in ("cannot open shared object", "Failure finding", "failed to load"))
    return f"cupy does not find CUDA's {found} ({_short(error)})" if found is not None and lacking else None


def _install_libraries(wheels: list[str]) -> str:
    return f"install CUDA's libraries with `pip install '{(*wheels, 'cupy')[0]}[ctk]'`"


def _no_kernel(error: BaseException | None) -> str:
    first = next((line.strip() for line in str(error).splitlines() if "error" in line), _short(error))
    return f"cupy cannot compile a kernel for the device ({first})"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _whole(error: BaseException | None) -> str:
    """Return the error's text and those of its causes."""
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "\n".join(texts)


def _short(error: BaseException | None) -> str:
    """Return the last line with words of the error's text: CuPy puts what happened there, below much advice."""
    lines = [line.strip() for line in str(error).splitlines() if any(c.isalnum() for c in line)]
    return lines[-1] if lines else type(error).__name__
