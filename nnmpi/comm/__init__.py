"""Ranks and messages: groups, collectives as steps, and how they are run, proved and priced.

Collectives as values, without MPI; read these first:

    collective           one rank's steps; the contract of a collective
    algorithms/          ring, tree ...: a file each. A new one is a file and a line in its registry
    prove                the engine that walks through all ranks' steps; the proof
    machine, duration    a machine, and the seconds of a collective on it; the closed forms stand
                         beside the algorithms
    fit, saved_fit       a machine's measured curves; the algorithm that "auto" picks on it

Running them, from the bottom up:

    world                the interface to the carrier of messages: about thirty calls
    mpi/                 the world of MPI processes, by mpi4py, which is imported there alone; the
                         start of MPI
    simulated/           the world of simulated ranks, all in one process
    agreement            small values: gather, share; all raise when one fails; equality over ranks
    buffers              dtypes that can be summed; arrays as bytes; copies between device and host
    execution            runs steps, or the world's native collectives, on an array
    node, node_sum       memory shared by the ranks of a node, and the sum through it
    group                the interface of a strategy: ranks that sum arrays. It picks one of the
                         mechanisms above
    gradients            sums of gradients in buckets, overlapped with the backward pass
    fixed_order          sums with the same bits on any number of ranks
    point_to_point       messages between two ranks
    mesh                 ranks on the axes dp, pp, tp and sp, with a group each
    synchrony/           which rank waits for which: rules of asynchronous training, no messages
    ranks                runs a program on MPI's ranks or on simulated ones, as every command does

No import starts MPI or needs an MPI library, except `nnmpi.comm.mpi.mpi_world` and its imports.
"""
