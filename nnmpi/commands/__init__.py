"""The commands beside training: `nnmpi COMMAND`; one file each.

    table                             all commands by group, and the module of each: a new one's row
    start                             how a command begins that opens a run
    evaluate, predict, generate       a run's model on data, on files, on a prompt
    export                            a run's weights for other programs

The commands of other packages, such as `nnmpi plan`, are in theirs; the table names them.
"""
