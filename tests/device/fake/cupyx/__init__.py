"""The double of CuPy's extensions, of which nnmpi uses none."""
