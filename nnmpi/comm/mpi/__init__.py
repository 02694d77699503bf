"""The MPI world: ranks are processes. Only this folder imports mpi4py.

start       the MPI library: loading it, starting it once, refusing launches that cannot work
mpi_world   MpiWorld and MpiComm: the calls of `comm.world` by those of mpi4py; memory that the
            ranks of a node share
shutdown    how a rank's program ends without leaving the others waiting
watchdog    a thread that says who is missing when ranks wait for long
"""
