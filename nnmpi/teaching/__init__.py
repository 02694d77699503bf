"""What courses use: exercises, grading, mpi4py programs on simulated ranks.

exercise/       exercises with a checker, and `nnmpi exercise`
grade           `nnmpi grade`: one submission, or a class
simrun          `nnmpi simrun`: an mpi4py program unchanged, on simulated ranks
mpi_front/      the calls of mpi4py that it finds there
rank_modules    which modules a simulated rank has for itself
"""
