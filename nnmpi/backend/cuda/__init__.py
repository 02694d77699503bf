"""Kernels in CUDA C++ for devices, compiled when they are first used.

    kernels        `DeviceKernels`: what operations ask for (see `backend.kernels`), one method for
                   each
    launch         the table of kernels, compiling for the dtypes at hand, what all calls check, and
                   the sizes of grids
    the rest       the sources: `common.cuh`, put before each `*.cu`

The sources include nothing, so CUDA's run-time compiler needs no path to headers, and they compile
for the host too: the tests run them there. Each kernel takes arrays of any size. No result depends
on which thread comes first: what is added up is so in an order that sizes decide, and whether
addresses are multiples of 16 bytes.
"""
