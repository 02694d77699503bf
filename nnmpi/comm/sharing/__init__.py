"""Memory that the ranks of a node share, and the all-reduce through it."""
