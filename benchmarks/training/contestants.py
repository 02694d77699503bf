"""The contestants: each way to run a case, as a value that is passed to its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # NumPy must not be loaded before the environment is set
    from benchmarks.training.cases import Case

NNMPI, TORCH = "nnmpi", "torch"
# Groups; the fastest contestant of each counts.
PURE, JIT, STOCK, TUNED = "nnmpi", "nnmpi jit", "PyTorch", "PyTorch, tuned malloc"
# nnmpi's ways: a loop, with `DataParallel` on several ranks; the same, recorded and replayed;
# `Worker`.
EAGER, COMPILED, WORKER = "eager", "compiled", "worker"
CHANNELS_LAST = "channels_last"
# Some machines set these for all programs. OpenBLAS then uses kernels for another processor.
PINS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
# A setting of experienced users of PyTorch: freed memory stays in the process.
TUNED_MALLOC: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
}


@dataclass(frozen=True)
class Contestant:
    """One way to run a case on a number of ranks.

    Attributes:
        side: NNMPI or TORCH.
        case: its name.
        ranks: processes of one thread each.
        way: of nnmpi: EAGER, COMPILED or WORKER; of PyTorch's images: contiguous or CHANNELS_LAST.
        jit: whether nnmpi uses compiled kernels.
        tuned: whether malloc keeps freed memory, by TUNED_MALLOC.
        dtype: float64 for the reference of all comparisons.
    """

    side: str
    case: str
    ranks: int = 1
    way: str = ""
    jit: bool = False
    tuned: bool = False
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """The side and its distinguishing settings; unique in a field."""
        words = [self.side, self.way, "jit" * self.jit, "tuned malloc" * self.tuned]
        return " ".join(filter(None, [*words, self.dtype * (self.dtype != "float32")]))

    @property
    def group(self) -> str:
        """The group in which it competes."""
        if self.side == NNMPI:
            return JIT if self.jit else PURE
        return TUNED if self.tuned else STOCK


def nnmpi_field(case: Case, ranks: int, jit: bool, reduced: bool = False) -> list[Contestant]:
    """Return nnmpi's ways; for large cases and reduced runs only the fastest."""
    ways = [COMPILED, *([WORKER] if ranks > 1 else [])]
    plain = [
        Contestant(NNMPI, case.name, ranks, way)
        for way in (ways if case.large or reduced else [EAGER, *ways])
    ]
    return [*plain, *(replace(item, jit=True) for item in plain if jit)]


def torch_field(case: Case, ranks: int, reduced: bool = False) -> list[Contestant]:
    """Return PyTorch's ways; for a reduced run one."""
    ways = ["contiguous", CHANNELS_LAST] if case.model == "cnn" else [""]
    plain = [Contestant(TORCH, case.name, ranks, way) for way in ways]
    return plain[-1:] if reduced else [*plain, *(replace(item, tuned=True) for item in plain)]


def reference(case: Case, torch: bool) -> Contestant:
    """Return the contestant in float64 whose loss and gradients are the reference."""
    return Contestant(
        TORCH if torch else NNMPI, case.name, way="" if torch else EAGER, dtype="float64"
    )
