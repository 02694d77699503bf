"""Memory that the ranks of a node share, and the all-reduce through it. To be read from the bottom up:

barriers      barriers by counters in pages that all see, which cost a tenth of MPI's
memory        SharedMemory: arrays that all ranks of a node see
shared_sum    the sum of arrays that lie there
"""
