"""A right solution of every exercise: the package's own where there is one, else that of one who
was given it.
"""

from functools import partial

import numpy as np

from nnmpi.comm.algorithms import bruck, gossip, halving, pairwise, ring, tree
from nnmpi.comm.algorithms.registry import COLLECTIVES
from nnmpi.schedule import schedules
from tests.teaching.exercise.sealed import unseal

star_all_reduce, tree_all_reduce, tree_broadcast = tree.star, tree.tree, tree.tree_broadcast
tree_reduce, ring_all_reduce, ring_all_gather = tree.tree_reduce, ring.ring, ring.ring_all_gather
ring_reduce_scatter, bruck_all_gather = ring.ring_reduce_scatter, bruck.bruck_all_gather
halving_doubling, neighbour_average = halving.halving_doubling, gossip.gossip


def _cost(*key):
    return lambda N, M, alpha, beta: np.dot(COLLECTIVES[key].formula(N)[:2], (alpha, M * beta))


server_cost, ring_cost = _cost("all-reduce", "star"), _cost("all-reduce", "ring")
tree_cost, all_gather_cost = _cost("all-reduce", "tree"), _cost("all-gather", "ring")
naive_pipeline, gpipe, one_f_one_b = schedules.naive, schedules.gpipe, schedules.one_f_one_b
interleaved, inference_pipeline = (
    partial(each, virtual=2) for each in (schedules.interleaved, schedules.inference)
)
zero_bubble = schedules.zero_bubble
all_to_all = pairwise.pairwise

exec(unseal(), globals())  # those that are nobody's own
my_all_reduce = tree.star  # which has no round to spare, as the sealed one has
