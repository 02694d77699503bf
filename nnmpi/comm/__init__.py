"""Ranks and messages: groups of ranks, their collectives as steps, and how these are run, proved and timed.

What a collective is, without MPI; read these first:

    steps, collective    what one rank does, as values; what a collective promises
    algorithms/          ring, tree ...: a file each. A new one is a file and a line in its registry
    prove, render        whether the steps keep the promise; a picture of them
    simulate, cost       how long they take on a machine, by simulation and by formula; simulation/ is the machinery
    machine, fit         the machine; what was measured of it (fitting/ measures it)
    choose               which algorithm "auto" means

Running them on MPI, from the bottom up:

    start, shutdown      how MPI is started; how a rank's program ends without leaving the others waiting
    communicator         ranks that exchange small values: gather, share, barrier
    buffers              which arrays can be summed, and their bytes as MPI takes them
    execution            running steps, or MPI's own collectives, on an array
    sharing/             memory that the ranks of a node share, and the sum through it
    device/              how arrays on a device travel
    group                what a strategy gets: ranks that sum arrays. Which of the above is used is decided here
    gradients            sums of gradients in buckets, while the backward pass runs
    fixed_order          sums with the same bits on any number of ranks
    vector_collectives   collectives of parts of any lengths
    point_to_point       messages between two ranks

Beside them:

    agreement            one rank fails and all raise; is it the same on every rank; meeting now and then
    backoff              waiting without taking a core from others
    clock_offsets        how far the ranks' clocks are apart
    describe             what runs here, in words
    units                bytes and seconds as people write them

mpi4py is imported in this package alone. Nothing is imported here: importing mpi4py.MPI starts MPI, and the steps and
their proof must be readable without it.
"""
