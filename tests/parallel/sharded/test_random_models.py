"""Random models with random tables: each is the serial run, to the gradient, or it is refused."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

import nnmpi
from nnmpi import nn, ops
from nnmpi.comm.group import Group
from nnmpi.errors import LayoutError
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding
from nnmpi.tensor.cut import whole
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.shape import concatenate
from nnmpi.tensor.tensor import Tensor
from tests.harness.slow import MORE_SEEDS, once_more
from tests.parallel.sharded.compare import check_equal

TIME, SIZES = 3, (4, 6, 8, 10)  # normalized rows of two would be little more than signs
Values = list[Tensor]
Step = Callable[[Any, Values], Tensor]


def elementwise(rng: Random) -> Step:
    """Return an activation, a number, or a mask."""
    return rng.choice(
        [
            lambda m, v: ops.gelu(v[-1]),
            lambda m, v: v[-1].tanh() * 0.5 + 1,
            lambda m, v: v[-1] / float(v[-1].shape[-1]) ** 0.5,
            lambda m, v: v[-1] * m.scale,
            lambda m, v: m.scale + v[-1],
            lambda m, v: nnmpi.tensor.maximum(v[-1], m.scale),
        ]
    )


def moved(rng: Random) -> Step:
    """Return an operation on the shape that leaves it as it was at the end."""
    at = rng.choice((0, 1, 2))
    return rng.choice(
        [
            lambda m, v: v[-1].transpose(2, 0, 1).transpose(1, 2, 0),
            lambda m, v: v[-1].reshape(-1, v[-1].shape[-1]).reshape(v[-1].shape),
            lambda m, v: v[-1].flatten().reshape(v[-1].shape),
            lambda m, v: (
                v[-1].reshape(len(v[-1]), TIME, 2, -1).transpose(0, 2, 1, 3).transpose(0, 2, 1, 3).reshape(v[-1].shape)
            ),
            lambda m, v: v[-1].reshape(len(v[-1]), TIME, -1, 2).reshape(v[-1].shape),
            lambda m, v: nnmpi.tensor.flip(v[-1], at),
            lambda m, v: concatenate([v[-1][:, :1], v[-1][:, 1:]], 1),
            lambda m, v: concatenate([v[-1][..., :1], v[-1][..., 1:]], -1),
        ]
    )


def mixing(rng: Random) -> Step:
    """Return an operation along one axis, or of several tensors."""
    axis = rng.choice((0, 1, 2, -1))
    return rng.choice(
        [
            lambda m, v: ops.softmax(v[-1], axis),
            lambda m, v: v[-1] - v[-1].mean(axis, keepdims=True),
            lambda m, v: v[-1] * v[-1].max(axis, keepdims=True),
            lambda m, v: ops.softmax(v[-1] @ v[-1].transpose(0, 2, 1)) @ v[-1],
            lambda m, v: v[-1] + next(x for x in v if x.shape == v[-1].shape),
            lambda m, v: v[-1] * next(x for x in v if x.shape == v[-1].shape),
            lambda m, v: whole(v[-1]) * 1.0,
            lambda m, v: (v[-1].transpose(0, 2, 1) @ v[-1]).mean((0, 2))[: v[-1].shape[-1]] + v[-1],
        ]
    )


class Machine(Module):
    """A module whose forward is a list of random steps on what the steps before gave."""

    def __init__(self, rng: Random, width: int) -> None:
        self.scale = Parameter((1,), nn.Constant(0.8))
        self.parts: list[Module] = []
        self.steps: list[Step] = []
        for _ in range(rng.randint(2, 7)):
            kind = rng.choice(("layer", "layer", "layer", "elementwise", "moved", "mixing"))
            if kind == "layer":
                width = self._add(rng, width)
            else:
                self.steps.append({"elementwise": elementwise, "moved": moved, "mixing": mixing}[kind](rng))
        self.width = width

    def _add(self, rng: Random, width: int) -> int:
        """Add a step that calls a layer, and return the width of its result."""
        to = rng.choice(SIZES)
        heads = rng.choice([h for h in (1, 2, 4, 5) if width % h == 0])
        layer, to = rng.choice(
            [
                (nn.Linear(width, to), to),
                (nn.Linear(width, to, bias=False), to),
                (nn.Linear(width, to), to),
                (nn.LayerNorm(width), width),
                (nn.BatchNorm(width), width),
                (nn.Dropout(0.3), width),
                (nn.Sequential(nn.Linear(width, 5), nn.GELU(), nn.Dropout(0.2), nn.Linear(5, to)), to),
                (nn.CausalSelfAttention(width, heads), width),
                (nn.TransformerBlock(width, heads, hidden=5), width),
            ]
        )
        self.parts.append(layer)
        number = len(self.parts) - 1
        self.steps.append(lambda m, v: m.parts[number](v[-1]))
        return to

    def forward(self, x: Tensor) -> Tensor:
        """Return the last step's result."""
        values = [x]
        for step in self.steps:
            values.append(step(self, values))
        return values[-1]


def build(seed: int) -> Module:
    """Return a random model of (batch, TIME, 4)."""
    rng = Random(seed)
    layers: list[Module] = [nn.Linear(4, width := rng.choice(SIZES))]
    for _ in range(rng.randint(1, 2)):
        machine = Machine(rng, width)
        width = machine.width
        layers += [machine, rng.choice((nn.Tanh(), nn.Dropout(0.2), nn.LayerNorm(width)))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(TIME * width, 3))


def table(seed: int) -> dict[str, Sharding]:
    """Return a random table for that model: pairs of columns and rows, or anything."""
    rng, found, turn = Random(-seed), {}, 0
    for name, module in build(seed).named_modules():
        choices: list[Sharding] = []
        if isinstance(module, nn.Linear):
            turn += 1
            choices = (
                [Sharding.COLUMN, Sharding.ROW] if rng.random() < 0.4 else [(Sharding.COLUMN, Sharding.ROW)[turn % 2]]
            )
        elif isinstance(module, nn.BatchNorm | nn.LayerNorm):
            choices = [Sharding.COLUMN, Sharding.REPLICATED]
        elif isinstance(module, nn.Dropout):
            choices = [Sharding.REPLICATED]
        if choices and rng.random() < 0.6:
            found[name] = rng.choice(choices)
    return found or {"0": Sharding.COLUMN}


def outcome(seed: int) -> bool:
    """Return whether a model is the serial one; False when it is refused. Fails for anything else."""

    def main(group: Group) -> bool:
        try:
            check_equal(group, lambda: build(seed), (TIME, 4), table=table(seed), sharded_at_least=0)
        except LayoutError:
            return False
        return True

    everyone = nnmpi.simulate(main, ranks=2 + seed % 3)
    assert len(set(everyone)) == 1
    return everyone[0]


@pytest.mark.parametrize("chunk", [once_more(chunk, chunk >= 4, MORE_SEEDS) for chunk in range(10)])
def test_equal_or_refused(chunk: int) -> None:
    """Twenty models each."""
    outcomes = [outcome(seed) for seed in range(20 * chunk, 20 * chunk + 20)]
    assert 3 <= sum(outcomes) <= 19, outcomes
