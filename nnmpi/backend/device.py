"""The CuPy backend, and the choice of a backend by name.

Only this file imports cupy, and only on request. It also translates CUDA's and CuPy's errors into
sentences with a remedy.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.cuda.graph import free_unused
from nnmpi.backend.memory import MemoryUse, Meter, T
from nnmpi.base.errors import DeviceError, UsageError
from nnmpi.base.units import format_bytes

# The fraction of the free memory for the pools of the ranks on a device. The rest is for memory
# outside the pools: CUDA's contexts (some hundred MB each) and workspaces of libraries.
SHARED_FRACTION = 0.9
UUID_BYTES = 16  # CuPy reads the UUID as a C string, which may continue to the next zero byte


def device_problem() -> str | None:
    """Return the reason why no device is usable, with a remedy; None if one is."""
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:
        # not ImportError alone: a NumPy of another version causes AttributeError and others
        return explain_import(error)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return explain_start(error, *_versions(cupy))
    if not count:
        return explain_start(None, *_versions(cupy))
    try:
        importlib.import_module("nvmath.bindings.cublas")  # for `backend.cublas`
    except Exception as error:
        return (
            f"matrix products need NVIDIA's bindings of cuBLAS, which cannot be imported"
            f" ({_short(error)}); pip install nvmath-python"
        )
    return None


def cupy_backend(local_rank: int) -> Backend:
    """Return the CuPy backend on the device of this rank: local_rank modulo the number of devices.

    Raises:
        DeviceError: when cupy cannot be imported, sees no device, or cannot use it; the message
            names a remedy.
    """
    problem = device_problem()
    if problem is not None:
        raise DeviceError(f"backend cupy cannot be used: {problem}")
    cupy = importlib.import_module("cupy")
    number = local_rank % cupy.cuda.runtime.getDeviceCount()
    try:
        cupy.cuda.Device(number).use()
        model = cupy.cuda.runtime.getDeviceProperties(number)["name"].decode()
        # Creates the context, so that `divide_memory` divides the memory that is left. Compiles a
        # kernel (CuPy caches it on disk), so that missing libraries raise here, not in the middle
        # of a run.
        cupy.ones(1, "float32").get()
    except Exception as error:
        problem = explain_start(error, *_versions(cupy))
        raise DeviceError(f"backend cupy cannot use device {number}: {problem}") from error

    return DeviceBackend("cupy", cupy, f"{model}, device {number}", number=number)


def _versions(cupy: ModuleType) -> tuple[int, int]:
    """Return the CUDA versions of the driver (0 without one) and of cupy, as 13020 for 13.2."""
    try:
        return cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
    except Exception:
        return 0, 0


@dataclass
class _Pool:
    """Notes on the memory pool.

    Attributes:
        peak_bytes: the largest size seen by `memory` or before a release.
        note: the origin of its limit, as text.
    """

    peak_bytes: int = 0
    note: str = ""


class _PoolMeter:
    """Counts what the pool gives to this thread, and gets back; beside CuPy's `MemoryHook`."""

    name = "nnmpi"
    now = most = 0

    def malloc_postprocess(self, **block: Any) -> None:
        """Count new memory."""
        self.now += block["mem_size"]
        self.most = max(self.most, self.now)

    def free_postprocess(self, **block: Any) -> None:
        """Count freed memory."""
        self.now -= block["mem_size"]

    def measure(self, call: Callable[[], T]) -> tuple[T, int, int]:
        """See `Meter`."""
        self.now = self.most = 0
        result = call()
        return result, self.most, self.now


@dataclass(frozen=True)
class DeviceBackend(Backend):
    """CuPy on a device.

    Memory comes from CuPy's pool, which returns none to the device by itself: its size is the peak.
    Tracking every array instead would cost about 1 us each, a tenth of a kernel's launch.

    Attributes:
        number: of the device, among those visible to this process.
        pool: notes on the pool.
    """

    number: int = 0
    pool: _Pool = field(default_factory=_Pool, repr=False, compare=False)

    @property
    def card(self) -> str:
        """The bus address and UUID, since ranks may number the same devices differently.

        The UUID distinguishes the parts of a card (NVIDIA's MIG), which have one address and
        separate memory.
        """
        runtime = self.xp.cuda.runtime
        identity = runtime.getDeviceProperties(self.number).get("uuid", b"")
        return f"{runtime.deviceGetPCIBusId(self.number)} {bytes(identity[:UUID_BYTES]).hex()}"

    def to_host(self, array: Array) -> Array:
        """Return an array as a NumPy array in host memory; itself if it is one."""
        return array if isinstance(array, np.ndarray) else self.xp.asnumpy(array)

    def synchronize(self) -> None:
        """Wait until the device has finished the current stream's work."""
        self.xp.cuda.get_current_stream().synchronize()

    def memory(self) -> MemoryUse:
        """Return the device memory in use by this process's arrays, and its limit."""
        free_unused()
        pool = self.xp.get_default_memory_pool()
        taken, limit = pool.total_bytes(), pool.get_limit()
        self.pool.peak_bytes = max(self.pool.peak_bytes, taken)
        note = self.pool.note or ("CUPY_GPU_MEMORY_LIMIT or set_limit" if limit else "none was set")
        return MemoryUse(pool.used_bytes(), self.pool.peak_bytes, limit or None, taken, note)

    def meter(self) -> Meter:
        """Return a meter of the memory that this thread's arrays take from the pool."""
        return cast(Meter, type("Hook", (_PoolMeter, self.xp.cuda.MemoryHook), {})())

    def room_bytes(self) -> int:
        """Return the bytes that new arrays may take: free on the device, or up to the limit."""
        pool, (free, _) = self.xp.get_default_memory_pool(), self.xp.cuda.runtime.memGetInfo()
        limit = pool.get_limit() or free + pool.total_bytes()
        return int(min(free + pool.total_bytes(), limit) - pool.used_bytes())

    def release_memory(self) -> None:
        """Return unused memory to the device and the host."""
        self.memory()  # records the peak
        self.xp.get_default_memory_pool().free_all_blocks()
        self.xp.get_default_pinned_memory_pool().free_all_blocks()

    def use(self) -> None:
        """Make this the calling thread's device."""
        self.xp.cuda.Device(self.number).use()

    def divide_memory(self, ranks: int) -> None:
        """Limit the memory pool to a fair share among this device's ranks, unless a limit is set.

        Call it once all of these ranks use the device, before any has large arrays.
        """
        pool = self.xp.get_default_memory_pool()
        if ranks < 2 or pool.get_limit():
            return
        free, total = self.xp.cuda.runtime.memGetInfo()
        pool.set_limit(size=int(SHARED_FRACTION * (free + pool.total_bytes()) / ranks))
        self.pool.note = (
            f"{SHARED_FRACTION:.0%} of the {format_bytes(free)} that were free of"
            f" {format_bytes(total)}, shared by {ranks} ranks on the device; CUPY_GPU_MEMORY_LIMIT"
            " sets another limit"
        )

    def limit_memory(self, limit_bytes: int) -> None:
        """Limit the pool to this many bytes, unless its limit is lower already."""
        pool = self.xp.get_default_memory_pool()
        if not pool.get_limit() or limit_bytes < pool.get_limit():
            pool.set_limit(size=limit_bytes)
            self.pool.note = "memory_limit"

    def explain(self, error: BaseException) -> DeviceError | None:
        """Return a sentence with a remedy for a device library's error; None for other errors."""
        return explain_error(error, self)


NAMES = ("auto", "numpy", "cupy")


def select(name: str = "auto", local_rank: int = 0) -> Backend:
    """Return the backend of this name; `auto` is CuPy if a device is usable, with the reason.

    Ranks that share a device should then call `divide_memory`; they detect it by `Backend.card`.

    Args:
        local_rank: the number of this rank on its node; ranks use the node's devices in turn.

    Raises:
        UsageError: for an unknown name.
        DeviceError: when "cupy" is requested and does not work; the message names the missing part.
    """
    if name not in NAMES:
        raise UsageError(f"backend {name!r} is unknown; choose one of {', '.join(NAMES)}")
    if name == "numpy":
        return numpy_backend()
    if name == "cupy":
        return cupy_backend(local_rank)
    try:
        backend = cupy_backend(local_rank)
    except DeviceError as error:
        # without the remedy, since nobody requested cupy
        why = str(error).removeprefix("backend cupy cannot be used: ").partition(";")[0]
        return replace(numpy_backend(), reason=f"auto chose numpy: {why}")
    return replace(backend, reason=f"auto chose cupy: {backend.device} can be used")


_INSUFFICIENT_DRIVER, _NO_DEVICE, _OUT_OF_MEMORY = 35, 100, 2
# Errors of a kernel, reported by a later call; CUDA then refuses all further calls in the process.
_FATAL = range(700, 720)
_COMPILER_ERRORS = ("CompileException", "NVRTCError", "JitifyException")
REMEDY = (
    "make the batch smaller, compute it in more parts, recompute activations, use precision bf16,"
    " or spread the model over more ranks"
)


def installed_wheels(paths: Sequence[str] = sys.path) -> list[str]:
    """Return the installed packages that provide cupy; two of them conflict.

    Not by importlib.metadata, which takes a tenth of nnmpi's start-up time.
    """
    result = {folder.name for path in paths for folder in Path(path or ".").glob("cupy*.dist-info")}
    names = {name.partition("-")[0].lower().replace("_", "-") for name in result}
    return sorted(
        name for name in names if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm"))
    )


def expects_device() -> bool:
    """True if a device may be expected: cupy is installed, or NVIDIA's driver shows a card."""
    # /dev/dxg is WSL's
    return bool(installed_wheels()) or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def explain_import(error: Exception, wheels: Callable[[], list[str]] = installed_wheels) -> str:
    """Return why cupy cannot be imported, as text."""
    installed = wheels()
    if len(installed) > 1:
        both = " and ".join(installed)
        return (
            f"cupy cannot be imported ({_short(error)}): {both} are both installed; uninstall both,"
            " then install one"
        )
    if _misses_library(error):
        return (
            f"{_short(error)}; install CUDA's libraries with `pip install"
            f" '{(*installed, 'cupy')[0]}[ctk]'`"
        )
    which = "'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'"
    return f"cupy cannot be imported ({_short(error)}); pip install {which}, as the driver needs it"


def explain_start(error: Exception | None, driver: int, runtime: int) -> str:
    """Return why cupy sees no device, as text.

    Args:
        error: from counting the devices; None if the count was 0.
        driver, runtime: the CUDA versions of the driver (0 without one) and of cupy, as 13020 for
            13.2.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    status = getattr(error, "status", _NO_DEVICE if error is None else None)
    if status == _INSUFFICIENT_DRIVER and driver == 0:
        return (
            "cupy finds no CUDA driver on this machine; install NVIDIA's driver, or use the backend"
            " numpy"
        )
    if status == _INSUFFICIENT_DRIVER:
        return (
            f"cupy is built for CUDA {_version(runtime)}, but the driver knows CUDA up to"
            f" {_version(driver)}; install nnmpi's extra for that, or a newer driver, or use the"
            " backend numpy"
        )
    if status == _NO_DEVICE:
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        return (
            f"cupy finds no CUDA device{hidden}: nvidia-smi lists those that are there; use the"
            " backend numpy"
        )
    if status == _OUT_OF_MEMORY or isinstance(error, MemoryError):
        return (
            "the device's memory is taken by other processes, which nvidia-smi lists; use another"
            " device"
        )
    if error is not None and (_misses_library(error) or type(error).__name__ in _COMPILER_ERRORS):
        return (
            f"cupy cannot compile a kernel for the device ({_short(error)}); install CUDA's"
            " libraries: cupy's [ctk]"
        )
    return f"cupy cannot start CUDA ({_short(error)}); try nvidia-smi, or use the backend numpy"


def explain_error(error: BaseException, backend: DeviceBackend) -> DeviceError | None:
    """Return a sentence with a remedy for a device library's error; None for other errors.

    Args:
        backend: the device; after a fatal error even reading its memory use may fail.
    """
    name, module = type(error).__name__, type(error).__module__.partition(".")[0]
    status = getattr(error, "status", None)
    if isinstance(error, MemoryError) and module.startswith("cupy"):
        return _out_of_memory(getattr(error, "_size", None), error, backend)
    if isinstance(error, ImportError | RuntimeError) and _misses_library(error):
        return DeviceError(f"{_short(error)}; install CUDA's libraries with cupy's extra [ctk]")
    if module not in ("cupy", "cupy_backends", "nvmath"):
        return None
    if name == "CUDARuntimeError" and status == _OUT_OF_MEMORY or "ALLOC_FAILED" in str(error):
        return _out_of_memory(None, error, backend)
    if name in ("CUDARuntimeError", "CUDADriverError") and status in _FATAL:
        return DeviceError(
            f"a kernel failed on the device ({_short(error)}), before the call that reports it,"
            " and this process cannot use the device any more; CUDA_LAUNCH_BLOCKING=1 shows the"
            " call at fault"
        )
    return DeviceError(f"{name} on the device: {_short(error)}")


def _out_of_memory(asked: int | None, error: BaseException, backend: DeviceBackend) -> DeviceError:
    expected = "some memory" if asked is None else format_bytes(asked)
    try:
        use, (free, total) = backend.memory(), backend.xp.cuda.runtime.memGetInfo()
    except Exception:  # after a fatal error every call fails
        return DeviceError(
            f"the device has no room for {expected} more ({_short(error)}); {REMEDY}"
        )
    others = max(total - free - use.pool_bytes, 0)
    limit = (
        ""
        if use.limit_bytes is None
        else f" of its limit of {format_bytes(use.limit_bytes)} ({use.note})"
    )
    return DeviceError(
        f"{backend.device} has no room for {expected} more: arrays of this process use"
        f" {format_bytes(use.used_bytes)}, its pool holds {format_bytes(use.pool_bytes)}{limit},"
        f" other processes and CUDA itself use {format_bytes(others)} and {format_bytes(free)} of"
        f" {format_bytes(total)} are free; {REMEDY}"
    )


def _misses_library(error: BaseException) -> bool:
    texts = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        texts.append(str(error))
    lacking = ("cannot open shared object", "Failure finding", "failed to load")
    ours = ("libcu", "libnv")
    return any(
        any(map(text.__contains__, lacking)) and any(map(text.__contains__, ours)) for text in texts
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _short(error: BaseException | None) -> str:
    """Return the last line with words of an error: CuPy puts the cause there, after advice."""
    lines = [line.strip() for line in str(error).splitlines() if any(c.isalnum() for c in line)]
    return lines[-1] if lines else type(error).__name__
