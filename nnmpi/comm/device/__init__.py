"""Collectives of arrays that lie on a device.

To be read in this order:

    transport     which way a group's device arrays travel, and why: here a new way is added
    staged        through page-locked host memory, piece by piece; any MPI and any algorithm can do it
    coroutine     how such a collective is written: as a generator that yields what it waits for
    copies        the copies between a device and the host, and host arrays for MPI wherever an array lies
    cuda_aware    whether MPI can be given device pointers; __main__ is the child process that tries it
    ipc           through one another's device memory, within a node
    nccl          through NVIDIA's library, with a rank for each card
"""
