"""Elman's recurrent layers, and cells: one time step of a recurrent layer."""

from functools import partial
from typing import Any, ClassVar

from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.nn.gru import GRU, GRULayer, RecurrentLayer, checked_sizes
from nnmpi.nn.lstm import LSTMDirection, State
from nnmpi.ops.rnn import rnn
from nnmpi.tensor.tensor import Tensor

__all__ = ["RNN", "GRUCell", "LSTMCell", "RNNCell"]


class RNNLayer(RecurrentLayer):
    """One layer. See `ops.rnn`."""

    def __init__(self, inputs: int, features: int, nonlinearity: str) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise UsageError(f"nonlinearity is 'tanh' or 'relu', not {nonlinearity!r}")
        super().__init__(inputs, features, 1)
        self.nonlinearity = nonlinearity

    def forward(self, x: Tensor, h: Any = None) -> Tensor:
        """Return h of each time: (batch, time, features)."""
        return rnn(x, self.weight, self.recurrent, self.bias, h, self.nonlinearity)


class RNN(GRU):
    """Elman's recurrent layers: h = tanh(x W + h R + b), or a ReLU. Used as `GRU`.

    Args:
        input_size, hidden_size, num_layers, dropout: as for `GRU`.
        nonlinearity: "tanh" or "relu".

    Example:
        >>> layer = nn.RNN(4, 3, num_layers=2).initialize(seed=0)
        >>> layer(np.zeros((5, 7, 4), "float32")).shape
        (5, 7, 3)
    """

    reads_rows: ClassVar[bool] = True  # also `TokenRows`, see `container.call_run`

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *,
        dropout: float = 0.0,
    ) -> None:
        layer = partial(RNNLayer, nonlinearity=nonlinearity)
        self._build(layer, input_size, hidden_size, num_layers, dropout)


def _one_step(x: Tensor) -> Tensor:
    if x.ndim != 2:
        raise ShapeError(f"a cell needs (batch, features), not {x.shape}; one sample is x[None]")
    return x[:, None]


class _Step:
    """A layer's first time step."""

    def forward(self, x: Tensor, h: Any = None) -> Tensor:
        """Return the next h; it begins with 0 without one."""
        result: Tensor = super().forward(_one_step(x), h)[:, 0]  # type: ignore[misc]
        return result


class RNNCell(_Step, RNNLayer):
    """One time step of an `RNN`: x (batch, input_size), h (batch, hidden_size) -> the next h."""

    def __init__(self, input_size: int, hidden_size: int, nonlinearity: str = "tanh") -> None:
        inputs, features = checked_sizes("RNNCell", input_size, hidden_size)
        super().__init__(inputs, features, nonlinearity)


class GRUCell(_Step, GRULayer):
    """One time step of a `GRU`: x (batch, input_size), h (batch, hidden_size) -> the next h."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        inputs, features = checked_sizes("GRUCell", input_size, hidden_size)
        super().__init__(inputs, features)


class LSTMCell(LSTMDirection, fixed="reverse"):
    """One time step of an `LSTM`: x (batch, input_size), (h, c) -> the next (h, c)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        inputs, features = checked_sizes("LSTMCell", input_size, hidden_size)
        super().__init__(inputs, features, reverse=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the next h and c, each (batch, hidden_size); they begin with 0 without a state."""
        if isinstance(state, Tensor):
            raise UsageError("an LSTMCell's state is a pair: h, c = cell(x, (h, c))")
        y = super().forward(_one_step(x), state, ends=True)
        return y[:, 1], y[:, 2]
