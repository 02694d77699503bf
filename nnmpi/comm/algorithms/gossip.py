"""Neighbour averaging: each rank mixes its buffer with its two neighbours' on a ring.

It is no all-reduce: the ranks end with different values, which approach one another with every
call. Decentralized training does it once per update instead of an all-reduce.

              rank 0        rank 1        rank 2        rank 3
              a             b             c             d
    step 0    a ------->    b ------->    c ------->    d ------->     add the left neighbour's
              a+d           b+a           c+b           d+c
    step 1    <------- a+d  <------- b+a  <------- c+b  <------- d+c   add the right neighbour's
              d+2a+b        a+2b+c        b+2c+d        c+2d+a

Divided by 4 that is an average with the weights 1/4, 1/2, 1/4. The weights of a row and of a column
sum to 1, so the mean over the ranks does not change. No eigenvalue is negative, so the ranks do not
oscillate around it. After k calls the deviations from the mean have shrunk, in the 2-norm, by
cos(pi/N)^(2k) or more. With two ranks one step gives both the mean.

Cost for any number of ranks N > 2, M bytes, latency alpha, time per byte beta, time per added byte
gamma:

    2 alpha  +  2 M beta  +  2 M gamma

Source: Lian et al., Can decentralized algorithms outperform centralized algorithms?, 2017; Xiao and
Boyd, Fast linear iterations for distributed averaging, 2004, for the weights.
"""

from nnmpi.comm.collective import Step, Steps


def gossip(rank: int, size: int) -> Steps:
    """Return this rank's steps: pass the buffer right, then the sum left, adding arrivals."""
    everything = range(size)
    right, left = (rank + 1) % size, (rank - 1) % size
    to_right = Step(to=right, send=everything, from_=left, recv=everything, reduce=True)
    to_left = Step(to=left, send=everything, from_=right, recv=everything, reduce=True)
    return (to_right, to_left)[: min(size - 1, 2)]
