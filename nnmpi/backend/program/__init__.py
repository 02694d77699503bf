"""A recorded step as a value: a list of calls on arrays, which passes read and rewrite.

record     what NumPy is asked to do while the step runs, as a list of `Call`
tile       runs of row-wise calls, block by block in the cache
plan       lifetimes of results, and their places in one block of memory
replay     the calls on that memory
"""
