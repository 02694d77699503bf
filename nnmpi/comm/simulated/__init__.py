"""The simulated world: ranks are threads that run one at a time, each with its own clock.

    scheduler         turns, the ranks' clocks, injected faults; the report of a deadlock
    simulated_comm    arrivals of messages; open requests and mistakes with them; the calls of
                      `comm.world.Comm`
    simulated_world   `simulate`: runs a program on simulated ranks
    mpi_front         mpi4py's calls, for programs without nnmpi

Read in this order; a program with nnmpi needs `simulate` alone. No MPI library is needed.
"""
