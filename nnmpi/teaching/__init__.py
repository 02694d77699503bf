"""What courses use: exercises, grading, mpi4py programs on simulated ranks."""
