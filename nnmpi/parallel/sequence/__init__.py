"""Sequence parallelism: ranks share the positions of each sequence, and have all layers.

group        SequenceGroup: which positions a rank has, what goes into a model and comes out of it
ulysses      attention by an exchange of positions for heads
ring         attention in which keys and values go round
"""
