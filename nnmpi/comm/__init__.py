"""Ranks and messages: groups, collectives as steps, and how they are run, proved and priced.

What a collective is, without MPI; read these first:

    collective           what one rank does, as steps; what a collective promises
    algorithms/          ring, tree ...: a file each. A new one is a file and a line in its registry
    prove, render        the engine that goes through all ranks' steps; the proof; a picture
    machine, simulate    a machine, and how long steps take on it; the formulas stand beside the
                         algorithms
    measure, fit         what was measured of a machine; which algorithm "auto" means on it

Running them, from the bottom up:

    world                what carries the messages: the few calls that all of the package meets it
                         by
    mpi/                 the world that is MPI, by mpi4py, which is imported there alone; how MPI is
                         started
    simulated/           the world of simulated ranks, all in one process
    agreement            small values: gathered and shared; one rank fails and all raise; is it the
                         same on every rank
    buffers              which arrays can be summed, and their bytes; copies between a device and
                         the host
    execution            running steps, or the world's own collectives, on an array
    node, node_sum       memory that the ranks of a node share, and the sum through it
    group                what a strategy gets: ranks that sum arrays. Which of the above is used is
                         decided here
    gradients            sums of gradients in buckets, while the backward pass runs
    fixed_order          sums with the same bits on any number of ranks
    point_to_point       messages between two ranks

No import starts MPI or needs an MPI library, except of `nnmpi.comm.mpi.mpi_world` and what that is
made of.
"""
