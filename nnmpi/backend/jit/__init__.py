"""Kernels that numba compiles for the CPU (extra `jit`), in float32: used inside `with nnmpi.jit():`.

Read in this order:

    kernels   `CompiledKernels`: what operations call, those of `backend.kernels` that are compiled
    table     every compiled function with its arguments; each is compiled, or read from disk, when it is first used
    loops                                            plain loops, each few passes over the data
    winograd, direct, tiling                         convolutions with a 3 x 3 kernel
    scalar    exp, tanh, log and maxima of single numbers, written so that loops over them are vectorized
    build     the compiler's flags, the cache on disk, and one process per node that compiles while others wait
    blas      the matrix product of NumPy's own BLAS, called from compiled code

A new compiled function: write the loop in the file of its family, give it a name and its arguments' types in `table`,
and override the kernel in `kernels`. Only `backend.kernels` imports the kernels, and only once `jit()` is
entered: they need numba. (`tiling`, which knows sizes alone, needs none, and convolutions read it.)
"""
