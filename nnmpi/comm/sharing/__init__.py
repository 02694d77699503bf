"""Memory that the ranks of a node share, and the all-reduce through it. To be read from the bottom up:

window        one MPI window with a part for each rank; the room that it needs in /dev/shm
barriers      barriers by counters in such a window, which cost a tenth of MPI's
memory        SharedMemory: arrays that all ranks of a node see
shared_sum    the sum of arrays that lie there
"""
