"""PipeDream: 1F1B in which every stage updates its weights after each backward, and never waits for the others.

    python -m nnmpi.schedule --schedule pipedream --stages 4 --microbatches 6

    time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0---|F4 B1---|F5 B2---|.  B3---|.  B4---|.  B5---|
    rank 1  .  F0 F1 F2 .  .  .  .  B0---|F3 B1---|F4 B2---|F5 B3---|.  B4---|.  B5---|.  .
    rank 2  .  .  F0 F1 .  .  B0---|F2 B1---|F3 B2---|F4 B3---|F5 B4---|.  B5---|.  .  .  .
    rank 3  .  .  .  F0 B0---|F1 B1---|F2 B2---|F3 B3---|F4 B4---|F5 B5---|.  .  .  .  .  .

A | is an update. Between the forward and the backward of a microbatch stage s updates its weights S-1-s times (fewer at
the beginning): that is its staleness. The backward uses the weights of the forward, so a stage keeps up to S-s
versions of them (weight stashing). With many microbatches there is no bubble but at the beginning and the end.
Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019.
"""

from nnmpi.schedule.instruction import Instruction, Kind
from nnmpi.schedule.one_f_one_b import one_f_one_b


def pipedream(rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
    """Return what a rank computes: 1F1B with an update after each backward."""
    program: list[Instruction] = []
    for one in one_f_one_b(rank, ranks, microbatches):
        program.append(one)
        if one.kind is Kind.B:
            program.append(Kind.STEP.at(rank, one.microbatch))
    return tuple(program)
