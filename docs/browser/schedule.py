"""A pipeline schedule: two forwards, their backwards, and the next two."""

from nnmpi.schedule.schedule import Kind


def schedule(rank, ranks, microbatches):
    program = []
    for first in range(0, microbatches, 2):
        both = range(first, min(first + 2, microbatches))
        program += [Kind.F.at(rank, number) for number in both]
        program += [Kind.B.at(rank, number) for number in both]
    return tuple(program)
