"""Code shared by all benchmark suites: command lines, launching, timing, tables, files.

In the order in which a run meets them:

    command.py   readers of options, one sentence per error, the exit status
    parts.py     the command of a suite of several parts, with --check and --results
    launch.py    start ranks from a program that is not one, and return their measurements
    turns.py     interleave contestants, so that a busy machine slows all alike; medians,
                 quartiles, ratios
    memory.py    the peak of a process's memory
    machine.py   the machine's facts that belong to every result
    tables.py    columns and rows as Markdown or text, and tables inside a README
    results.py   JSON files, replaced atomically
    plots.py     colours of figures, and a check for matplotlib

A new suite is a folder with a `__main__.py` (copy benchmarks/tensor's), a README.md, and the code
that measures.
"""
