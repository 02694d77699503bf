"""The device as an object."""

from __future__ import annotations

from cupy import _streams
from cupy.cuda import runtime


class Device:
    """A device by its number; in a `with` block, the current one."""

    def __init__(self, device: int | None = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)
        self._before: list[int] = []

    def use(self) -> None:
        """Make it the current one."""
        runtime.setDevice(self.id)

    def synchronize(self) -> None:
        """Wait for all its streams."""
        _streams.finish_all()

    def __enter__(self) -> Device:
        self._before.append(runtime.getDevice())
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        runtime.setDevice(self._before.pop())

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


def get_device_id() -> int:
    """Return the current device's number."""
    return runtime.getDevice()


def get_cublas_handle() -> int:
    """Return the current device's handle of cuBLAS."""
    return 0xB1A5
