"""Ranks and messages: groups, collectives as steps, their execution and proof.

Nothing is imported here: importing mpi4py starts MPI, and the steps and their proof must be readable without it.
"""
