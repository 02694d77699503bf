"""What the card can do at best, measured in the same run: a large product in each mode, and copies.

Products are measured through nnmpi and, where it is there, through PyTorch; the faster one is the ceiling. Numbers are
random: a card computes zeros faster than numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.cases import BF16, MODES, TF32
from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.gemm import gemm
from nnmpi.backend.precision import bfloat16, use_precision

REPEATS, WARM_UP = 10, 3


@dataclass(frozen=True)
class Sizes:
    """What is measured with.

    Attributes:
        side: of square matrices.
        device_bytes, host_bytes: of what is copied within the device, and between it and the host.
    """

    side: int = 8192
    device_bytes: int = 2**31
    host_bytes: int = 2**28


SMALL = Sizes(16, 2**12, 2**12)


def products(backend: Backend, torch_device: str | None, sizes: Sizes) -> list[dict[str, Any]]:
    """Return a row for each mode: operations per second through nnmpi, and through PyTorch where it is there.

    Args:
        backend: nnmpi's device.
        torch_device: PyTorch's; None where it does not take part.
        sizes: of the matrices.
    """
    values = np.random.default_rng(0).standard_normal((sizes.side, sizes.side), np.float32)
    rows = []
    for mode in MODES:
        a = backend.asarray(values)
        if mode == BF16:
            a = a.astype(bfloat16())
        out = backend.xp.empty_like(a)
        with use_precision(mode):
            ours = best_s(backend, lambda a=a, out=out: gemm(backend.xp, a, a, out=out))
        theirs = None if torch_device is None else _torch_s(mode, values, torch_device)
        work = 2 * sizes.side**3
        rows.append(
            {
                "mode": mode,
                "side": sizes.side,
                "nnmpi_flops_per_s": work / ours,
                "torch_flops_per_s": None if theirs is None else work / theirs,
                "flops_per_s": work / min(each for each in (ours, theirs) if each is not None),
            }
        )
    return rows


def copies(backend: Backend, sizes: Sizes) -> dict[str, float]:
    """Return bytes per second: within the device (read and written bytes both count), up to it and down from it."""
    xp, stream = backend.xp, backend.current_stream()
    source = xp.ones(sizes.device_bytes // 4, dtype=np.float32)
    target = xp.empty_like(source)
    within = best_s(backend, lambda: _copy(target, source))
    host = backend.empty_pinned(sizes.host_bytes // 4, np.float32)
    host[...] = 1
    part = target[: host.size]
    return {
        "within_bytes_per_s": 2 * source.nbytes / within,
        "up_bytes_per_s": host.nbytes / best_s(backend, lambda: backend.from_host_async(host, part, stream)),
        "down_bytes_per_s": host.nbytes / best_s(backend, lambda: backend.to_host_async(part, host, stream)),
    }


def best_s(backend: Backend, work: Callable[[], Any]) -> float:
    """Return the shortest time between events around a call, of some."""
    for _ in range(WARM_UP):
        work()
    found = []
    for _ in range(REPEATS):
        begin, end = backend.new_event(), backend.new_event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(backend.elapsed_s(begin, end))
    return max(min(found), 1e-9)


def _copy(target: Array, source: Array) -> None:
    target[...] = source


def _torch_s(mode: str, values: Array, device: str) -> float:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = mode == TF32
    a = torch.from_numpy(values).to(device, torch.bfloat16 if mode == BF16 else torch.float32)
    out, found = torch.empty_like(a), []
    for number in range(-WARM_UP, REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.matmul(a, a, out=out)
        end.record()
        end.synchronize()
        if number >= 0:
            found.append(begin.elapsed_time(end) / 1e3)
    return max(min(found), 1e-9)
