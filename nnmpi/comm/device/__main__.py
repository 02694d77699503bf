"""`python -m nnmpi.comm.device`: give MPI device memory, in a process that may die of it (see `cuda_aware`).

It prints "right" when a message that this process sent to itself, from device memory to device memory, has arrived.
"""

import sys

import numpy as np

from nnmpi.backend.device import cupy_backend
from nnmpi.comm.start import start

BYTES = 2**20


def main() -> int:
    """Send and compare; return the process's status."""
    comm = start().comm
    xp = cupy_backend(0).xp
    source = xp.asarray(np.arange(BYTES, dtype=np.uint32).astype(np.uint8))
    target = xp.zeros(BYTES, dtype=np.uint8)
    xp.cuda.get_current_stream().synchronize()
    comm.wait_all([comm.irecv(target, 0, 0), comm.isend(source, 0, 0)])
    is_right = bool((source == target).all().get())
    print("right" if is_right else "wrong")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
