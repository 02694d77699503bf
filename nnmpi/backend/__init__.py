"""Array libraries and devices: NumPy on the host, CuPy on a GPU, and compiled kernels.

Read in this order:

    array, backend     an array of either library; `Backend`, what the rest of nnmpi may ask of a
                       library and its device, with its streams and events
    kernels            what is compiled for operations, and when; jit/ by numba for the host, cuda/
                       for a device
    recording          a step's calls as a list that can be made again, which `nnmpi.compile` is
                       built on

Products of matrices:

    precision          what they are computed in: float32, tf32, bf16, fp16
    gemm               the product that operations ask for
    cublas             how matrices lie in memory and the fewest calls that multiply them on a
                       device
    blas               another BLAS than NumPy's own; whether NumPy's runs code for an older
                       processor

A device:

    device             CuPy's backend: its memory pool and copies. Only it imports cupy. `select`:
                       the choice by name

Beside them:

    random             streams by seed and name, and bits by row and column: the same under every
                       layout
    windows            views of images: what convolution and pooling read
    memory             how much memory is used, and keeping what is freed

To change where something happens:

    how an operation computes               its Function in ops/, and the kernels in jit/ and cuda/
    which library computes products         gemm
    what a product is computed in           precision, then what gemm and the kernels do with its
                                            dtype
    what a new kind of device can do        a class like device's, derived from `Backend`, and a
                                            name in `select`
    what a recorded step notes              recording; `perform` notes any function as one call
"""

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.backend.device import select
from nnmpi.backend.memory import keep_freed_memory
from nnmpi.backend.random import stream

__all__ = ["Array", "Backend", "keep_freed_memory", "namespace", "select", "stream"]
