"""The algorithms of the collectives: pure functions from (rank, size) to steps.

ring            all-reduce, reduce-scatter and all-gather for long messages; read it first
tree            all-reduce for short messages, broadcast for long ones; all-reduce through one
                server (star)
halving         all-reduce in few rounds with a ring's bytes
hierarchical    all-reduce over several nodes
doubling        reduce-scatter, all-gather and broadcast, as MPICH does them on powers of two
bruck           reduce-scatter, all-gather and all-to-all in few rounds
pairwise        all-to-all with few bytes
gossip          each rank averages with its two neighbours
registry        all of them by name. A new one is a file here and a line there: `prove`, the options
                and the tests then know it
"""
