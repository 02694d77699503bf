"""Which all-reduce "auto" means: a rule of the message's length and the number of ranks, nothing else.

Every rank must come to the same answer, and a resumed run to the answer of the run before (another algorithm adds in
another order, and the last bits differ). So nothing is measured here at run time.
"""

from dataclasses import dataclass

from nnmpi.comm.algorithms.registry import NATIVE

RING_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm by name, and why it was chosen, in words."""

    algorithm: str
    reason: str


def choose(nbytes: int, size: int) -> Choice:
    """Return the algorithm for summing nbytes over size ranks; the same for the same numbers, always."""
    if size == 1:
        return Choice(NATIVE, "one rank has nothing to add")
    if nbytes < RING_BYTES:
        return Choice(NATIVE, f"{nbytes} bytes are less than {RING_BYTES}, where the steps of a ring cost more")
    return Choice("ring", f"{nbytes} bytes are at least {RING_BYTES}, where a ring moves the fewest bytes per rank")
