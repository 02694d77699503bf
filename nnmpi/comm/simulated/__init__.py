"""The simulated world: ranks are threads that run one at a time, each with its own clock.

    scheduler         whose turn it is, the ranks' clocks, faults on purpose; what is said when
                      nobody can continue
    simulated_comm    when a message arrives; what was started, and the mistakes in it; the calls of
                      `comm.world.Comm`
    simulated_world   `simulate`: a program on so many ranks
    mpi_front         mpi4py's calls, for programs that know nothing of nnmpi

Read in this order; a program of nnmpi's needs `simulate` alone. No MPI library is needed.
"""
