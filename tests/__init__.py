"""The tests, in the same folders as the package; `harness` runs them under MPI."""
