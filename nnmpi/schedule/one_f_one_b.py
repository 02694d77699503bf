"""1F1B: as soon as a backward can be done it is done, and every stage alternates between forward and backward.

    python -m nnmpi.schedule --schedule 1f1b --stages 4 --microbatches 6

    time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5 B2--- .  B3--- .  B4--- .  B5---|
    rank 1  .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5---|.  .
    rank 2  .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .  B5---|.  .  .  .
    rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---|.  .  .  .  .  .

The bubble is GPipe's, (S-1)/(M+S-1) with S stages and M microbatches, but stage s keeps only min(S-s, M) activations.
Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019; with a flush at the end
of each step: the same, Memory-Efficient Pipeline-Parallel DNN Training, 2021.
"""

from nnmpi.schedule.instruction import Instruction, Kind


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
    """Return what a rank computes: a warm-up of forwards, then a forward and a backward in turn, then backwards."""
    warm_up = min(ranks - 1 - rank, microbatches)
    program = [Kind.F.at(rank, m) for m in range(warm_up)]
    for m in range(microbatches):
        if warm_up + m < microbatches:
            program.append(Kind.F.at(rank, warm_up + m))
        program.append(Kind.B.at(rank, m))
    return tuple(program)
