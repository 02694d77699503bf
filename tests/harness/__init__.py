"""Running tests under MPI so that one rank's failure or hang ends the run for all, with that rank's
words shown.
"""
