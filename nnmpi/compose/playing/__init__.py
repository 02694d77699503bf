"""Segments in virtual time: many workers played by one process. See `compose.virtual`."""
