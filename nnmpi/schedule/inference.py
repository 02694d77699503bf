"""Inference: forwards only, one microbatch behind the other.

    python -m nnmpi.schedule --schedule inference --stages 4 --microbatches 6

    time    0  1  2  3  4  5  6  7  8
    rank 0  F0 F1 F2 F3 F4 F5 .  .  .
    rank 1  .  F0 F1 F2 F3 F4 F5 .  .
    rank 2  .  .  F0 F1 F2 F3 F4 F5 .
    rank 3  .  .  .  F0 F1 F2 F3 F4 F5

Bubble (S-1)/(M+S-1) with S stages and M microbatches; one activation is kept per stage. With several stages on a rank
microbatches go in rounds of as many as there are ranks, or a few more, and a rank does a round stage after stage.
"""

from nnmpi.schedule.instruction import Instruction, Kind
from nnmpi.shard import split


def inference(rank: int, ranks: int, microbatches: int, virtual: int = 1) -> tuple[Instruction, ...]:
    """Return what a rank computes: the forward of each microbatch in each of its stages."""
    stages = range(rank, ranks * virtual, ranks)
    rounds = split(microbatches, max(1, microbatches // ranks))
    return tuple(Kind.F.at(stage, m) for round_ in rounds for stage in stages for m in round_)
