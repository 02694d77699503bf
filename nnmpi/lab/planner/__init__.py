"""The planner: the fastest layout of a model on a machine, by measured parts and a race.

    profile        measured costs of a model's parts, cached: steps of one replica, layers, updates
    network        costs of messages: fitted on this machine, or given in numbers
    price          predicted seconds and bytes of every layout of the ranks, and the best ones
    auto_layout    --layout auto: a race between the best layouts of four kinds

`nnmpi plan` prints the result of `price.plan`.
"""
