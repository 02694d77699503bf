"""All-reduce through a parameter server: rank 0 collects everybody's buffer, adds, and sends the sum back.

The server serves one worker after another, in rank order, so that the sum does not depend on who comes first:

    step        0    1    2    3    4    5
    worker 1    o----.              .--->o
    worker 2         o----.              .--->o          (each waits for its turn)
    worker 3    |    |    o----.    |    |    .--->o
    rank 0      +<1  +<2  +<3       1>   2>   3>
                collect and add     send the sum

Cost with N ranks, M bytes, latency alpha, time per byte beta, time per added byte gamma:

    2 (N-1) alpha  +  2 (N-1) M beta  +  (N-1) M gamma

The server's link carries everything, so the time grows with N: the yardstick that the others are measured by.
(Textbooks often give it a latency of 2 alpha, which needs a server that receives from all workers at once.)
Source: Li et al., Scaling distributed machine learning with the parameter server, 2014, with one server.
"""

from nnmpi.comm.steps import Step

SERVER = 0


def star(rank: int, size: int) -> tuple[Step, ...]:
    """Return this rank's steps: 2(size-1) at the server, one send and one receive at a worker."""
    everything = range(size)
    if rank == SERVER:
        workers = tuple(worker for worker in range(size) if worker != SERVER)
        collect = tuple(Step(from_=worker, recv=everything, reduce=True) for worker in workers)
        return collect + tuple(Step(to=worker, send=everything) for worker in workers)
    return Step(to=SERVER, send=everything), Step(from_=SERVER, recv=everything)


def star_seconds(N: int, M: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Return what the all-reduce costs: the server's link carries everybody's buffer, in and out."""
    return (N - 1) * (2 * alpha + 2 * M * beta + M * gamma)
