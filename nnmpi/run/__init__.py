"""`python -m nnmpi.run`: a training that is started again after each fault, until it has come to its end.

    launching     how a job is started by mpirun or srun, which hosts answer, which processes belong to it
    supervisor    watches one start after the other: what went wrong, what is left, when to give up

Neither needs MPI: a supervisor that took part in the job would end with it.
"""
