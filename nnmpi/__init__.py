"""nnmpi: neural networks on MPI."""
