"""The doubles of NVIDIA's bindings, of which the engine uses one."""
