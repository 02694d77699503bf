"""Convolution of device arrays by cuDNN, and by im2col for what cuDNN refuses.

    forward   "fprop"   images (n, h, w, c), kernels (o, kh, kw, c / groups)  ->  (n, out_h, out_w, o), + bias, ReLU
    dx        "dgrad"   the result's gradient, kernels                        ->  (n, h, w, c)
    dW        "wgrad"   images, the result's gradient                         ->  (o, kh, kw, c / groups)

Which of cuDNN's algorithms that is, its plans decide (see `backend.cudnn`).
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.cuda.kernels import DeviceFunctions
from nnmpi.backend.cudnn import ALIGNMENT, Cudnn, Job, Problem
from nnmpi.backend.kernels.lookup import cast
from nnmpi.backend.precision import is_low
from nnmpi.ops.conv.algorithm import ConvSpec
from nnmpi.ops.conv.device_conv import DeviceAlgorithm
from nnmpi.ops.conv.device_im2col import DeviceIm2col, finish, store


class DeviceCudnn(DeviceAlgorithm):
    """One convolution's three operations, each a graph of cuDNN's.

    Args:
        spec: what is computed.
        dtype: in which inputs are read, and of the result.
        functions: the device's kernels.
        library: cuDNN.
        exact: whether float32 is computed in float32 throughout, and not rounded to TF32.
        tuned: whether cuDNN's plans are timed.
    """

    __slots__ = ("_exact", "_fallback", "_library", "_tuned")

    def __init__(
        self, spec: ConvSpec, dtype: np.dtype[Any], functions: DeviceFunctions, library: Cudnn, exact: bool, tuned: bool
    ) -> None:
        super().__init__(spec, dtype, functions)
        self._library, self._exact, self._tuned = library, exact, tuned
        self._fallback = DeviceIm2col(spec, dtype, functions)

    def convolve(self, x: Array, weight: Array, bias: Array | None, relu: bool, y: Array) -> None:
        """Write conv(x) + bias, and its positive part if there is a ReLU, to y; see `DeviceAlgorithm`.

        Bias and ReLU are part of cuDNN's graph where it can build that.
        """
        if y.size == 0:
            return
        if x.size == 0:  # no channels: sums of nothing
            self._fallback.convolve(x, weight, bias, relu, y)
            return
        job, arrays = self._job("fprop", x.shape, y.shape, x.dtype), [_aligned(x), _kernels(weight, x.dtype)]
        if bias is not None or relu:
            own = [] if bias is None else [_aligned(cast(namespace(bias), bias, x.dtype))]
            if self._library.run(job._replace(bias=bias is not None, relu=relu), *arrays, *own, y):
                return
        if self._library.run(job, *arrays, y):
            finish(self.functions, y, bias, relu)
        else:
            self._fallback.convolve(x, weight, bias, relu, y)

    def input_gradient(self, grad: Array, weight: Array, out: Array) -> None:
        """Write the images' gradient; see `DeviceAlgorithm`."""
        if grad.size and out.size:
            place = out if out.dtype == grad.dtype else namespace(out).empty(out.shape, grad.dtype)
            job = self._job("dgrad", out.shape, grad.shape, grad.dtype)
            if self._library.run(job, _aligned(grad), _kernels(weight, grad.dtype), place):
                if place is not out:
                    namespace(out).copyto(out, place, casting="unsafe")
                return
        self._fallback.input_gradient(grad, weight, out)

    def weight_gradient(self, x: Array, grad: Array, out: Array, add: bool) -> None:
        """Write the kernels' gradient, or add it; of half precision in float32 if cuDNN can, or else rounded once."""
        if x.size and grad.size:
            xp, job = namespace(x), self._job("wgrad", x.shape, grad.shape, x.dtype)
            for output in ("float32", job.output) if is_low(x.dtype) else (job.output,):
                place = xp.empty(job.problem.kernels, np.float32 if output == "float32" else x.dtype)
                if self._library.run(job._replace(output=output), _aligned(x), _aligned(grad), place):
                    store(out, place.transpose(1, 2, 3, 0), add)
                    return
        self._fallback.weight_gradient(x, grad, out, add)

    def _job(self, operation: str, images: tuple[int, ...], results: tuple[int, ...], dtype: np.dtype[Any]) -> Job:
        name = dtype.name
        problem = Problem(images, results, *self.spec[:5])
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
