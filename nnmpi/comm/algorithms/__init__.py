"""The algorithms of the collectives: pure functions from (rank, size) to steps.

ring            all-reduce, reduce-scatter and all-gather for long messages; read it first
tree            all-reduce for short messages, broadcast for long ones; all-reduce by way of one
                server (star)
halving         all-reduce in few rounds that moves no more than a ring
hierarchical    all-reduce over several nodes
bruck           reduce-scatter and all-gather in few rounds
gossip          each rank averages with its two neighbours; or ranks average two by two (no
                collective of all ranks, so it is not in the registry)
registry        all of them by name. A new one is a file here and a line there; `prove` and the
                tests then try it. For runs its name is also written in `train.config`, where types
                cannot be computed
"""
