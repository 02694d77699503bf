"""What can be timed, by the names of the command line."""

from nnmpi.comm.algorithms.registry import AUTO, COLLECTIVES, NATIVE, SHARED

ALL_REDUCE = "all-reduce"
FUSED = "fused"  # the all-reduce and the optimizer's update in one, over shared memory
UPDATE = "native+update"  # what it is compared with: MPI's all-reduce, then the update on every rank
GLOO = "gloo"  # PyTorch's, for comparison
NO_MPI = "without MPI"  # in the place of an MPI's name, where gloo was measured alone
ALL = "all"

OPERATIONS = (ALL_REDUCE, "broadcast", "all-gather", "reduce-scatter")

# What an algorithm's speed is compared with, where it is not MPI's own call: only what does the same work.
BASELINES = {FUSED: UPDATE, UPDATE: UPDATE}


def algorithms(operation: str) -> tuple[str, ...]:
    """Return the names of all that "all" means for an operation: the baseline first."""
    made_of_steps = tuple(how for what, how in COLLECTIVES if what == operation)
    if operation != ALL_REDUCE:
        return (NATIVE, *made_of_steps)
    return (NATIVE, SHARED, *made_of_steps, AUTO, UPDATE, FUSED)


def known(operation: str) -> tuple[str, ...]:
    """Return the names that may be asked for."""
    return (*algorithms(operation), GLOO) if operation == ALL_REDUCE else algorithms(operation)
