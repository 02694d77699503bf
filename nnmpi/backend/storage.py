"""What an optimizer updates, and all that a strategy tells it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.base.errors import UsageError
from nnmpi.base.settled import Settled

_TOLD = frozenset(("unsummed", "spent"))


class Storage(Settled):
    """Three lists of one length: entry i is a buffer, its gradient, and the name of its group.

    Subclasses: a model's `tensor.parameter.FlatStorage`, its shards, and `optim.Arrays` of plain
    lists. An optimizer holds views of the buffers, so the arrays must stay the same objects during
    its life; their values may change.

    What a strategy and an optimizer tell each other are the attributes from `moves` on, and nothing
    else. The class has the values of a rank that trains alone.

    Attributes:
        data, grads, groups: the lists.
        known_groups: the groups that options may name: these, and those of the model's stages on
            other ranks.
        moves: how often all arrays were replaced by others of the same shapes; optimizers follow.
        distributed: whether a strategy has replicated or sharded the values over ranks.
        node_shared: whether other ranks write to `data` too (see `parallel.fused`).
        replicas: the group whose ranks have the same buffers, or a shard each, and divide the
            updates of matrices (see `optim.muon`); None if this rank does all of them.
        strategy: what sums the gradients over the replicas, whose state checkpoints keep beside the
            optimizer's (`parallel.data.Replicas`); None if this rank trains alone.
        state_store: the store of offloaded optimizer state (`memory.store`); None for state in
            memory.
        updated_by: returns the optimizer that was made for it last, or None once that is gone; None
            before.
        unsummed: whether the gradients are this rank's alone, though others have replicas, as the
            last pass was not the last of its update.
        spent: whether the last update has used the gradients.
        extra_slots: state of the strategy: arrays of the buffers' shapes, by name, which are saved
            and loaded with the optimizer's.
        shown: what stands in `data` in place of the weights, an optimizer's average of them; None
            if the weights do. See `Optimizer.averaged`, the only place that sets it.
        averaging: the optimizers that keep an average of the values.
    """

    data: list[Array]
    grads: list[Array]
    groups: list[str]
    known_groups: set[str]
    moves = 0
    distributed = node_shared = unsummed = False
    spent = True  # none has been computed yet
    updated_by: Callable[[], Any] | None = None
    replicas: Any = None
    strategy: Any = None
    state_store: Any = None
    extra_slots: Mapping[str, list[Array]] = MappingProxyType({})
    shown: Any = None
    averaging: Collection[Any] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _TOLD:  # several times in each step: the check of a name takes 2 us
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def size(self) -> int:
        """The number of elements, without gaps."""
        return sum(array.size for array in self.data)

    def check_tree(self) -> None:
        """Refuse to be trained if the model has changed since."""

    def check_weights(self, what: str) -> None:
        """Refuse what reads or changes the weights while their average is in their place.

        Args:
            what: the beginning of the sentence, such as "an update".

        Raises:
            UsageError: within `averaged()`.
        """
        if self.shown is not None:
            raise UsageError(
                f"{what} needs the weights, in whose place their average is now; leave the block"
                " `with ...averaged():` before"
            )

    def meet(self) -> None:
        """Wait for the ranks that read or write the same `data`; with `data` of one's own, no."""

    def zero_grad(self) -> None:
        """Set the gradients to 0."""
        for grad in self.grads:
            grad[...] = 0

    def finish_gradients(self) -> None:
        """Complete this step's `grads`, with zeros for missing ones; called before updates."""

    def finish_update(self) -> None:
        """Publish the new values in `data`; called after updates."""

    def frozen(self) -> Sequence[tuple[int, slice]]:
        """Return the slices of buffers that updates must not change, nor their state."""
        return ()
