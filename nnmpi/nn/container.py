"""Modules made of modules: one after another, around a shortcut, and side by side.

Runs of layers in a sequence are computed as one operation. The layers stay what they are, with
their names and parameters; only the calls are fewer, and `nn.unfused()` runs them one by one:

    Linear, ReLU                  one GEMM and two passes in place          bit for bit the same as one by one
    Linear, GELU                  the same, in blocks that stay in cache    bit for bit the same
    Conv2d, ReLU                  the same                                  within rounding
    Conv2d, ReLU, MaxPool2d       bias and ReLU on what pooling left        within rounding

A connection may skip some modules of a sequence, wherever the sequence is cut:

    Sequential(conv1, Stash("a"), conv2, conv3, Pop("a"), head)

        conv1 --+--> conv2 --> conv3 --> (+) --> head
                +--------------- "a" -----^

Giving the two ends a name, so that a pipeline can carry the value from one stage to another, is
torchgpipe's idea (Kim et al., "torchgpipe: on-the-fly pipeline parallelism for training giant
models", 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import add
from types import MappingProxyType
from typing import Any, TypeAlias

from nnmpi.backend.windows import Pair
from nnmpi.errors import ShapeError, UsageError
from nnmpi.nn.activation import GELU, ReLU
from nnmpi.nn.conv import Conv2d, MaxPool2d
from nnmpi.nn.linear import Linear
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.activation import linear_gelu, relu
from nnmpi.ops.conv.conv2d import conv_relu, conv_relu_pool
from nnmpi.ops.linear import linear_relu
from nnmpi.tensor.tensor import Tensor, concatenate


def _conv(conv: Conv2d, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Pair, Pair, Pair, int]:
    return (
        conv.enter(x),
        conv.weight,
        conv.bias,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
    )


# Kinds of layers that are computed as one operation, and how.
JOINT: Mapping[tuple[type[Module], ...], Callable[..., Tensor]] = MappingProxyType(
    {
        (Linear, ReLU): lambda linear, _, x: linear_relu(
            linear.enter(x), linear.weight, linear.bias
        ),
        (Linear, GELU): lambda linear, gelu, x: linear_gelu(
            linear.enter(x), linear.weight, linear.bias, gelu.approximate
        ),
        (Conv2d, ReLU, MaxPool2d): lambda conv, _, pool, x: conv_relu_pool(
            *_conv(conv, x), pool.over.kernel
        ),
        (Conv2d, ReLU): lambda conv, _, x: conv_relu(*_conv(conv, x)),
    }
)


def fuse(layers: Sequence[Module]) -> list[Callable[..., Any]]:
    """Return the calls that compute layers in order, some of them fused into one call.

    Only layers that compute as these classes do are put together: a subclass may have a forward of
    its own.
    """
    calls: list[Callable[..., Any]] = []
    rest = list(layers)
    while rest:
        kinds = next((item for item in JOINT if _fit(rest, item)), ())
        count = len(kinds) or 1
        calls.append(partial(JOINT[kinds], *rest[:count]) if kinds else rest[0])
        del rest[:count]
    return calls


def _fit(layers: Sequence[Module], kinds: tuple[type[Module], ...]) -> bool:
    """Return whether layers begin with these kinds, the first one's forward being its class's, and
    pool simply.
    """
    first, *others = layers[: len(kinds)]
    pools = [other.over for other in others if isinstance(other, MaxPool2d)]
    return (
        isinstance(first, kinds[0])
        and type(first).forward is kinds[0].forward
        and [type(other) for other in others] == list(kinds[1:])
        and all(over.stride == over.kernel and not any(over.padding) for over in pools)
    )


class Stash(Module):
    """Passes x on, and keeps it for the `Pop` of the same name later in the same `Sequential`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Return x; the sequence keeps it."""
        return x


class Pop(Module):
    """x + shortcut(what was kept), for the `Stash` of the same name.

    Args:
        name: the stash's; each is popped once.
        shortcut: makes the kept tensor fit, such as a 1x1 convolution; None takes it as it is.
    """

    def __init__(self, name: str, shortcut: Module | None = None) -> None:
        self.name = name
        self.shortcut = shortcut

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """Return the sum; both must have the same shape."""
        return x + (kept if self.shortcut is None else self.shortcut(kept))


class Sequential(Module):
    """Modules in a row, each fed the output of the one before: x -> [0] -> [1] -> ... -> y.

    Their full names are their numbers ("0.weight"). Indexing gives one, `slice(i, j)` a new
    sequence of some. A `Stash` among them keeps what comes to it for the `Pop` of the same name.

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
        self._fused: tuple[list[Module], list[Callable[..., Any]]] | None = None

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules with their numbers."""
        for i, layer in enumerate(self.layers):
            yield str(i), layer

    def forward(self, x: Any) -> Any:
        """Return the last module's result.

        Raises:
            UsageError: when stashes and pops do not pair up.
        """
        saved: dict[str, Any] = {}
        for layer in self.steps():
            if isinstance(layer, Stash):
                keep(saved, layer.name, x)
            x = layer(x, fetch(saved, layer.name)) if isinstance(layer, Pop) else layer(x)
        if saved:
            check_empty(saved)
        return x

    def steps(self) -> Sequence[Callable[..., Any]]:
        """Return the calls of `forward`: modules, or fused runs of them (see `fuse`).

        When somebody wants to see every module's result, or `nn.unfused()` says so, they are the
        modules.
        """
        if not current().joins:
            return self.layers
        if self._fused is None or self._fused[0] != self.layers:
            self._fused = list(self.layers), fuse(self.layers)
        return self._fused[1]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, i: int) -> Module:
        return self.layers[i]

    def slice(self, start: int, stop: int) -> Sequential:
        """Return a sequence of the modules start..stop-1, which stay the same objects.

        Raises:
            UsageError: when the range does not lie within the sequence.
        """
        if not 0 <= start <= stop <= len(self.layers):
            raise UsageError(
                f"slice {start}..{stop} does not lie within a sequence of {len(self.layers)}"
                " modules"
            )
        return Sequential(*self.layers[start:stop])

    def set_child(self, name: str, part: Any) -> None:
        """Put a module in place of the one with that number. See `Module.set_child`."""
        super().set_child(f"layers.{name}", part)


class Residual(Module):
    """relu(body(x) + shortcut(x)), the block of residual networks (He et al., 2016).

         x --+--> body -------+--> (+) --> relu
             +--> shortcut ---+

    Args:
        body: what is learned.
        shortcut: makes x fit the body's result, such as a 1x1 convolution; None passes x as it is.
    """

    def __init__(self, body: Module, shortcut: Module | None = None) -> None:
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result; body and shortcut must give the same shape."""
        return self.close(self.body(x), x)

    def close(self, x: Tensor, start: Tensor) -> Tensor:
        """Return the block's result, given the body's and what the block began with."""
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

    They share no parameters, so ranks that share layers (tp) have some branches each, and compute
    at the same time.

    Args:
        branches: each gets the input; of a tuple or list one of as many, so that they share no
            input either.
        join: makes one result of all: "concatenate" along the last axis (features, channels),
            "add", or a function of the list of results, in the order of the branches.

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
        """Return what `join` makes of the branches' results."""
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
        """Return what `join` makes of all branches' results."""
        return (JOINS[self.join] if isinstance(self.join, str) else self.join)(results)


def keep(kept: dict[str, Any], name: str, x: Any) -> None:
    """Keep a stashed value.

    Args:
        kept: the values that wait, by name; it gets one more.
        name: the stash's.
        x: the value.

    Raises:
        UsageError: when one of that name waits already.
    """
    if name in kept:
        raise UsageError(
            f"Stash({name!r}) comes twice without a Pop({name!r}) between; give them names of"
            " their own"
        )
    kept[name] = x


def fetch(kept: dict[str, Any], name: str) -> Any:
    """Return a stashed value, which is then kept no longer.

    Raises:
        UsageError: when there is none of that name.
    """
    if name not in kept:
        raise UsageError(
            f"Pop({name!r}) comes without a Stash({name!r}) before it in the same sequence"
        )
    return kept.pop(name)


def check_empty(kept: dict[str, Any]) -> None:
    """Refuse to end a sequence with values that nobody fetched.

    Raises:
        UsageError: naming one.
    """
    if kept:
        name = next(iter(kept))
        raise UsageError(
            f"Stash({name!r}) is never popped; put a Pop({name!r}) into the same sequence, or leave"
            " it out"
        )
