"""What training has left, opened and used: `nnmpi.load`, and what evaluate, predict, generate and export need.

run             a run's model with its values under any layout, and what is done to samples before
evaluation      accuracy and loss over a data set, which samples are taken for what; pictures of that
options         what these commands have in common
"""
