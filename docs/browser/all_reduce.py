"""An all-reduce along a line: partial sums go up to the last rank, and the sum comes down."""

from nnmpi.comm.collective import Step


def all_reduce(rank, size):
    everything = range(size)  # all chunks
    steps = []
    if rank > 0:
        steps.append(Step(from_=rank - 1, recv=everything, reduce=True))
    if rank < size - 1:
        steps.append(Step(to=rank + 1, send=everything))
        steps.append(Step(from_=rank + 1, recv=everything))
    if rank > 0:
        steps.append(Step(to=rank - 1, send=everything))
    return tuple(steps)
