"""Ranks and messages: groups of ranks, their collectives as steps, and how these are run, proved and timed.

What a collective is, without MPI; read these first:

    steps, collective    what one rank does, as values; what a collective promises
    algorithms/          ring, tree ...: a file each. A new one is a file and a line in its registry
    prove, render        whether the steps keep the promise; a picture of them
    engine, links        going through all ranks' steps: what proof, picture and simulation have in common
    simulate             how long they take on a machine; the formulas stand beside the algorithms
    machine, fitting/    the machine; what was measured of it, and how
    choose               which algorithm "auto" means

Running them, from the bottom up:

    world                what carries the messages: the few calls that all of the package meets it by
    mpi/                 the world that is MPI, by mpi4py, which is imported there alone
    simulated/           the world of simulated ranks, all in one process
    start                how MPI is started
    communicator         ranks that exchange small values: gather, share, barrier
    buffers              which arrays can be summed, and their bytes
    execution            running steps, or the world's own collectives, on an array
    shared_memory/       memory that the ranks of a node share, and the sum through it
    device/              how arrays on a device travel
    group                what a strategy gets: ranks that sum arrays. Which of the above is used is decided here
    gradients            sums of gradients in buckets, while the backward pass runs
    fixed_order          sums with the same bits on any number of ranks
    point_to_point       messages between two ranks

Beside them:

    agreement            one rank fails and all raise; is it the same on every rank; a check every few steps

No import starts MPI or needs an MPI library, except of `nnmpi.comm.mpi.mpi_world` and what that is made of.
"""
