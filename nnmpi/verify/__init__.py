"""`python -m nnmpi.verify`: whether a model under a layout trains as it does on one rank.

__main__    runs both, compares, prints the table
options     what is to be verified: the train command's options and a few of its own
trial       a short training run on any number of ranks, as values
compare     what differs between two trials, and by how much it may
"""
