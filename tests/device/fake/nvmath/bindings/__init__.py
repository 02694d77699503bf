"""The doubles of NVIDIA's bindings."""
