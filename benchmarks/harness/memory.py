"""The peak of a process's memory, as Linux counts it.

Nothing here imports nnmpi: processes that train with PyTorch alone use it, too.
"""

from pathlib import Path


def peak_bytes() -> int:
    """Return the largest resident size since the process began, or since `reset_peak`; 0 where the
    system does not say.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def reset_peak() -> None:
    """Count the peak anew from here on, where the system can do so."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
