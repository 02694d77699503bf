"""The planner: the fastest layout of a model on a machine, by measured parts and a race.

    profile        what a model's parts take on this machine, kept: steps of one replica, layers,
                   updates, bytes
    network        what messages cost: fitted here, or said in numbers
    price          every layout of so many ranks, and what cannot be, with the reason; seconds and
                   bytes, and the best
    auto_layout    --layout auto: the best of four kinds race

`python -m nnmpi.plan` prints what `price.plan` finds.
"""
