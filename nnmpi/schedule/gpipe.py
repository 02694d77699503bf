"""GPipe: fill the pipeline with all forwards, then drain it with all backwards, the last microbatch first.

    python -m nnmpi.schedule --schedule gpipe --stages 4 --microbatches 6

    time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26
    rank 0  F0 F1 F2 F3 F4 F5 .  .  .  .  .  .  .  .  .  B5--- B4--- B3--- B2--- B1--- B0---|
    rank 1  .  F0 F1 F2 F3 F4 F5 .  .  .  .  .  .  B5--- B4--- B3--- B2--- B1--- B0---|.  .
    rank 2  .  .  F0 F1 F2 F3 F4 F5 .  .  .  B5--- B4--- B3--- B2--- B1--- B0---|.  .  .  .
    rank 3  .  .  .  F0 F1 F2 F3 F4 F5 B5--- B4--- B3--- B2--- B1--- B0---|.  .  .  .  .  .

With S stages and M microbatches of even cost the bubble is (S-1)/(M+S-1); every stage keeps M activations.
Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019.
"""

from nnmpi.schedule.instruction import Instruction, Kind


def gpipe(rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
    """Return what a rank computes: all forwards, then all backwards in the opposite order."""
    forwards = tuple(Kind.F.at(rank, m) for m in range(microbatches))
    return forwards + tuple(Kind.B.at(rank, m) for m in reversed(range(microbatches)))
