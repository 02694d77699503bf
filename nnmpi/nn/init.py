"""Initializers: how the first values of parameters are drawn. Each is called as init(generator, shape)."""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from nnmpi.backend.array import Array


@dataclass(frozen=True)
class Uniform:
    """Uniform between -bound and bound."""

    bound: float

    def __call__(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Return float64 values of that shape."""
        return generator.uniform(-self.bound, self.bound, shape)


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0 and this standard deviation."""

    std: float

    def __call__(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Return float64 values of that shape."""
        return generator.standard_normal(shape) * self.std


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def __call__(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Return float64 values of that shape."""
        return np.full(shape, self.value)


def fan_in(inputs: int) -> Uniform:
    """Return the initializer for a weight or bias whose output sums `inputs` terms: uniform within 1 / sqrt(inputs).

    LeCun et al., "Efficient BackProp", 1998; it is also what PyTorch's Linear and Conv2d do.
    """
    return Uniform(1 / sqrt(max(inputs, 1)))


def kaiming(inputs: int) -> Normal:
    """Return the initializer that keeps variances through ReLU layers (He et al., 2015): std sqrt(2 / inputs)."""
    return Normal(sqrt(2 / max(inputs, 1)))
