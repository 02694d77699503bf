"""Layers of which each rank of a tensor group has a part, and the exchanges between those parts."""
