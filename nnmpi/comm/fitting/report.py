"""A fit in words: the segments of each link with their alpha and beta, and what whole all-reduces take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nnmpi.comm.algorithms.registry import ALGORITHMS, NATIVE, SHARED
from nnmpi.comm.fitting.fit import Fit
from nnmpi.comm.machine import Curve
from nnmpi.errors import UsageError
from nnmpi.units import format_bytes, format_seconds

EXAMPLES = (4, 1024, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)


def describe_fit(fit: Fit) -> Iterator[str]:
    """Yield the lines that tell what was measured."""
    known = fit.facts
    nodes = len(set(known["nodes"]))
    where = "1 node" if nodes == 1 else f"{nodes} nodes"
    yield f"{fit.ranks} ranks on {where}, {known['mpi']}, {known.get('cpu', 'unknown processor')}"
    crowded, cores = max(map(known["nodes"].count, known["nodes"])), known.get("cores")
    if cores is not None and crowded > cores:
        yield f"{crowded} ranks share {cores} cores of a node: what was measured is how they take turns, too"
    across = fit.machine.across
    links = {"inside a node" if across or fit.machine.nodes is None else "between nodes": fit.machine.inside}
    if across is not None and across != fit.machine.inside:
        links["between nodes"] = across
    cache_bytes = float(known.get("cache_bytes", 2**23)) / (2 * fit.ranks)
    for name, link in links.items():
        for way, curve in (("one way", link.one_way), ("both ways at once", link.both_ways)):
            yield f"messages {name}, {way}: alpha {format_seconds(curve.alpha_s)}"
            for part in segments(curve, cache_bytes):
                span = f"{format_bytes(int(part.start_bytes))} to {format_bytes(int(part.stop_bytes))}"
                step = f", {format_seconds(part.step_s)} for the handshake" if part.name == "rendezvous" else ""
                yield f"    {part.name + ',':13} {span}: beta {1e9 * part.beta_s:.3f} ns/B{_rate(part.beta_s)}{step}"
    add = fit.machine.add
    yield "adding: gamma " + ", ".join(
        f"{1e9 * add(nbytes) / nbytes:.3f} ns/B{_rate(add(nbytes) / nbytes)} for {format_bytes(nbytes)}"
        for nbytes in (2**16, 2**24)
    )


def predictions(fit: Fit, sizes: tuple[int, ...] = EXAMPLES) -> Iterator[str]:
    """Yield a table of what each all-reduce is predicted to take."""
    names = [NATIVE, *([SHARED] if fit.shared is not None else []), *ALGORITHMS]
    yield f"{'predicted':17}" + "".join(f"{format_bytes(nbytes):>11}" for nbytes in sizes)
    for name in names:
        yield f"{name:17}" + "".join(f"{_seconds(fit, name, nbytes):>11}" for nbytes in sizes)


def _rate(seconds_per_byte: float) -> str:
    return f" ({1e-9 / seconds_per_byte:.1f} GB/s)" if seconds_per_byte > 0 else ""


def _seconds(fit: Fit, name: str, nbytes: int) -> str:
    try:
        return format_seconds(fit.predict(name, nbytes), digits=3)
    except UsageError:
        return "-"


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
