"""Strategies that draw arrays for the table of operations: shapes with empty and single axes,
awkward strides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from nnmpi.backend.array import namespace

Shape = tuple[int, ...]
Domain = Callable[[np.random.Generator, Shape], np.ndarray]
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class Case:
    """One application of an operation: function(*tensors), at float64 inputs where it has a
    derivative.
    """

    function: Callable[..., Any]
    inputs: list[np.ndarray]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: of the test.
        public: the function that it covers, by module and name: "tensor.exp".
        cases: a strategy of cases.
    """

    name: str
    public: str
    cases: st.SearchStrategy[Case]


Build = Callable[[Draw], Case]


def table(package, **functions):
    """Return the rows of a package's public functions.

    Args:
        functions: what draws a case of each; several by their names, for rows of their own.
    """
    return [
        Row(f"{name}-{variant}", name, st.composite(lambda draw, build=build: build(draw))())
        for name, builds in ((f"{package}.{key}", value) for key, value in functions.items())
        for variant, build in (builds if isinstance(builds, dict) else {"any": builds}).items()
    ]


# ---------------------------------------------------------------- values: where an operation has a
# derivative
def anywhere(rng, shape):
    """Return numbers between -2 and 2."""
    return rng.uniform(-2, 2, shape)


def positive(rng, shape):
    """Return numbers between 0.3 and 2."""
    return rng.uniform(0.3, 2, shape)


def nonzero(rng, shape):
    """Return numbers of both signs that stay 0.3 away from 0."""
    return rng.uniform(0.3, 2, shape) * rng.choice((-1.0, 1.0), shape)


def distinct(rng, shape):
    """Return numbers that differ by at least 0.05 from one another, so that which is the largest
    does not change.
    """
    size = int(np.prod(shape))
    return (rng.permutation(size).reshape(shape) - size // 2) * 0.05 + 0.01


def between(rng, shape):
    """Return numbers that are each 0.025 away from all of `distinct`."""
    return distinct(rng, shape) + 0.025


def probabilities(rng, shape):
    """Return numbers between 0.1 and 0.9."""
    return rng.uniform(0.1, 0.9, shape)


def beside(x, values):
    """Return an array where a tensor's elements are."""
    return namespace(x.data).asarray(values)


# ---------------------------------------------------------------- shapes and strides
def shape(draw, least=0, most=3, side=0):
    """Draw a shape of `least` to `most` axes, each of `side` to 3 elements."""
    return tuple(draw(st.lists(st.integers(side, 3), min_size=least, max_size=most)))


def broadcasting(draw, count):
    """Draw shapes that broadcast: axes of one shape left out in front, or of length 1."""
    full = shape(draw)
    shapes = []
    for _ in range(count):
        start = draw(st.integers(0, len(full)))
        shapes.append(tuple(1 if draw(st.integers(0, 3)) == 0 else n for n in full[start:]))
    return shapes


def axes_of(draw, ndim):
    """Draw what reductions take as axis: all, one, or several, counted from either end."""
    if ndim == 0 or draw(st.booleans()):
        return None
    chosen = draw(st.lists(st.integers(0, ndim - 1), min_size=1, unique=True))
    signed = tuple(i - ndim if draw(st.booleans()) else i for i in chosen)
    return signed[0] if len(signed) == 1 else signed


def array(draw, domain, size):
    """Draw an array of a shape whose values come from a domain and lie in memory in some awkward
    way.
    """
    return awkward(draw, domain(np.random.default_rng(draw(st.integers(0, 2**16))), size))


def arrays(draw, domain, sizes):
    """Draw several arrays. See `array`."""
    return [array(draw, domain, size) for size in sizes]


def awkward(draw, values):
    """Return the values in other memory: axes in any order, run through backwards or with gaps, NaN
    in the gaps.
    """
    order = draw(st.permutations(range(values.ndim)))
    steps = [draw(st.sampled_from((1, 1, 2, -1, -2))) for _ in order]
    memory = np.full(
        [values.shape[i] * abs(step) for i, step in zip(order, steps, strict=True)], np.nan
    )
    view = memory[(..., *(slice(None, None, step) for step in steps))].transpose(
        np.argsort(order).astype(int)
    )
    view[...] = values
    return view
