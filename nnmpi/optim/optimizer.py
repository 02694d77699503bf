"""What all optimizers share: learning rate, step count, state arrays, weight decay by group, and the blocks.

The state is `steps` and the arrays of `slots()`. Whoever loads a state writes into those arrays and sets `steps`;
the next update is then, bit for bit, the one that a run without a break would have done.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from nnmpi.backend.array import Array, namespace
from nnmpi.errors import UsageError
from nnmpi.optim.blocks import Block, Scratch, block_elements, pieces
from nnmpi.optim.checks import non_negative
from nnmpi.optim.storage import Storage, check


class Optimizer(ABC):
    """Updates the buffers of a storage in place from their gradients.

    Attributes:
        lr: the learning rate of the next update; schedules set it.
        steps: the updates done so far.
        storage: the buffers; they must stay the same arrays while the optimizer lives.
        weight_decay: the decay of each buffer, in the storage's order.
    """

    def __init__(
        self, storage: Storage, lr: float, weight_decay: float | Mapping[str, float], slots: Sequence[str]
    ) -> None:
        """Allocate the state, one array of zeros per buffer and name in `slots`, and cut everything into blocks.

        Raises:
            UsageError: for a learning rate or weight decay that is negative or not finite, and for a weight decay
                that names a group the storage has not.
            ShapeError, DtypeError: see `storage.check`.
        """
        check(storage)
        self.lr = non_negative("lr", lr)
        self.steps = 0
        self.storage = storage
        self.weight_decay = _decay_by_buffer(weight_decay, storage.groups)
        self._slots = {name: [_zeros_like(data) for data in storage.data] for name in slots}
        self._data, self._grads = tuple(storage.data), tuple(storage.grads)
        self._blocks = self._cut()

    def step(self) -> None:
        """Do one update of all buffers with the learning rate `lr`; nothing is allocated.

        Parameters that need no gradient (`requires_grad = False`) stay as they are.

        Raises:
            UsageError: when `lr` was set to a negative or non-finite value, the storage holds other arrays than
                when the optimizer was made, or the model was initialized again.
        """
        lr = non_negative("lr", self.lr)
        self.storage.finish_gradients()
        self._require_same_arrays()
        self.steps += 1
        frozen = [(part, part.copy()) for part in self.storage.frozen()]
        self._update(lr)
        for part, values in frozen:  # decay and momentum move also what has no gradient
            part[...] = values

    def slots(self) -> dict[str, list[Array]]:
        """Return the live state arrays by name: one per buffer, of its shape and dtype, in the storage's order."""
        return {name: list(arrays) for name, arrays in self._slots.items()}

    @abstractmethod
    def _update(self, lr: float) -> None:
        """Update every block; `steps` already counts this update."""

    def _cut(self) -> tuple[Block, ...]:
        scratch = Scratch(self._data)
        blocks = []
        for i, (data, grad) in enumerate(zip(self._data, self._grads, strict=True)):
            state = [arrays[i] for arrays in self._slots.values()]
            for part, part_grad, *part_state in pieces([data, grad, *state], block_elements(data)):
                blocks.append(
                    Block(
                        xp=namespace(part),
                        data=part,
                        grad=part_grad,
                        slots=tuple(part_state),
                        decay=self.weight_decay[i],
                        scratch=scratch.like(part),
                    )
                )
        return tuple(blocks)

    def _require_same_arrays(self) -> None:
        """Raise if a buffer was replaced: the blocks would still update the old one, and training would stand still."""
        for kept, now in ((self._data, self.storage.data), (self._grads, self.storage.grads)):
            if len(kept) != len(now) or any(a is not b for a, b in zip(kept, now, strict=True)):
                raise UsageError("the storage's arrays were replaced; make a new optimizer after changing them")


def decayed_gradient(block: Block) -> Array:
    """Return gradient + decay * data (L2 regularisation), in the block's first scratch array if there is decay."""
    if block.decay == 0:
        return block.grad
    result = block.scratch[0]
    block.xp.multiply(block.data, block.decay, out=result)
    block.xp.add(result, block.grad, out=result)
    return result


def _zeros_like(data: Array) -> Array:
    zeros: Array = namespace(data).zeros(data.shape, data.dtype)
    return zeros


def _decay_by_buffer(weight_decay: float | Mapping[str, float], groups: Sequence[str]) -> tuple[float, ...]:
    if not isinstance(weight_decay, Mapping):
        return (non_negative("weight_decay", weight_decay),) * len(groups)
    for name, value in weight_decay.items():
        if name not in groups:
            known = ", ".join(sorted(set(groups))) or "none"
            raise UsageError(f"weight_decay names the group {name!r}, which does not exist; choose from: {known}")
        non_negative(f"weight_decay of {name!r}", value)
    return tuple(float(weight_decay.get(group, 0.0)) for group in groups)
