"""A kept corpus of bad inputs: a seed and a number make the same one again."""
