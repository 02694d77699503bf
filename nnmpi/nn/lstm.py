"""Long short-term memory: recurrent layers with two states, h and c."""

from typing import Any, ClassVar

import numpy as np

from nnmpi.backend.recording import active, call
from nnmpi.base.errors import UsageError
from nnmpi.nn.activation import Dropout
from nnmpi.nn.gru import RecurrentLayer, checked_sizes
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module
from nnmpi.ops.embedding import TokenRows
from nnmpi.ops.lstm import lstm
from nnmpi.tensor.tensor import Tensor, concatenate, stack

__all__ = ["LSTM"]

State = tuple[Any, Any]


class LSTMDirection(RecurrentLayer):
    """One layer in one direction. See `ops.lstm`.

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
        """Return h of each time step, with `ends` followed by the final h and c. See `ops.lstm`."""
        return lstm(x, self.weight, self.recurrent, self.bias, state, lengths, self.reverse, ends)


class LSTM(Module, fixed="hidden_size directions reads_rows"):
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
        sizes = input_size, hidden_size, num_layers
        input_size, hidden_size, num_layers = checked_sizes("LSTM", *sizes)
        self.hidden_size = hidden_size
        self.directions = 2 if bidirectional else 1
        self.layers = [
            LSTMDirection(
                input_size if number == 0 else self.directions * hidden_size, hidden_size, reverse
            )
            for number in range(num_layers)
            for reverse in (False, True)[: self.directions]
        ]
        self.drops = [Dropout(dropout) for _ in range(num_layers - 1)]

    def forward(self, x: Tensor | TokenRows, lengths: Any = None) -> Tensor:
        """Return the last layer's h of each time step.

        Args:
            x: (batch, time, input_size), with padding after shorter sequences; see `ops.lstm`.
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
