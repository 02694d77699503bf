"""The CUDA runtime, as far as a program without kernels of its own needs it.

NNMPI_FAKE_DEVICES    how many devices there are (default 1)
NNMPI_FAKE_MEMORY     bytes of each (default 16 GiB)
"""

import os
from dataclasses import dataclass

from cupy_backends.cuda.api.runtime import CUDARuntimeError

streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = range(3)
memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice, memoryTypeManaged = range(4)


@dataclass
class Settings:
    """What the device is; tests may change it.

    Attributes:
        devices: how many.
        memory_bytes: of each.
        current: the number of the current one.
        hidden: whether `auto` is not to find them: for tests that ask for the device by themselves.
    """

    devices: int
    memory_bytes: int
    current: int = 0
    hidden: bool = False


_SETTINGS = Settings(
    int(os.environ.get("NNMPI_FAKE_DEVICES", "1")),
    int(os.environ.get("NNMPI_FAKE_MEMORY", str(16 << 30))),
)


def settings():
    """Return the settings of this process."""
    return _SETTINGS


def getDeviceCount():
    """Return the number of devices."""
    if _SETTINGS.devices < 1 or _SETTINGS.hidden:
        raise CUDARuntimeError(100)
    return _SETTINGS.devices


def getDevice():
    """Return the current device."""
    return _SETTINGS.current


def setDevice(device):
    """Make a device the current one."""
    if not 0 <= device < _SETTINGS.devices:
        raise CUDARuntimeError(101 if _SETTINGS.devices else 100)
    _SETTINGS.current = device


def getDeviceProperties(device):
    """Return some of the properties: an H200's, but for the name and the memory."""
    if not 0 <= device < _SETTINGS.devices:
        raise CUDARuntimeError(101 if _SETTINGS.devices else 100)
    return {
        "name": b"Fake device",
        "totalGlobalMem": _SETTINGS.memory_bytes,
        "sharedMemPerBlock": 49152,
        "sharedMemPerBlockOptin": 232448,
        "sharedMemPerMultiprocessor": 233472,
        "regsPerBlock": 65536,
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
        "maxThreadsDim": (1024, 1024, 64),
        "maxGridSize": (2147483647, 65535, 65535),
        "maxThreadsPerMultiProcessor": 2048,
        "multiProcessorCount": 132,
        "major": 9,
        "minor": 0,
        "clockRate": 1980000,
        "memoryClockRate": 3201000,
        "memoryBusWidth": 6144,
        "l2CacheSize": 62914560,
        "pciBusID": device,
        "pciDeviceID": 0,
        "pciDomainID": 0,
        "uuid": bytes(15) + bytes([device]),
    }


def memGetInfo():
    """Return free and total bytes of the current device."""
    from cupy.cuda import memory

    total = _SETTINGS.memory_bytes
    return total - memory.POOL.total_bytes(), total


def driverGetVersion():
    """Return the newest version of CUDA that the driver knows."""
    return 13000


def runtimeGetVersion():
    """Return the version of the CUDA runtime."""
    return 13000


def deviceGetPCIBusId(device):
    """Return the device's place on the bus."""
    getDeviceProperties(device)
    return f"0000:{device:02X}:00.0"
