"""Two-dimensional convolution of channels-last images, alone or with the bias, ReLU and max-pooling that follow it.

    conv2d, conv_relu, conv_relu_pool  -->  choose(...)  -->  Conv2d (the Function)  --forward, backward-->  Algorithm
         check shapes and dtypes            one of these        allocates, saves            computes

                     where arrays lie     what it multiplies
    Im2col           any library          columns (pixels, kh kw c) @ kernels (kh kw c, o), any stride and groups
    Im2colReluPool   any library          the same, and ReLU and pooling while a block's result is in the cache
    WinogradNumpy    NumPy                16 places (16, tiles, c) @ (16, c, o) for 3 x 3 kernels
    CompiledWinograd NumPy, by numba      the same in one compiled pass (see `nnmpi.jit`)
    CompiledDirect   NumPy, by numba      no matrices: few input channels, with ReLU and pooling
    DeviceIm2col     CuPy                 columns by a kernel, products by cuBLAS
    DeviceCudnn      CuPy                 cuDNN's graphs

Read `algorithm` (what is computed, and what an algorithm must do), `conv2d` (the operations), `choice` (which
algorithm is taken, and why), and then any algorithm: each has a picture at its head. `columns` holds the memory for
im2col, `gradients` the parts of its backward pass; `ops.planes` is how NumPy's algorithms pool.

To add an algorithm: subclass `Algorithm` (or `DeviceAlgorithm`), and say in `choice` when it is taken. To change when
one is taken: `choice` alone. Kernels are in nnmpi/backend/jit (numba) and nnmpi/backend/cuda.
"""
