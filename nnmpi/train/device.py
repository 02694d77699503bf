"""The backend of a run: chosen on all ranks alike, shared by the ranks of a device, and its errors in sentences."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.device import select
from nnmpi.backend.device_errors import REMEDY, expects_device
from nnmpi.comm.agreement import agreed
from nnmpi.comm.buffers import cuda_aware
from nnmpi.comm.group import Group
from nnmpi.errors import DeviceError, NnmpiError, UsageError, counted
from nnmpi.units import format_bytes

# The options that do what REMEDY says.
REMEDY_OPTIONS = (
    "lower --batch-size, raise --microbatches, use --activation-memory least or --precision bf16, or "
    "spread the model over more ranks with --tp or --pp"
)


def take_backend(name: str, group: Group, local_rank: int, limit_bytes: int | None = None) -> Backend:
    """Return the backend of this name, with a fair part of its device's memory. Collective.

    Where "auto" finds a device on some nodes alone, all ranks take NumPy.

    Args:
        name: auto, numpy or cupy.
        group: all ranks of the run.
        local_rank: this rank's number on its node.
        limit_bytes: what a rank's arrays may take of a device's memory, if less than that.

    Raises:
        DeviceError: on all ranks, when one cannot use the device that it should.
    """
    with agreed(group):
        backend = select(name, local_rank)
    names = group.gather(backend.name)
    if len(set(names)) > 1:
        without = [rank for rank, each in enumerate(names) if each == "numpy"]
        reason = f"auto chose numpy on all ranks: rank {without[0]} ({len(without)} of {group.size}) has no device"
        backend = replace(numpy_backend(), reason=reason)
    ranks = group.gather([platform.node(), backend.card]).count([platform.node(), backend.card])
    with agreed(group):
        backend.share(ranks)
        if limit_bytes is not None:
            backend.limit_memory(limit_bytes)
    return backend


def check_compiled(jit: bool, backend: Backend) -> None:
    """Refuse kernels that are compiled for the CPU where there is a device.

    Raises:
        UsageError: saying so.
    """
    if jit and backend.is_device:
        raise UsageError(
            f"--jit compiles for the CPU, and this run is on {backend.device}, which has kernels of its own; leave it "
            "out, or give --backend numpy"
        )


def check_precision(precision: str, backend: Backend) -> None:
    """Refuse what only a device computes fast; raises UsageError."""
    if precision != "float32" and not backend.is_device:
        raise UsageError(
            f"--precision {precision} needs a CUDA device, and this run is on the CPU ({backend.reason}); leave it out"
        )


def describe_device(backend: Backend, group: Group, verbose: bool = False) -> list[str]:
    """Return lines on how ranks share devices and memory, and why this backend. Collective.

    That no rank has a device is said where one could be meant to be used.

    Args:
        backend: where this rank computes.
        group: all ranks of the run.
        verbose: say why this backend anyway.
    """
    found = group.gather([platform.node(), backend.card, verbose or bool(backend.reason) and expects_device()])
    places = [each[:2] for each in found]
    lines = [f"chosen: {backend.reason}"] if backend.reason and any(each[2] for each in found) else []
    if not backend.is_device:
        return lines
    cards = {tuple(place) for place in places}
    most = max(places.count(list(card)) for card in cards)
    use = backend.memory()
    limit = "no limit of memory"
    if use.limit_bytes is not None:
        limit = f"{format_bytes(use.limit_bytes)} of memory for each rank"
    shared = f", up to {most} ranks on one" if most > 1 else ""
    way = "given to MPI" if cuda_aware() else "staged through the host's memory"
    return [
        f"devices: {len(cards)} for {counted(group.size, 'rank')}{shared}; {limit} ({use.note})",
        *([f"device arrays: {way}"] if group.size > 1 else []),
        *lines,
    ]


def device_use(backend: Backend) -> dict[str, float]:
    """Return what a record of training says about a device's memory, as this rank sees it; nothing on the host."""
    return {"device_peak_bytes": backend.memory().peak_bytes} if backend.is_device else {}


@contextmanager
def explained(
    backend: Backend, words: str = "out of memory ({}); give a smaller --batch-size, or --microbatches 2 or more"
) -> Iterator[None]:
    """Turn an error of the device, or of memory, into a sentence.

    Args:
        backend: knows its library's errors.
        words: the sentence where the host's memory was too little.

    Raises:
        DeviceError: in the error's place.
    """
    try:
        yield
    except NnmpiError:
        raise
    except Exception as error:
        explanation = backend.explain(error)
        if explanation is None and isinstance(error, MemoryError):
            explanation = DeviceError(words.format(error))
        if explanation is None:
            raise
        raise DeviceError(str(explanation).replace(REMEDY, REMEDY_OPTIONS)) from error
