"""Optional compiled kernels (extra `jit`), switched on by a context: `with nnmpi.jit():`.

    active    the context variable; the only module that others import, and the only one that needs no numba
    table     every kernel with its signature, compiled when it is first used
    build     the compiler's flags, the cache on disk, and one process per node that compiles while others wait
    blas      the matrix product of NumPy's own BLAS, called from compiled code
    the rest  the kernels: Python functions that numba can read, each pass over the data written as one loop

Nothing is imported here: without numba all but `active` cannot be loaded.
"""
