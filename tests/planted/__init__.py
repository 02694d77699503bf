"""Faults that are planted to see whether the tests find them; see `python -m tests.planted
--help`.
"""
