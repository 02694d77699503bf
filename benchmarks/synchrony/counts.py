"""The messages and bytes by formula: N workers, R servers that compute as well, M bytes of weights, K steps.

    through servers   a push to and a reply from each server on another rank: 2 (N-1) messages for each server and,
                      over all of them, 2 (N-1) M bytes a step, as each server has an R-th of M
    ring all-reduce   2 (N-1) messages of M/N bytes from each of N ranks, a step
    local             that, once in so many steps
    gossip, ring      2 messages of M bytes from each rank, a step
    gossip, random    1 message of M bytes from each rank, a step (N even)

A segment through servers has more than its steps: a reply to every worker at its start, and with each message of a
server a header. Where nobody is in step the server's own worker, which needs no messages, may do more than an N-th of
the work, or less: then what counts are the gradients of the others.
"""

from nnmpi.synchrony.neighbours import RING
from nnmpi.synchrony.sync import Sync


def per_step(sync: Sync, workers: int, nbytes: int) -> tuple[float, float]:
    """Return the messages and the bytes of a step of all workers, over all ranks.

    Args:
        sync: the way of synchronization.
        workers: N.
        nbytes: M, the bytes of the weights.
    """
    others = workers - 1
    if sync.uses_servers:
        return 2.0 * others * sync.server_count, 2.0 * others * nbytes
    if sync.mode == "gossip":
        count = workers * (min(2, others) if sync.neighbours == RING else 1)
        return float(count), float(count * nbytes)
    every = sync.local_steps if sync.mode == "local" else 1
    return 2.0 * workers * others / every, 2.0 * others * nbytes / every


def in_segment(
    sync: Sync, workers: int, nbytes: int, steps: int, distant: int, header: int
) -> tuple[float, float] | None:
    """Return the messages and bytes of a segment of so many steps; None for the synchronous run.

    That counts its all-reduces as calls: on each rank one of the gradient and one of the report's three numbers a step.

    Args:
        distant: gradients that were computed on other ranks than the (only) server's.
        header: bytes of a server's message besides the weights.
    """
    if sync.uses_servers:
        messages = 2.0 * distant + workers - 1
        return messages, messages * (nbytes + header)
    if sync.asynchronous:
        messages, sent = per_step(sync, workers, nbytes)
        return steps * messages, steps * sent
    return None
