"""2-D convolution of channels-last images, alone or with ReLU and max-pooling.

    conv2d, conv_relu_pool     -->  choose  -->  Conv2dFunction     -->  Algorithm
       check shapes and dtypes      by shape     allocates, saves        computes

    module                          library        method
    im2col: Im2col                  any            columns (pixels, kh kw c) @ kernels (kh kw c, o)
    depthwise: Depthwise            any            each channel alone: shifted images, weighted
    winograd_numpy: WinogradNumpy   NumPy          16 or 36 products (tiles, c) @ (c, o), for 3 x 3
    compiled_3x3: CompiledWinograd  NumPy, numba   16 of them in one compiled pass (`nnmpi.jit`)
    rounded: Rounded, ByOnednn      NumPy, oneDNN  the library's, of rounded arrays
    on_device: ByCudnn              CuPy, cuDNN    what cuDNN's heuristics choose

Start with `algorithm` (the specification, and an algorithm's interface) and `convolution`
(the operations, and the choice of an algorithm). Each algorithm has a picture at its head. NumPy's
algorithms pool by `backend.planes`.

To add an algorithm, subclass `Algorithm` and add its condition to `convolution.choose`, or for a
device to `on_device`. Compiled kernels are in nnmpi/backend/jit (numba) and nnmpi/backend/cuda.
"""
