"""Which of a pipeline rank's segments are recomputed, so that activations fit a number of bytes.

    1F1B, rank 0 of 2, segments 0 and 1; 0 is recomputed

    F0.0  F1.0  F0.1  F1.1  B1.0  B0.0 ...     held: inputs of 0.0 and 0.1, all of 1.0 and 1.1;
                                               B0.0 computes 0.0 again, and holds all of it meanwhile

The program says which microbatches are in flight at each moment, so the peak is a sum of measured
bytes. Segments are chosen by the bytes that they save per second of recomputing, until the peak
fits; then those that need not be recomputed are taken back, the slowest first. The best of all sets
takes exponential time to find.
"""

from collections.abc import Callable, Collection, Mapping

from nnmpi.base.errors import UsageError
from nnmpi.base.units import format_bytes


def choose_recomputed(
    seconds: Mapping[int, float], peak: Callable[[Collection[int]], float], budget: int
) -> frozenset[int]:
    """Return the segments to recompute.

    Args:
        seconds: of recomputing each.
        peak: segments to recompute -> the most bytes at once.
        budget: in bytes.

    Raises:
        UsageError: for too small a budget.

    Example:
        >>> from nnmpi.memory.fitting import choose_recomputed
        >>> held = {0: 10, 1: 8}
        >>> kept = lambda again: sum(held[i] for i in held if i not in again)
        >>> choose_recomputed({0: 2.0, 1: 1.0}, kept, 12)
        frozenset({1})
    """
    chosen: set[int] = set()
    now = peak(chosen)
    while now > budget and len(chosen) < len(seconds):
        left = sorted(seconds.keys() - chosen)
        gains = {item: now - peak({*chosen, item}) for item in left}
        chosen.add(max(left, key=lambda item: gains[item] / max(seconds[item], 1e-9)))
        now = peak(chosen)
    if now > budget:
        raise UsageError(
            f"activation_memory {format_bytes(budget)} is too little: with every segment of this"
            f" rank's stages recomputed a pass takes {format_bytes(int(now))}; give at least that,"
            ' or "least", smaller microbatches, or more stages'
        )
    for item in sorted(chosen, key=lambda item: -seconds[item]):
        if peak(chosen - {item}) <= budget:
            chosen.discard(item)
    return frozenset(chosen)
