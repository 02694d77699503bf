"""Normalization layers: over the batch, over groups of channels, over the features."""

from collections.abc import Callable
from math import prod

import numpy as np

from nnmpi.backend.array import Array, Shape, namespace
from nnmpi.backend.kernels import kernels_of
from nnmpi.base.errors import ShapeError, UsageError, check_int, check_ints, number
from nnmpi.nn.mode import current, warn_later
from nnmpi.nn.module import Buffer, Constant, Module
from nnmpi.nn.sharding import Reach
from nnmpi.ops.norm import (
    AllReduce,
    Count,
    batch_norm,
    fixed_norm,
    group_norm,
    layer_norm,
    rms_norm,
)
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import Tensor

__all__ = [
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "RMSNorm",
]


class BatchNorm(Module):
    """Batch normalization of the last axis: by batch in training, else by running statistics.

    Ioffe and Szegedy, "Batch normalization", 2015. One class serves (batch, features) and images
    alike. Under data parallelism the statistics are those of the global batch, over all ranks:
    `DataParallel` sets `all_reduce`. With microbatches (gradient accumulation, pipelines) they are
    those of each microbatch, over all ranks, and the running statistics are updated once per
    microbatch. A recomputed forward does not update them.

    Args:
        num_features: the length of the last axis.
        eps: added to the variance.
        momentum: the weight of a batch in the running statistics (their variance has the divisor
            n - 1).
    """

    reach = Reach.CHANNEL

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        num_features = check_int("BatchNorm's num_features", num_features)
        self.momentum = number("BatchNorm's momentum", momentum, most=1)
        self.eps = _positive(eps)
        self.weight = Parameter((num_features,), Constant(1.0))
        self.bias = Parameter((num_features,))
        self.running_mean = Buffer((num_features,), 0.0)
        self.running_variance = Buffer((num_features,), 1.0)
        self.all_reduce: AllReduce | None = None
        self.observe: Callable[[Array, Array], None] | None = None

    def input_features(self) -> int:
        """See `Module.input_features`."""
        return int(self.weight.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized, of the same shape.

        Raises:
            ShapeError: when the last axis of x is not `num_features` long.
        """
        return self.normalize(x, self.weight, self.bias, self.all_reduce)

    def normalize(
        self, x: Tensor, weight: Tensor, bias: Tensor, all_reduce: AllReduce | None
    ) -> Tensor:
        """Normalize x with this weight and bias instead of the layer's own.

        Args:
            x: (..., num_features).
            weight, bias: (num_features,); a rank of a sharded layer passes its shards of them and
                of x.
            all_reduce: sums a float64 array over the ranks that share the batch, so that the
                statistics are those of the global batch; None on one rank.

        Same errors as `forward`.
        """
        if x.shape[-1:] != weight.shape:
            raise ShapeError(
                f"batch normalization of {weight.size} channels does not fit shape {x.shape}"
            )
        if not current().training:
            running = self.running_mean._data, self.running_variance._data
            result = fixed_norm(x, weight, bias, *running, self.eps)
            warn_later(result)
            return result
        return batch_norm(x, weight, bias, self.eps, all_reduce, self._observe)[0]

    def _observe(self, mean: Array, variance: Array, count: Count) -> None:
        """Update the running statistics; skip an empty batch and a recomputed pass."""
        if current().recomputing:
            return
        if isinstance(count, int | float):
            if count == 1:
                raise ShapeError(
                    "batch normalization has one value per channel, so its output would always be"
                    " 0; give a batch size that leaves no last batch of one sample, or use"
                    " LayerNorm"
                )
            if not count:
                return
            factor = count / max(count - 1, 1)
            if self.observe is None:
                self.update_running(mean, variance, factor)
                return
            unbiased = variance * factor
        else:
            # a count on the device, which the host does not wait for: so an empty batch is
            # replaced by the running statistics, which then stay unchanged
            some = count > 0
            factor = count / np.maximum(count - 1, 1)
            mean = np.where(some, mean, self.running_mean._data)
            unbiased = np.where(
                some, variance * factor.astype(variance.dtype), self.running_variance._data
            )
        (self.observe or self.update_running)(mean, unbiased)

    def update_running(self, mean: Array, variance: Array, factor: float = 1.0) -> None:
        """Move the running statistics towards a batch's.

        The variance times the factor has the divisor n - 1.

        A strategy that needs another order of updates sets `observe`, which is called instead.
        """
        running = self.running_mean._data, self.running_variance._data
        kernels_of(mean).track(running, (mean, variance), self.momentum, factor)


class LayerNorm(Module):
    """Normalizes each row over its last axes (Ba, Kiros and Hinton, 2016).

    Args:
        normalized_shape: the length of the last axis, or the lengths of the last axes.
        eps: added to the variance.

    Example:
        >>> layer = nn.LayerNorm(4).initialize(seed=0)
        >>> layer(np.float32([[1, 2, 3, 4]])).numpy().round(2).tolist()
        [[-1.34..., -0.44..., 0.44..., 1.34...]]
    """

    reach = Reach.ALL

    def __init__(self, normalized_shape: int | Shape, eps: float = 1e-5) -> None:
        lengths = (
            normalized_shape if isinstance(normalized_shape, tuple | list) else (normalized_shape,)
        )
        shape = check_ints("LayerNorm's normalized_shape", lengths)
        if not shape:
            raise UsageError("LayerNorm's normalized_shape is empty; give lengths")
        self.eps = _positive(eps)
        self.weight = Parameter(shape, Constant(1.0))
        self.bias = Parameter(shape, Constant(0.0))

    def input_features(self) -> int:
        """See `Module.input_features`."""
        return int(self.weight.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized, of the same shape."""
        return layer_norm(x, self.weight, self.bias, self.eps)


def has_batch_norm(model: Module) -> bool:
    """Return whether a layer takes statistics of the batch."""
    return any(isinstance(module, BatchNorm) for _, module in model.named_modules())


def _positive(eps: float) -> float:
    if not number("eps", eps):
        raise UsageError(f"eps is {eps}; give a number above 0")
    return eps


class RMSNorm(Module):
    """Root-mean-square normalization (Zhang and Sennrich, 2019) of rows (..., features).

    Args:
        normalized_shape: the length of the last axis.
        eps: added to the mean square.
    """

    def __init__(self, normalized_shape: int, eps: float = 1e-6) -> None:
        self.eps = _positive(eps)
        self.weight = Parameter(
            (check_int("RMSNorm's normalized_shape", normalized_shape),), Constant(1.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized, of the same shape."""
        if x.ndim < 2 or x.shape[-1:] != self.weight.shape:
            raise ShapeError(f"RMSNorm of {self.weight.size} features does not fit shape {x.shape}")
        return rms_norm(x, self.weight, self.eps)


class GroupNorm(Module):
    """Group normalization (Wu and He, 2018): (batch, ..., num_channels), keeps the shape.

    Args:
        num_groups: the number of groups; it divides the channels.
        num_channels: the length of the last axis.
        eps: added to the variance.
    """

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5) -> None:
        self.num_groups = check_int("GroupNorm's num_groups", num_groups)
        channels = check_int("num_channels", num_channels)
        if channels % self.num_groups:
            raise UsageError(
                f"{num_groups} groups do not divide {num_channels} channels; give a divisor"
            )
        self.eps = _positive(eps)
        self.weight = Parameter((channels,), Constant(1.0))
        self.bias = Parameter((channels,))

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized, of the same shape."""
        return group_norm(x, self.weight, self.bias, self.num_groups, self.eps)


class InstanceNorm(Module, read_once="num_features"):
    """Normalizes each channel of each image (Ulyanov et al., 2016): (batch, ..., num_features).

    One class for sequences, images and volumes. Statistics are each sample's own, in evaluation,
    too.

    Args:
        num_features: the number of channels, the length of the last axis.
        eps: added to the variance.
        affine: whether each channel has a scale and a shift that are trained.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, *, affine: bool = False) -> None:
        self.num_features = check_int("InstanceNorm's num_features", num_features)
        self.eps = _positive(eps)
        self.weight = Parameter((num_features,), Constant(1.0)) if affine else None
        self.bias = Parameter((num_features,)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized, of the same shape.

        Raises:
            ShapeError: when each channel of a sample has one value, whose result would be 0.
        """
        if x.ndim < 3 or prod(x.shape[1:-1]) == 1 or x.shape[-1] != self.num_features:
            raise ShapeError(
                f"InstanceNorm of {self.num_features} channels needs (batch, ..., channels) with"
                f" several values of each channel, not {x.shape}"
            )
        if self.weight is not None and self.bias is not None:
            return group_norm(x, self.weight, self.bias, self.num_features, self.eps)
        xp = namespace(x._data)
        scale, shift = (
            Tensor(make(self.num_features, dtype=x.dtype)) for make in (xp.ones, xp.zeros)
        )
        return group_norm(x, scale, shift, self.num_features, self.eps)


# PyTorch's names: here one class normalizes all shapes.
BatchNorm1d = BatchNorm2d = BatchNorm3d = BatchNorm
InstanceNorm1d = InstanceNorm2d = InstanceNorm3d = InstanceNorm
