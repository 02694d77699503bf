"""2-D convolution of channels-last images, alone or fused with bias, ReLU and max-pooling.

    conv2d, conv_relu, conv_relu_pool  -->  choose(...)  -->  Conv2d (the Function)  --forward, backward-->  Algorithm
         check shapes and dtypes            one of these        allocates, saves            computes

                     where arrays lie     what it multiplies
    Im2col           any library          columns (pixels, kh kw c) @ kernels (kh kw c, o), any stride and groups
    Im2colReluPool   NumPy                the same, and ReLU and pooling while a block's result is in the cache
    Depthwise        any library          nothing: shifted images times numbers, for a group of each channel
    WinogradNumpy    NumPy                16 or 36 places (.., tiles, c) @ (.., c, o) for 3 x 3 kernels
    CompiledWinograd NumPy, by numba      the same in one compiled pass (see `nnmpi.jit`)
    CompiledDirect   NumPy, by numba      no matrices: few input channels, with ReLU and pooling

Read `algorithm` (what is computed, and what an algorithm must do), `conv2d` (the operations, and
which algorithm is taken), and then any algorithm: each has a picture at its head. `ops.planes` is
how NumPy's algorithms pool.

To add an algorithm: subclass `Algorithm`, and say in `conv2d.choose` when it is taken. Kernels are
in nnmpi/backend/jit (numba).
"""
