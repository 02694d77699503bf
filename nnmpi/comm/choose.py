"""Which all-reduce "auto" means: a rule of the message's length and the number of ranks, nothing else.

Every rank must come to the same answer, and a resumed run to the answer of the run before (another algorithm adds in
another order, and the last bits differ). So nothing is measured here at run time.
"""

from dataclasses import dataclass

from nnmpi.comm.algorithms.registry import NATIVE

# A ring moves the fewest bytes but takes 2(N-1) steps, so what counts is the length of a step's message, one N-th of
# the whole. Measured on one node, 2 cores of an AMD Zen 5, Open MPI 5.0.11 | MPICH 5.0.2, float32, buffers refilled,
# calls interleaved: how many times faster the ring is than the blocking native call (and than the non-blocking one,
# which is what runs under a backward pass).
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


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm by name, and why it was chosen, in words."""

    algorithm: str
    reason: str


def choose(nbytes: int, size: int) -> Choice:
    """Return the algorithm for summing nbytes over size ranks; the same for the same numbers, always."""
    if size == 1:
        return Choice(NATIVE, "one rank has nothing to add")
    chunk = nbytes // size
    if chunk < RING_CHUNK_BYTES:
        return Choice(NATIVE, f"a ring's messages would be {chunk} bytes, too short (below {RING_CHUNK_BYTES}) to pay")
    return Choice(
        "ring", f"a ring moves the fewest bytes, in messages of {chunk} (long enough from {RING_CHUNK_BYTES})"
    )
