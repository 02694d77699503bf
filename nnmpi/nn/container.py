"""Modules made of modules: sequences, residual blocks, parallel branches.

A sequence calls its layers one by one, but for two kinds of runs. Such a run is one call, and never
cut apart, so that results have the same bits wherever a model is cut:

    Embedding, LSTM, GRU, RNN   W multiplies the table of few tokens, instead of a row for each
    Conv2d, ReLU, MaxPool2d     each block is pooled while it is in the cache

A connection may skip modules of a sequence, and the sequence may be cut anywhere in between:

    Sequential(conv1, Stash("a"), conv2, conv3, Pop("a"), head)

        conv1 --+--> conv2 --> conv3 --> (+) --> head
                +--------------- "a" -----^

The two ends have a name, by which a pipeline sends the value from one stage to another. The idea is
torchgpipe's (Kim et al., "torchgpipe: on-the-fly pipeline parallelism for training giant models",
2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any, TypeAlias

from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.nn.activation import Dropout, ReLU
from nnmpi.nn.conv import Conv2d, MaxPool2d
from nnmpi.nn.hooks import ForwardHook, hooked
from nnmpi.nn.linear import Embedding
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module, NamedModules
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.activation import relu
from nnmpi.ops.conv.convolution import conv_relu_pool
from nnmpi.ops.embedding import TokenRows, is_small
from nnmpi.tensor.tensor import Tensor, concatenate

__all__ = ["Branches", "ModuleList", "Pop", "Residual", "Sequential", "Stash"]


def runs(layers: Sequence[Module]) -> Iterator[Sequence[Module]]:
    """Yield the runs of layers that are one call, and the other layers one by one."""
    start = 0
    while start < len(layers):
        first, *others = layers[start : start + 3]
        count, kinds = 1, [type(layer) for layer in others]
        if isinstance(first, Embedding) and is_small(first.weight):
            last = int(kinds[:1] == [Dropout])
            reads = len(kinds) > last and "reads_rows" in vars(kinds[last])
            count += (last + 1) * reads
        elif isinstance(first, Conv2d) and kinds == [ReLU, MaxPool2d]:
            over = others[1].over
            count += 2 * (over.stride == over.kernel and not any(over.padding))
        yield layers[start : start + count]
        start += count


def call_run(layers: Sequence[Module], x: Any) -> Any:
    """Return a run's result: of one operation, where that computes the same."""
    first, *others = layers
    # an observer and a hook need each layer's result
    is_hooked = ForwardHook.alive and hooked(layers) is not None
    if others and current().observe is None and not is_hooked:
        last, forward = others[-1], type(first).forward
        if isinstance(first, Conv2d) and forward is Conv2d.forward:
            return conv_relu_pool(*first.operands(x), last.over.kernel)
        drops = any(isinstance(item, Dropout) and item.p for item in others)
        if forward is Embedding.forward and not drops:
            rows = TokenRows.of(first.weight, x)
            if rows.are_many:
                return last.forward(rows)
    for layer in layers:
        x = layer(x)
    return x


class Stash(Module, read_once="name"):
    """Returns x, and stashes it for the `Pop` of the same name later in the same `Sequential`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Return x; the sequence stashes it."""
        return x


class Pop(Module, read_once="name"):
    """x + shortcut(stashed), for the `Stash` of the same name.

    Args:
        name: the stash's; each is popped once.
        shortcut: converts the stashed tensor to the shape of x, such as a 1x1 convolution; None
            adds it unchanged.
    """

    def __init__(self, name: str, shortcut: Module | None = None) -> None:
        self.name = name
        self.shortcut = shortcut

    def forward(self, x: Tensor, stashed: Tensor) -> Tensor:
        """Return the sum; both must have the same shape."""
        return x + (stashed if self.shortcut is None else self.shortcut(stashed))


class Sequential(Module):
    """Modules in a row; each input is the previous output: x -> [0] -> [1] -> ... -> y.

    Their full names are their numbers ("0.weight"). Indexing returns one, `slice(i, j)` a new
    sequence. A `Stash` among them passes its input to the `Pop` of the same name.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).initialize(seed=0)
        >>> model(np.ones((2, 4), "float32")).shape
        (2, 3)
    """

    def __init__(self, *layers: Module) -> None:
        if layers and isinstance(layers[0], list | tuple):
            raise UsageError(
                "Sequential takes the modules themselves: Sequential(*layers), not a list of them"
            )
        for layer in layers:
            if not isinstance(layer, Module):
                raise UsageError(f"Sequential takes modules, such as nn.ReLU(), not {layer!r}")
        self.layers = list(layers)

    def children(self) -> NamedModules:
        """Yield the modules with their numbers."""
        for i, layer in enumerate(self.layers):
            yield str(i), layer

    def forward(self, x: Any) -> Any:
        """Return the last module's result.

        Raises:
            UsageError: when stashes and pops do not pair up.
        """
        stashed: dict[str, Any] = {}
        for run in runs(self.layers):
            layer = run[0]
            if isinstance(layer, Stash):
                stash(stashed, layer.name, x)
            x = layer(x, fetch(stashed, layer.name)) if isinstance(layer, Pop) else call_run(run, x)
        check_empty(stashed)
        return x

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, i: int) -> Module:
        return self.layers[i]

    def slice(self, start: int, stop: int) -> Sequential:
        """Return a sequence of the same module objects, start..stop-1.

        Raises:
            UsageError: when the range exceeds the sequence.
        """
        if not 0 <= start <= stop <= len(self.layers):
            raise UsageError(
                f"slice {start}..{stop} does not lie within a sequence of {len(self.layers)}"
                " modules"
            )
        return Sequential(*self.layers[start:stop])

    def set_child(self, name: str, part: Any) -> None:
        """Replace the module with that number. See `Module.set_child`."""
        super().set_child(f"layers.{name}", part)


class Residual(Module):
    """relu(body(x) + shortcut(x)), the block of residual networks (He et al., 2016).

         x --+--> body -------+--> (+) --> relu
             +--> shortcut ---+

    Args:
        body: the residual branch.
        shortcut: converts x to the shape of the body's result, such as a 1x1 convolution; None adds
            x unchanged.
    """

    def __init__(self, body: Module, shortcut: Module | None = None) -> None:
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result; body and shortcut must have results of the same shape."""
        return self.close(self.body(x), x)

    def close(self, x: Tensor, start: Tensor) -> Tensor:
        """Return the block's result, given the body's result and the block's input."""
        return relu(x + (start if self.shortcut is None else self.shortcut(start)))


Join: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
JOINS: Mapping[str, Join] = MappingProxyType(
    {
        "concatenate": lambda results: concatenate(results, axis=-1),
        "add": lambda results: reduce(add, results),
    }
)


class Branches(Module):
    """Parallel sub-networks, such as AlexNet's two towers; `join` combines their outputs.

         x --+--> branches.0 --+                       x0 ----> branches.0 --+
             |                 +--> join --> y                               +--> join --> y
             +--> branches.1 --+                       x1 ----> branches.1 --+

    They share no parameters, so tensor parallelism distributes them: ranks compute different
    branches at the same time.

    Args:
        branches: each gets the input; if the input is a tuple or list, each gets its own item.
        join: combines the results: "concatenate" along the last axis (features, channels), "add",
            or a function of the list of results, in the order of the branches.

    Raises:
        UsageError: for fewer than two branches, or another join.
    """

    sharding = MappingProxyType({"": Sharding.BRANCHES})

    def __init__(self, *branches: Module, join: str | Join = "concatenate") -> None:
        if len(branches) < 2 or not all(isinstance(branch, Module) for branch in branches):
            raise UsageError(
                "Branches takes two modules or more, as Branches(a, b); a single one needs no"
                " Branches"
            )
        if not callable(join) and join not in JOINS:
            raise UsageError(
                f"join {join!r} is unknown; choose {' or '.join(JOINS)}, or give a function of the"
                " results"
            )
        self.branches = list(branches)
        self.join = join

    def forward(self, x: Any) -> Tensor:
        """Return the combined results of the branches."""
        return self.joined(
            [branch(item) for branch, item in zip(self.branches, self.inputs(x), strict=True)]
        )

    def inputs(self, x: Any) -> Sequence[Any]:
        """Return each branch's input.

        Raises:
            ShapeError: for a tuple or list of another length.
        """
        if not isinstance(x, tuple | list):
            return [x] * len(self.branches)
        if len(x) != len(self.branches):
            raise ShapeError(
                f"{len(self.branches)} branches got {len(x)} inputs; give one for all, or one for"
                " each"
            )
        return x

    def joined(self, results: Sequence[Tensor]) -> Tensor:
        """Combine the results of all branches by `join`."""
        return (JOINS[self.join] if isinstance(self.join, str) else self.join)(results)


def stash(stashed: dict[str, Any], name: str, x: Any) -> None:
    """Add a value to the stashed ones.

    Raises:
        UsageError: when the name is in use.
    """
    if name in stashed:
        raise UsageError(
            f"Stash({name!r}) comes twice without a Pop({name!r}) between; give them different"
            " names"
        )
    stashed[name] = x


def fetch(stashed: dict[str, Any], name: str) -> Any:
    """Remove a stashed value and return it.

    Raises:
        UsageError: when there is none of that name.
    """
    if name not in stashed:
        raise UsageError(
            f"Pop({name!r}) comes without a Stash({name!r}) before it in the same sequence"
        )
    return stashed.pop(name)


def check_empty(stashed: dict[str, Any]) -> None:
    """Refuse to end a sequence with stashed values that were never popped.

    Raises:
        UsageError: naming one.
    """
    if stashed:
        name = next(iter(stashed))
        raise UsageError(
            f"Stash({name!r}) is never popped; put a Pop({name!r}) into the same sequence, or leave"
            " it out"
        )


ModuleList = list  # PyTorch's name: a module searches its plain lists
