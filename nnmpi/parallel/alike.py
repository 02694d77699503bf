"""Whether the ranks of a group have the same model: what they would sum, average or share is otherwise no model's."""

from itertools import zip_longest

from nnmpi.comm.group import Group
from nnmpi.errors import CommError
from nnmpi.tensor.flat import FlatStorage


def check_alike(group: Group, storage: FlatStorage) -> None:
    """Compare the names, shapes and dtypes of the parameters over all ranks; collective.

    Strategies do so before anything else: arrays are padded, so that different models may be of one length.

    Raises:
        CommError: on all ranks, naming the first parameter that differs.
    """
    if group.size == 1:
        return
    dtypes = [str(array.dtype) for array in storage.data]
    own = [f"{s.parameter.name} {s.parameter.shape} {dtypes[s.buffer]}" for s in storage.spans]
    everyones = group.gather(own)
    for rank, theirs in enumerate(everyones):
        pairs = zip_longest(everyones[0], theirs, fillvalue="nothing")
        different = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if different is not None:
            raise CommError(
                f"the ranks have different models: where rank 0 has {different[0]}, rank {rank} has {different[1]}; "
                "build the same model on every rank"
            )
