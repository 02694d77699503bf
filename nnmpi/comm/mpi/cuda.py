"""What the MPI library says of itself about device pointers; see `device/cuda_aware.py` for who is asked besides."""

from __future__ import annotations

import ctypes

import mpi4py.MPI
from mpi4py import MPI

GPU_TYPE_CUDA = 0  # MPICH's MPIX_GPU_SUPPORT_CUDA


def support() -> tuple[bool, str]:
    """Return whether MPI can be given device pointers, and how it is known, as half a sentence.

    Asked in this order: the world's info key mpi_memory_alloc_kinds (MPI 4.1); MPIX_Query_cuda_support, which Open MPI
    and its relatives have; MPIX_GPU_query_support, which MPICH and its relatives have. Else the answer is no.
    """
    kinds = _alloc_kinds()
    if kinds is not None and "cuda" in kinds:
        return True, f"MPI's memory kinds are {kinds}"
    library = ctypes.CDLL(mpi4py.MPI.__file__)  # MPI's own symbols are not to be found by CDLL(None)
    if hasattr(library, "MPIX_Query_cuda_support"):
        if library.MPIX_Query_cuda_support():
            return True, "MPIX_Query_cuda_support says yes"
        return False, "MPI is not CUDA-aware: MPIX_Query_cuda_support says no"
    if hasattr(library, "MPIX_GPU_query_support"):
        flag = ctypes.c_int(0)
        if library.MPIX_GPU_query_support(GPU_TYPE_CUDA, ctypes.byref(flag)) == 0 and flag.value:
            return True, "MPIX_GPU_query_support says yes"
        return False, "MPI is not CUDA-aware: MPIX_GPU_query_support says no"
    known = f"its memory kinds are {kinds}" if kinds is not None else "it does not say"
    return False, f"MPI is not known to be CUDA-aware: {known}"


def _alloc_kinds() -> str | None:
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    return kinds
