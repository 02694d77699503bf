"""Convolution of device arrays by cuDNN, and by im2col for what cuDNN refuses; the interface is that of `Im2col`."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.casting import cast
from nnmpi.backend.cudnn import ALIGNMENT, Cudnn, Job, Problem
from nnmpi.backend.precision import is_low
from nnmpi.ops.columns import Frame
from nnmpi.ops.device_im2col import Im2col, finish, store


class CudnnConv:
    """One convolution's three operations.

    Args:
        cudnn: the library.
        kernels: the device's.
        frame: how the windows go over the images; its pooling counts for nothing.
        groups: that channels are cut into.
        exact: whether float32 is computed in float32 throughout, and not rounded to TF32.
        tuned: whether cuDNN's plans are timed.
    """

    __slots__ = ("_cudnn", "_exact", "_frame", "_groups", "_kernels", "_otherwise", "_tuned")

    def __init__(self, cudnn: Cudnn, kernels: Any, frame: Frame, groups: int, exact: bool, tuned: bool) -> None:
        self._cudnn, self._kernels, self._frame, self._groups = cudnn, kernels, frame, groups
        self._exact, self._tuned = exact, tuned
        self._otherwise = Im2col(kernels, frame, groups)

    def forward(self, x: Array, weight: Array, bias: Array | None, relu: bool, y: Array) -> None:
        """See `Im2col.forward`; bias and ReLU are part of cuDNN's graph where it can build that."""
        if y.size == 0:
            return
        if x.size == 0:  # no channels: sums of nothing
            self._otherwise.forward(x, weight, bias, relu, y)
            return
        job, arrays = self._job("fprop", x.shape, y.shape, x.dtype), [_aligned(x), _kernels(weight, x.dtype)]
        if bias is not None or relu:
            own = [] if bias is None else [_aligned(cast(namespace(bias), bias, x.dtype))]
            if self._cudnn.run(job._replace(bias=bias is not None, relu=relu), *arrays, *own, y):
                return
        if self._cudnn.run(job, *arrays, y):
            finish(self._kernels, y, bias, relu)
        else:
            self._otherwise.forward(x, weight, bias, relu, y)

    def input_gradient(self, grad: Array, weight: Array, out: Array) -> None:
        """See `Im2col.input_gradient`."""
        if grad.size and out.size:
            place = out if out.dtype == grad.dtype else namespace(out).empty(out.shape, grad.dtype)
            job = self._job("dgrad", out.shape, grad.shape, grad.dtype)
            if self._cudnn.run(job, _aligned(grad), _kernels(weight, grad.dtype), place):
                if place is not out:
                    namespace(out).copyto(out, place, casting="unsafe")
                return
        self._otherwise.input_gradient(grad, weight, out)

    def weight_gradient(self, x: Array, grad: Array, out: Array, add: bool) -> None:
        """See `Im2col.weight_gradient`; of half precision in float32, or else rounded once."""
        if x.size and grad.size:
            xp, job = namespace(x), self._job("wgrad", x.shape, grad.shape, x.dtype)
            for output in ("float32", job.output) if is_low(x.dtype) else (job.output,):
                place = xp.empty(job.problem.kernels, np.float32 if output == "float32" else x.dtype)
                if self._cudnn.run(job._replace(output=output), _aligned(x), _aligned(grad), place):
                    store(out, place.transpose(1, 2, 3, 0), add)
                    return
        self._otherwise.weight_gradient(x, grad, out, add)

    def _job(self, operation: str, images: tuple[int, ...], results: tuple[int, ...], dtype: np.dtype[Any]) -> Job:
        frame, name = self._frame, dtype.name
        problem = Problem(images, results, frame.kernel, frame.stride, frame.padding, frame.dilation, self._groups)
        cores = not (self._exact and name == "float32")
        return Job(operation, problem, name, name, tensor_cores=cores, tuned=self._tuned)


def _kernels(weight: Array, dtype: np.dtype[Any]) -> Array:
    """Return kernels (kh, kw, c, o) as cuDNN wants them: (o, kh, kw, c), in this dtype."""
    kh, kw, c, o = weight.shape
    kernels: Array = namespace(weight).empty((o, kh, kw, c), dtype)
    namespace(weight).copyto(kernels, weight.transpose(3, 0, 1, 2), casting="unsafe")
    return kernels


def _aligned(x: Array) -> Array:
    """Return x, or a copy if it begins where cuDNN does not want it: a part of a larger array may."""
    return x.copy() if x.data.ptr % ALIGNMENT else x  # type: ignore[attr-defined]
