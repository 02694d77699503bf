"""GPipe: fill the pipeline with all forwards, then drain it with all backwards, the last microbatch first.

With S stages and M microbatches of even cost the bubble is (S-1)/(M+S-1); every stage keeps M activations.
Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019.
"""

from nnmpi.schedule.instruction import Instruction, Kind


def gpipe(rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
    """Return what a rank computes: all forwards, then all backwards in the opposite order."""
    forwards = tuple(Kind.F.at(rank, m) for m in range(microbatches))
    return forwards + tuple(Kind.B.at(rank, m) for m in reversed(range(microbatches)))
