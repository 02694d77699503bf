"""Recurrent layers: LSTM, with two states, h and c; GRU and Elman's, with h alone; and cells, one
time step of a layer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from nnmpi.backend.recording import active, call
from nnmpi.base.errors import ShapeError, UsageError, check_int
from nnmpi.nn.activation import Dropout
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module, fan_in
from nnmpi.ops.embedding import TokenRows
from nnmpi.ops.recurrent import gru, lstm, rnn
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import UNPACKED, Tensor, concatenate, stack

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]

State = tuple[Any, Any]


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
    """One layer. See `ops.recurrent`."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__(inputs, features, 3)
        self.bias_n = Parameter((features,), fan_in(features))

    def forward(self, x: Any, h: Any = None) -> Tensor:
        """Return h of each time: (batch, time, features)."""
        return gru(x, self.weight, self.recurrent, self.bias, self.bias_n, h)


class _Stacked(Module):
    def _build(
        self,
        ways: Sequence[Callable[[int, int], Module]],
        input_size: int,
        hidden_size: int,
        num_layers: int,
        dropout: float,
    ) -> None:
        """Make the layers, each of these ways beside one another, and what drops between them."""
        sizes = input_size, hidden_size, num_layers
        input_size, hidden_size, num_layers = checked_sizes(type(self).__name__, *sizes)
        self.hidden_size, dropout = hidden_size, Dropout(dropout).p
        self.layers = [
            way(len(ways) * hidden_size if number else input_size, hidden_size)
            for number in range(num_layers)
            for way in ways
        ]
        self.drops = [Dropout(dropout) for _ in range(num_layers - 1)]


class GRU(_Stacked, read_once="hidden_size reads_rows"):
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
        self._build([GRULayer], input_size, hidden_size, num_layers, dropout)

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
            x: (batch, time, input_size), of at least one time step; see `ops.recurrent`.
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


class RNNLayer(RecurrentLayer):
    """One layer. See `ops.recurrent`."""

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
        self._build([layer], input_size, hidden_size, num_layers, dropout)


class LSTMDirection(RecurrentLayer):
    """One layer in one direction. See `ops.recurrent`.

    Args:
        inputs, features: lengths of x and of h.
        reverse: whether it processes each sequence from its end.
    """

    def __init__(self, inputs: int, features: int, reverse: bool) -> None:
        super().__init__(inputs, features, 4)
        self.reverse = reverse

    def forward(
        self,
        x: Tensor | TokenRows,
        state: State | None = None,
        lengths: Any = None,
        ends: bool = False,
    ) -> Tensor:
        """Return h of each time step, with `ends` followed by the final h and c."""
        return lstm(x, self.weight, self.recurrent, self.bias, state, lengths, self.reverse, ends)


class LSTM(_Stacked, read_once="hidden_size directions reads_rows"):
    """LSTM layers: (batch, time, input_size) -> (batch, time, hidden_size).

    Hochreiter and Schmidhuber, "Long short-term memory", 1997. The gates are side by side in the
    order i, f, o, g, and share one bias. PyTorch adds two, so there SGD moves their sum at twice
    the rate, and a bias learns differently.

    Args:
        input_size: the length of x's last axis.
        hidden_size: features of h and c.
        num_layers: the number of layers.
        bidirectional: whether each layer processes the sequences in both directions (Schuster and
            Paliwal, 1997), with weights for each. The result has both h side by side, 2 *
            hidden_size.
        dropout: the probability of dropping an element between two layers in training.

    Example:
        >>> layer = nn.LSTM(8, 16, num_layers=2).initialize(seed=0)
        >>> x = np.zeros((3, 10, 8), "float32")
        >>> layer(x, lengths=np.array([10, 7, 4])).shape  # h is 0 from each length on
        (3, 10, 16)
    """

    reads_rows: ClassVar[bool] = True  # also `TokenRows`, see `container.call_run`

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bidirectional: bool = False,
        dropout: float = 0.0,
    ) -> None:
        self.directions = 2 if bidirectional else 1
        turns = (False, True)[: self.directions]
        ways = [partial(LSTMDirection, reverse=turn) for turn in turns]
        self._build(ways, input_size, hidden_size, num_layers, dropout)

    def forward(self, x: Tensor | TokenRows, lengths: Any = None) -> Tensor:
        """Return the last layer's h of each time step.

        Args:
            x: (batch, time, input_size), with padding after shorter sequences; see `ops.recurrent`.
            lengths: (batch,), integers, of the sequences; None without padding. h is 0 in the
                padding.
        """
        if isinstance(lengths, tuple):
            raise UsageError(
                "to start an LSTM from a state, call h, state = lstm.with_state(x, state)"
            )
        memory = current().memory
        if memory is None:
            h = self._run(x, None, lengths, ends=False)[0]
            h.made_by = "LSTM"
            return h
        before = memory.get(self.path)
        y, ends = self.with_state(x, before, lengths)
        if before is None or active() is None:
            memory[self.path] = ends
        else:  # replays read the state from the recorded arrays: write it back into them
            for state, end in zip(before, ends, strict=True):
                call(np.copyto, (), (state._data, end._data))
        return y

    def with_state(
        self, x: Tensor | TokenRows, state: State | None = None, lengths: Any = None
    ) -> tuple[Tensor, State]:
        """Return the result and the final state.

        Args:
            x, lengths: as for `forward`.
            state: the initial h and c, each (num_layers * directions, batch, hidden_size); None
                for 0.
        """
        if state is not None and not (isinstance(state, tuple | list) and len(state) == 2):
            raise UsageError("an LSTM's state is a pair: lstm.with_state(x, (h, c), lengths)")
        y, ends = self._run(x, state, lengths, ends=True)
        return y, (stack([end[:, 0] for end in ends]), stack([end[:, 1] for end in ends]))

    def _run(
        self, x: Tensor | TokenRows, state: State | None, lengths: Any, ends: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the last layer's h, and if requested the final states.

        These are (batch, 2, features), h and c, one per layer and direction.
        """
        y: Any = x
        time, finals = x.shape[1], list[Tensor]()
        for number, layer in enumerate(range(0, len(self.layers), self.directions)):
            results = []
            if number:
                y = self.drops[number - 1](y)
            for i in range(layer, layer + self.directions):
                local = None if state is None else (state[0][i], state[1][i])
                h = self.layers[i](y, local, lengths, ends)
                results.append(h[:, :time] if ends else h)
                finals += [h[:, time:]] if ends else []
            y = results[0] if self.directions == 1 else concatenate(results, 2)
        return y, finals


def _one_step(x: Tensor) -> Tensor:
    if x.ndim != 2:
        raise ShapeError(f"a cell needs (batch, features), not {x.shape}; one sample is x[None]")
    return x[:, None]


class _Step:
    """A layer's first time step."""

    def forward(self, x: Tensor, h: Any = None) -> Tensor:
        """Return the next h; it begins with 0 without one."""
        return super().forward(_one_step(x), h)[:, 0]  # type: ignore[misc]


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


class LSTMCell(LSTMDirection, read_once="reverse"):
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
