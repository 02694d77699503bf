"""Shared memory as it is on several nodes, or on a machine that does not keep the order of what is
written.
"""

from nnmpi.comm.node import SharedMemory


def shared_memory(group, nodes=None, ordered=None):
    """Return the memory of a group as if its ranks were on these nodes, and their world kept the
    order or not.
    """
    world, result = group.comm.world, list(group.nodes())
    keeps_order = world.keeps_order
    group._nodes = result if nodes is None else list(nodes)
    world.keeps_order = keeps_order if ordered is None else ordered
    try:
        return SharedMemory(group)
    finally:
        group._nodes, world.keeps_order = result, keeps_order
