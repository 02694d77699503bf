"""Collectives of arrays on a device: staged through the host, by MPI itself, by CUDA's IPC, by NCCL."""
