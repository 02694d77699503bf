"""Kernels in CUDA C++ for devices, compiled at their first use.

    kernels        `DeviceKernels`, the kernels as methods for operations (see `backend.kernels`)
    launch         compilation for dtypes, checks, grid sizes
    cudnn          convolution and attention by cuDNN
    graph          a recorded step as CUDA graphs
    rows           kernels that are printed of row formulas
    *.cu           the sources of those written by hand; `common.cuh` is prepended to each

The sources include no headers, so CUDA's run-time compiler needs no include path. Each kernel
accepts arrays of any size. Results are deterministic: the order of a sum depends on sizes and on
whether addresses are multiples of 16 bytes, never on the order of threads.
"""
