"""What can be timed, by the names of the command line."""

from nnmpi.comm.algorithms.registry import AUTO, COLLECTIVES, IPC, NATIVE, NCCL, SHARED

ALL_REDUCE = "all-reduce"
FUSED = "fused"  # the all-reduce and the optimizer's update in one, over shared memory
UPDATE = "native+update"  # what it is compared with: MPI's all-reduce, then the update on every rank
GLOO = "gloo"  # PyTorch's, for comparison
NO_MPI = "without MPI"  # in the place of an MPI's name, where gloo was measured alone
ALL = "all"

OPERATIONS = (ALL_REDUCE, "broadcast", "all-gather", "reduce-scatter")

# What an algorithm's speed is compared with, where it is not MPI's own call: only what does the same work.
BASELINES = {FUSED: UPDATE, UPDATE: UPDATE}


def algorithms(operation: str, on_device: bool = False) -> tuple[str, ...]:
    """Return the names of all that "all" means for an operation, on host or device arrays: the baseline first."""
    made_of_steps = tuple(how for what, how in COLLECTIVES if what == operation)
    if operation != ALL_REDUCE:
        return (NATIVE, *made_of_steps, *([NCCL] if on_device else []))
    return (NATIVE, SHARED, *made_of_steps, AUTO, *([IPC, NCCL] if on_device else [UPDATE, FUSED]))


def known(operation: str, on_device: bool = False) -> tuple[str, ...]:
    """Return the names that may be asked for."""
    names = algorithms(operation, on_device)
    return (*names, GLOO) if operation == ALL_REDUCE else names
