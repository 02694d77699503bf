"""Gated recurrent units: recurrent layers with one state."""

from collections.abc import Callable
from typing import Any, ClassVar

from nnmpi.base.errors import ShapeError, UsageError, check_int
from nnmpi.nn.activation import Dropout
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module, fan_in
from nnmpi.ops.embedding import TokenRows
from nnmpi.ops.gru import gru
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import UNPACKED, Tensor, stack

__all__ = ["GRU"]


def checked_sizes(name: str, *sizes: int) -> list[int]:
    """Return a recurrent module's input_size, hidden_size and perhaps num_layers; refuse others."""
    names = "input_size", "hidden_size", "num_layers"
    return [check_int(f"{name}'s {what}", n) for what, n in zip(names, sizes, strict=False)]


class RecurrentLayer(Module):
    """One layer's weights, with its gates side by side."""

    def __init__(self, inputs: int, features: int, gates: int) -> None:
        draw, width = fan_in(features), gates * features
        self.weight = Parameter((inputs, width), draw)
        self.recurrent = Parameter((features, width), draw)
        self.bias = Parameter((width,), draw)


class GRULayer(RecurrentLayer):
    """One layer. See `ops.gru`."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__(inputs, features, 3)
        self.bias_n = Parameter((features,), fan_in(features))

    def forward(self, x: Any, h: Any = None) -> Tensor:
        """Return h of each time: (batch, time, features)."""
        return gru(x, self.weight, self.recurrent, self.bias, self.bias_n, h)


class GRU(Module, fixed="hidden_size reads_rows"):
    """Gated recurrent units in layers: (batch, time, input_size) -> (batch, time, hidden_size).

    Cho et al., "Learning phrase representations using RNN encoder-decoder", 2014, in the form of
    cuDNN and PyTorch, in which r multiplies the product with h. Padding follows the sequences, so
    it changes no earlier result; labels of -1 exclude it from a loss.

    Args:
        input_size: the length of x's last axis.
        hidden_size: features of h.
        num_layers: the number of layers.
        dropout: the probability of dropping an element between two layers in training.

    Example:
        >>> layer = nn.GRU(4, 3, num_layers=2).initialize(seed=0)
        >>> layer(np.zeros((5, 7, 4), "float32")).shape
        (5, 7, 3)
    """

    reads_rows: ClassVar[bool] = True  # also `TokenRows`, see `container.call_run`

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, *, dropout: float = 0.0
    ) -> None:
        self._build(GRULayer, input_size, hidden_size, num_layers, dropout)

    def _build(
        self,
        layer: Callable[[int, int], Module],
        input_size: int,
        hidden_size: int,
        num_layers: int,
        dropout: float,
    ) -> None:
        sizes = input_size, hidden_size, num_layers
        input_size, hidden_size, num_layers = checked_sizes(type(self).__name__, *sizes)
        self.hidden_size, dropout = hidden_size, Dropout(dropout).p
        self.layers = [
            layer(hidden_size if number else input_size, hidden_size)
            for number in range(num_layers)
        ]
        self.drops = [Dropout(dropout) for _ in range(num_layers - 1)]

    def forward(self, x: Tensor | TokenRows, state: None = None) -> Tensor:
        """Return h of each time of the last layer.

        Raises:
            UsageError: in token-by-token generation, and for a state, which PyTorch's layers take.
        """
        if state is not None:
            raise UsageError(
                f"{type(self).__name__} reads x alone; to start it from a state, call h, last ="
                " layer.with_state(x, state); sequences of different lengths need nn.LSTM"
            )
        if current().memory is not None:
            name = type(self).__name__
            raise UsageError(f"{name} cannot generate text; call `with_state`, or use an LSTM")
        h = self.with_state(x)[0]
        h.made_by = next(kind.__name__ for kind in type(self).__mro__ if kind.__name__ in UNPACKED)
        return h

    def with_state(self, x: Tensor | TokenRows, state: Any = None) -> tuple[Tensor, Tensor]:
        """Return the result and the final state, (num_layers, batch, hidden_size).

        Args:
            x: (batch, time, input_size), of at least one time step; see `ops.gru`.
            state: the initial state, (num_layers, batch, hidden_size); None for 0.
        """
        shape = (len(self.layers), x.shape[0], self.hidden_size)
        if state is not None and tuple(state.shape) != shape:
            raise ShapeError(
                f"{type(self).__name__} that reads {x.shape} starts in a state of shape {shape},"
                f" not {state.shape}"
            )
        y: Any = x
        ends = []
        for number, layer in enumerate(self.layers):
            if number:
                y = self.drops[number - 1](y)
            y = layer(y, None if state is None else state[number])
            ends.append(y[:, -1])
        return y, stack(ends)
