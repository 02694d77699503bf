"""Array libraries and devices: NumPy on the host, CuPy on a GPU, and compiled kernels.

Reading order:

    array, backend     arrays of either library; `Backend`, the interface to a library and its
                       device
    kernels            the choice of kernels: plain, in the library's functions; onednn_kernels and,
                       in jit/, numba's for the host; in cuda/ a device's
    program/           a step as a value, the basis of `nnmpi.compile`: record its calls, plan
                       their memory, replay them
    recording          what operations, layers and strategies tell a recorder
    trace, printed     a row formula's arithmetic as numbered lines, and the kernels printed of it,
                       numba's and a device's

Matrix products:

    precision          their modes: float32, tf32, bf16, fp16
    gemm               the product that operations call
    cublas             memory layouts of matrices, and products on a device with few calls
    onednn             products, convolutions of bfloat16 and activations on the host
    blas               NumPy's BLAS, its threads; a check for code of an older processor

Devices:

    device             CuPy's backend with its memory pool, and `select`, the choice by name. Only
                       this module imports cupy
    upload             copies to a device: of an array that stays, of batches ahead of their step

Others:

    random             random streams by seed and name, random bits by row and column: equal in
                       every layout
    sums               sums over many rows that stay accurate, and blocks that fit the cache
    windows, planes    views of images for convolution and pooling; pooling on planes of them
    attend             attention of many heads, on views of the heads
    rotary, normal     rotary positions; the normal distribution's tail, for GELU
    memory             memory use, and reuse of freed memory
    storage            what an optimizer updates, and what strategies tell it

To change ...                              see
    the arithmetic of an operation         plain, and what overrides it in jit/ and cuda/
    an activation                          activations
    the library that computes products     gemm
    the dtype that a product reads         precision, then its uses in gemm and the kernels
    the kinds of devices                   a subclass of `Backend`, as in device, and `select`
    the calls that a recording has         program/record; `recording.call` records one
"""

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.backend.device import select
from nnmpi.backend.memory import keep_freed_memory
from nnmpi.backend.random import stream

__all__ = ["Array", "Backend", "keep_freed_memory", "namespace", "select", "stream"]

# Whoever imports this is about to compute. An optimizer did it once: without one, as in a loop that
# predicts, softmax of a million elements took four times as long.
keep_freed_memory()
