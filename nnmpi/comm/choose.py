"""Which all-reduce "auto" means: the one that the fitted model predicts to be the fastest, or a rule without a fit.

Every rank must come to the same answer, so nothing is measured here; and a resumed run to the answer of the run before
(another algorithm adds in another order, and the last bits differ), so a run keeps its choices in its checkpoints.

    bytes of a bucket --> predicted seconds of each candidate --> the least, and what it was compared with
"""

from dataclasses import dataclass

from nnmpi.comm.algorithms.registry import ALGORITHMS, HIERARCHICAL, NATIVE, SHARED
from nnmpi.comm.fitting.fit import Fit
from nnmpi.units import format_bytes, format_seconds

# Without a fit. A ring moves the fewest bytes but takes 2(N-1) steps, so what counts is the length of a step's message,
# one N-th of the whole. Measured on one node, 2 cores of an AMD Zen 5, Open MPI 5.0.11 | MPICH 5.0.2, float32, buffers
# refilled, calls interleaved: how many times faster the ring is than the blocking native call (and than the
# non-blocking one, which is what runs under a backward pass).
#
#     whole       2 ranks                        4 ranks, two to a core
#     256 KB      1.3 | 1.0   (1.4 | 1.0)        0.7 | 0.5   (1.1 | 0.4)
#     1 MB        1.2 | 1.1   (1.5 | 1.1)        0.7 | 0.8   (1.0 | 0.8)
#     2 MB        1.1 | 1.0   (2.0 | 1.0)        0.8 | 1.2   (1.0 | 1.0)
#     4 MB        1.2 | 1.2   (1.8 | 1.0)        0.8 | 1.1   (1.0 | 1.0)
#     16 MB       0.9 | 1.0   (2.1 | 1.0)        1.0 | 1.2   (1.3 | 1.2)
#     64 MB       3.3 | 3.0   (7.8 | 3.1)        2.4 | 2.3   (3.5 | 2.4)
#
# From messages of 512 KB on (1 MB with 2 ranks, 2 MB with 4) the ring is at least level but for one column, where ranks
# share cores and wait for one another's turn at each step. On links of 100 Mbit/s Open MPI's native took twice as long.
RING_CHUNK_BYTES = 2**19
SHARED_BYTES = 2**12  # through shared memory native is overtaken at 1 to 4 KB

DIGITS = 3  # of the predictions that a reason names

# One server is last or level with the tree at every size; it is there to be compared with.
CANDIDATES = tuple(name for name in ALGORITHMS if name != "ps")
MOST_RANKS = 1024  # beyond, simulating all candidates would take longer than it can save


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm by name, why it was chosen, in words, and the seconds that were predicted (None without a fit)."""

    algorithm: str
    reason: str
    predicted_s: float | None = None


def choose(nbytes: int, size: int, fit: Fit | None = None, shared: bool = False, started: bool = False) -> Choice:
    """Return the algorithm for summing nbytes over size ranks; the same for the same arguments, always.

    Args:
        fit: of this machine with these ranks.
        shared: whether the array lies in memory that the ranks of a node share.
        started: whether it will be started and polled under computation, and not be a blocking call.
    """
    if size == 1:
        return Choice(NATIVE, "one rank has nothing to add", 0.0)
    if fit is None or size > MOST_RANKS:
        return _by_rule(nbytes, size, shared)
    seconds = {name: fit.predict(name, nbytes, started) for name in _candidates(fit, shared)}
    order = sorted(seconds, key=lambda name: seconds[name])
    best = order[0]
    others = ", ".join(f"{name} {format_seconds(seconds[name], DIGITS)}" for name in order[1:3])
    against = f", against {others}" if others else ""
    reason = f"predicted {format_seconds(seconds[best], DIGITS)} for {format_bytes(nbytes)}{against}"
    return Choice(best, reason, seconds[best])


def _by_rule(nbytes: int, size: int, shared: bool) -> Choice:
    """Return what is right on most machines."""
    if shared:
        if nbytes < SHARED_BYTES:
            return Choice(NATIVE, f"{format_bytes(nbytes)} are too few for shared memory (below {SHARED_BYTES} B)")
        return Choice(SHARED, f"shared memory is the fastest from {format_bytes(SHARED_BYTES)} on")
    chunk = nbytes // size
    if chunk < RING_CHUNK_BYTES:
        return Choice(NATIVE, f"a ring's messages would be {chunk} bytes, too short (below {RING_CHUNK_BYTES}) to pay")
    return Choice(
        "ring", f"a ring moves the fewest bytes, in messages of {chunk} (long enough from {RING_CHUNK_BYTES})"
    )


def _candidates(fit: Fit, shared: bool) -> list[str]:
    """Return what can be used, MPI's own first: of equals the first is taken.

    On one node nothing that is made of messages comes near shared memory, and messages from there take longer than the
    fit says (it was made with ordinary memory, which has larger pages), so they are not even looked at.
    """
    nodes = fit.machine.nodes
    levels = nodes is not None and len(set(nodes)) < fit.ranks
    if shared and fit.shared is not None:
        return [NATIVE, SHARED, *(CANDIDATES if levels else ())]
    return [NATIVE, *(name for name in CANDIDATES if name != HIERARCHICAL or levels)]
