"""Pairwise averaging: two ranks end with the sum of their buffers, and the others go on meanwhile.

               rank 0      rank 1      rank 2      rank 3        partners 2, 3, 0, 1
               a           b           c           d
    step 0     a <---------------------> c                       both ways at once
                           b <---------------------> d
               a+c         b+d         c+a         d+b

A sum of two numbers is the same in either order, so both end with the same bits; halved, it is their mean.

Cost for M bytes, latency alpha, time per byte beta, time per added byte gamma, whatever the number of ranks:

    alpha  +  M beta  +  M gamma

Source: Boyd et al., Randomized gossip algorithms, 2006.
"""

from nnmpi.comm.steps import Step


def pairwise(rank: int, size: int, partner: int) -> tuple[Step, ...]:
    """Return this rank's steps; none when it is its own partner.

    Args:
        rank: this rank.
        size: the number of ranks, and so of the chunks that travel: all of them.
        partner: the rank that it exchanges with, which must have this one as its partner.
    """
    if partner == rank:
        return ()
    everything = range(size)
    return (Step(to=partner, send=everything, from_=partner, recv=everything, reduce=True),)
