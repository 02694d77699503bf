"""Collectives of arrays that lie on a device.

staged     through page-locked host memory; any MPI and any algorithm can do it. The default
nccl       through NVIDIA's library, with a rank for each card; by name
"""
