"""The planner: which layout of a model on a machine takes the least time for a step, by measured parts.

    profile    what a model's parts take on this machine: whole steps, layers, updates, bytes
    network    what messages cost: fitted here, said in a file, or a network by its name
    shapes     where a model is cut, and what its ranks hold, without values
    space      every layout of so many ranks, and what cannot be, with the reason
    price      seconds and bytes of one layout; without the bubble a bound of them
    search     the layouts in the order of their bounds, until the best are proved to be the best under these prices
    report     what was found, as text and as JSON

Begin with `search.plan`. `python -m nnmpi.plan` prints what it finds; the train command can take it.
"""
