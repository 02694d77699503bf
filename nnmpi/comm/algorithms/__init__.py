"""The algorithms of the collectives, one file each: pure functions from (rank, size) to steps."""
