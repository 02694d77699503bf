"""All-reduce algorithms, one file each: pure functions from (rank, size) to steps."""
