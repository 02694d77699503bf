"""PipeDream: 1F1B in which every stage updates its weights after each backward, and never waits for the others.

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
