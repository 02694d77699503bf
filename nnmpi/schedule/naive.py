"""The naive pipeline: one microbatch at a time goes through all stages and back, and all ranks but one are idle.

Bubble (S-1)/S with S stages, however many microbatches; one activation is kept per stage.
"""

from nnmpi.schedule.instruction import Instruction, Kind


def naive(rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
    """Return what a rank computes: forward and backward of each microbatch before the next one."""
    return tuple(kind.at(rank, m) for m in range(microbatches) for kind in (Kind.F, Kind.B))
