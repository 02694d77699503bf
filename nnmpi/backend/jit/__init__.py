"""Numba's kernels for float32 on the CPU (extra `jit`), used inside `with nnmpi.jit():`.

Read in this order:

    kernels    what operations call, and every compiled function with its arguments
    rows       loops that are printed from row formulas (`backend.trace`)
    loops      the others, each few passes over the data; exp, tanh, log and maxima that are
               vectorized
    conv3x3    convolutions with a 3 x 3 kernel
    build      the compiler's flags, the cache on disk, and one process per node that compiles while
               others wait

A new compiled function that is no row formula: write the loop in the file of its family, without
types, give it a name and its arguments' types in `kernels`, and call it in a method of
`NumbaKernels`. Only `backend.kernels` imports that, and only once `jit()` is entered: numba is
needed.
"""
