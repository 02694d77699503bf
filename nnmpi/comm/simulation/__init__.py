"""Working the steps of thousands of ranks off without MPI: messages, links, clocks. Used by `simulate` and `price`."""
