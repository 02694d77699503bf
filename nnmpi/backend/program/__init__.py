"""A recorded step as a value: a list of calls on arrays, which passes read.

record     what NumPy is asked to do while the step runs, as a list of `Call`
plan       lifetimes of results, and their places in one block of memory
replay     the calls on that memory
"""
