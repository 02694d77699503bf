"""The simulated world: every rank is a thread of this process, one of which runs at a time, on clocks of their own.

    faults            what goes wrong on purpose
    scheduler         whose turn it is, the ranks' clocks, and what is said when nobody can go on
    network           when a message arrives
    requests          what was started, and the mistakes that show in it
    simulated_comm    the calls of `comm.world.Comm`
    simulated_world   `simulate`: a program on so many ranks

Read in this order; a program needs the last one alone. No MPI library is needed.
"""
