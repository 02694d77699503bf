"""Inference: forwards only, one microbatch behind the other.

Bubble (S-1)/(M+S-1) with S stages and M microbatches; one activation is kept per stage.
"""

from nnmpi.schedule.instruction import Instruction, Kind


def inference(rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
    """Return what a rank computes: the forward of each microbatch."""
    return tuple(Kind.F.at(rank, m) for m in range(microbatches))
