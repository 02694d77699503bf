"""Sequence parallelism: ranks share the positions of each sequence, and have all layers.

group        SequenceGroup: which positions a rank has, what goes into a model and comes out of it
attention    over positions of several ranks: keys and values go round, or positions are exchanged
             for heads
"""
