"""A recorded step as a value: a list of calls on arrays, which passes read.

call       a call on arrays as a value
record     what NumPy is asked to do while the step runs, as a list of `Call`
plan       lifetimes of results, and their places in one block of memory
replay     the calls on that memory
compare    two recordings of a step: equal, or their first difference
"""
