"""Sequence parallelism: ranks shard the positions of each sequence, and have all layers.

group        SequenceGroup: the positions of a rank, and a model's input and result
attention    over positions of several ranks: a ring of keys and values, or an all-to-all of
             positions and heads
"""
