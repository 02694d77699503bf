"""What a Worker watches in a user's model: buffers of its forward, and parameters outside of it."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nnmpi.base.errors import UsageError, is_own
from nnmpi.compose.arrange import Arrangement
from nnmpi.nn.module import Buffer, Module
from nnmpi.tensor.backward import leaves_of
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import Tensor

_BUFFER_MOVES = (
    "the forward of your module changed its Buffer {!r}, by this rank's rows or more than once, so"
    " it differs from the serial run's. Give the class an attribute all_reduce = None; a strategy"
    " sets it to a function that sums a float64 array over the ranks that share a batch. Sum with"
    " it where it is set, and change nothing where nnmpi.nn.current().recomputing"
)


class ModelWatch:
    """Watches a model's passes.

    Forwards of users' modules must not change buffers where replicas have different rows, or where
    forward passes are recomputed: a buffer would then depend on this rank's rows, or be updated
    twice. A class with `all_reduce` handles both cases, except in a fixed order of sums.

    Args:
        model, arrangement: of the passes.
        looks: see below.

    Attributes:
        buffers: that must not change, with names.
        looks: whether this rank looks for parameters outside the model, in its first pass.
    """

    def __init__(self, model: Module, arrangement: Arrangement, looks: bool) -> None:
        self._model, self.looks = model, looks
        layout, self.buffers = arrangement.layout, list[tuple[str, Buffer]]()
        self._fixed_order = layout.fixed_order
        self._is_needed = arrangement.mesh.replicas.size > 1 or layout.activation_memory is not None

    def list_buffers(self) -> None:
        """List the buffers that the model has now."""
        if self._is_needed:
            self.buffers = [
                (f"{path}.{item}".strip("."), buffer)
                for path, module in self._model.named_modules()
                if not is_own(type(module))
                and (self._fixed_order or not hasattr(module, "all_reduce"))
                for item, buffer in vars(module).items()
                if isinstance(buffer, Buffer)
            ]

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Compare the buffers after the block, a pass, with those before.

        Raises:
            UsageError: when the pass has changed one.
        """
        before = [buffer.data.copy() for _, buffer in self.buffers]
        yield
        for (name, buffer), values in zip(self.buffers, before, strict=True):
            if not bool((buffer.data == values).all()):
                raise UsageError(_BUFFER_MOVES.format(name))

    def look(self, outputs: Sequence[Tensor]) -> None:
        """Warn of a parameter outside the model that gets a gradient: no optimizer updates it."""
        self.looks, known = False, {*self._model.parameters()}
        for output in outputs:
            parameters = (leaf for leaf in leaves_of(output) if isinstance(leaf, Parameter))
            stranger = next((leaf for leaf in parameters if leaf not in known), None)
            if stranger is not None:
                warnings.warn(
                    f"a parameter of shape {stranger.shape} gets a gradient, but is not in the"
                    " model, so it is not trained: a layer must be a module's attribute or an item"
                    " of a list that is one, not a variable outside; to freeze it, set its"
                    " requires_grad = False",
                    stacklevel=2,
                )
