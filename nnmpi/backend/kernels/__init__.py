"""Kernels: what operations compute with, behind one typed interface, whoever computes.

    ops/        one Function per operation: shapes, what is saved, and where gradients go
      |  kernels = kernels_for(x.data)              asked once per call, in the function that users call
      v
    Kernels     `base`: every kernel with its arguments and shapes, computed by NumPy or any library like it
      ^ derived from it
      |--- jit.kernels.CompiledKernels              some of them by numba, for NumPy's float32 inside `nnmpi.jit()`
      '--- cuda.kernels.DeviceKernels               all of them by CUDA C++, on a device

Read `base` first, then one family (`norm`, `softmax` ...), then how the two others override it.

An operation looks like this, whoever computes:

    class LayerNormFunction(Function):
        replayable = True
        def forward(self, x, scale, shift):
            y, residuals = self.kernels.layer_norm(self.xp, ...)          no if: the kernels know how
            self.saved = (residuals, ...)
            return y

    def layer_norm(x, scale, shift):
        kernels = kernels_for(require_floating("layer_norm", x).data)
        return with_kernels(kernels, LayerNormFunction(kernels), x, scale, shift)   float32 for float16, where needed

What a kernel does:

- Its first argument is `xp`, the arrays' module or a recorder's stand-in for it (see `backend.recording`). The base
  computes by functions of `xp` alone, so that a recorded step notes them one by one and replays them without Python in
  between; memory comes from `xp.empty`. Compiled functions and those of a device go through `recording.perform`, which
  notes each as one call.
- It returns new arrays; where a gradient has a place of its own (a parameter's), the kernel is given that and writes
  there.
- What the gradient's kernel needs of the forward one is returned as `Residuals`, a tuple whose content is known to
  these two alone: NumPy keeps what it has computed anyway, a device keeps less and computes again. The Function saves
  it.

To add a kernel: a method with types, shapes and a body in the family's file here, which serves everywhere; an override
in `jit/kernels.py` or `cuda/kernels.py` where a compiled one is faster, with the function itself beside it. To change
who computes when: `lookup`.

    lookup      `kernels_for`, and the context `nnmpi.jit`
    base        `Kernels`, all families together
    dense       around the products of dense layers: conversion, bias, ReLU, GELU and the error function
    norm        normalization of rows, and the sums of columns
    softmax     softmax along an axis, and the cross-entropy with it
    attention   scaled dot-product attention of many heads
    recurrent   long short-term memory, step after step
    tables      embeddings and dropout
    pooling     the largest or the mean of windows of images; `planes` is how NumPy finds the largest
    updates     optimizers' updates, where a device computes them
    sums        sums over many rows that keep their digits; blocks of rows that fit into a cache
"""
