"""A link's curve in the segments that the textbooks know: eager, rendezvous, out of the cache.

seconds |                         ___/       out of cache: beta of main memory
        |               ___/
        |         |____/                     rendezvous: a handshake more, beta of the cache
        |  _______|                          eager: alpha, and next to nothing per byte
        +------------------------------ bytes
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nnmpi.comm.curve import Curve

STEP_BYTES = (512, 2**16)  # the eager limit of an MPI library lies between them
STEEP = 4  # how many times steeper than usual the step is


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a curve in which messages are handled alike.

    Attributes:
        name: "eager", "rendezvous" or "out of cache"; "any length" for a straight line.
        start_bytes, stop_bytes: from where to where it was measured.
        step_s: what a message costs more than an empty one before its bytes count: a handshake.
        beta_s: seconds per byte, from the segment's first to its last point.
    """

    name: str
    start_bytes: float
    stop_bytes: float
    step_s: float
    beta_s: float


def segments(curve: Curve, cache_bytes: float) -> list[Segment]:
    """Return a link's curve in up to three segments.

    Args:
        cache_bytes: the longest messages that stay in the cache, all ranks' buffers together.
    """
    eager_bytes = find_eager_limit(curve) or 0
    borders = (("eager", eager_bytes), ("rendezvous", cache_bytes), ("out of cache", float("inf")))
    found: list[Segment] = []
    start = -1.0
    for name, stop in borders:
        points = [point for point in curve.points if start < point[0] <= stop]
        if name == "out of cache" and found:  # without a step: it begins where the cache ends
            points.insert(0, next(point for point in curve.points if point[0] == found[-1].stop_bytes))
        start = stop
        if len(points) > 1:
            found.append(_segment(name, points, curve))
    return found or [_segment("any length", list(curve.points), curve)]


def _segment(name: str, points: Sequence[tuple[float, float]], curve: Curve) -> Segment:
    (first, first_s), (last, last_s) = points[0], points[-1]
    beta_s = (last_s - first_s) / (last - first) if len(points) > 1 else 0.0
    step_s = first_s - curve.alpha_s - beta_s * (first - curve.points[0][0])
    return Segment(name, first, last, max(step_s, 0.0), beta_s)


def find_eager_limit(one_way: Curve) -> int | None:
    """Return the longest message known to lie below the step of a link's curve, None if there is no step."""
    slopes = [
        ((later[1] - earlier[1]) / (later[0] - earlier[0]), int(earlier[0]))
        for earlier, later in pairwise(one_way.points)
        if STEP_BYTES[0] <= earlier[0] and later[0] <= STEP_BYTES[1]
    ]
    if not slopes:
        return None
    usual = float(np.median([slope for slope, _ in slopes]))
    steepest, nbytes = max(slopes)
    return nbytes if steepest > STEEP * usual else None
