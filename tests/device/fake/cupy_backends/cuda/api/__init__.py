"""The doubles of CuPy's bindings."""
