"""What a process holds in memory, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> int:
    """Return the resident size now; 0 where the system does not say."""
    return _read("VmRSS")


def peak_bytes() -> int:
    """Return the largest resident size since the process began, or since `forget_peak`."""
    return _read("VmHWM")


def forget_peak() -> None:
    """Let the peak be counted anew from here on, where the system can do so."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _read(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)
