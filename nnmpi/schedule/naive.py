"""The naive pipeline: one microbatch at a time goes through all stages and back, and all ranks but one are idle.

    python -m nnmpi.schedule --schedule naive --stages 3 --microbatches 2

    time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
    rank 0  F0 .  .  .  .  .  .  B0--- F1 .  .  .  .  .  .  B1---|
    rank 1  .  F0 .  .  .  B0--- .  .  .  F1 .  .  .  B1---|.  .
    rank 2  .  .  F0 B0--- .  .  .  .  .  .  F1 B1---|.  .  .  .

Bubble (S-1)/S with S stages, however many microbatches; one activation is kept per stage.
"""

from nnmpi.schedule.instruction import Instruction, Kind


def naive(rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
    """Return what a rank computes: forward and backward of each microbatch before the next one."""
    return tuple(kind.at(rank, m) for m in range(microbatches) for kind in (Kind.F, Kind.B))
