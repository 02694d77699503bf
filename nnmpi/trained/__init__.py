"""What training has left, opened and used: `nnmpi.load`, and the commands evaluate, predict, generate and export.

run             a run's model with its values under any layout, and what is done to samples before
evaluation      accuracy and loss over a data set, which samples are taken for what; pictures of that
evaluate        the command: how well a run does on data
predict         the command: of what class samples are
generate        the command: what a language model writes after a prompt
export          the command: weights for other programs
options         what the commands have in common
"""
