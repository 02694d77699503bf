"""1F1B: as soon as a backward can be done it is done, and every stage alternates between forward and backward.

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
