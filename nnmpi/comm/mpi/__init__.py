"""The MPI world: ranks are processes. Only this folder imports mpi4py.

start       loads the MPI library, starts it once, refuses launches that cannot work
mpi_world   MpiWorld and MpiComm: the calls of `comm.world` by those of mpi4py; shared memory
shutdown    the end of a rank's program, without leaving the others waiting
watchdog    a thread that names the missing rank when ranks wait for long
"""
