"""What all suites of benchmarks have in common. A suite beside this folder says only what it
measures and shows.

In the order in which a run meets them:

    command.py   options as values, one sentence for what is wrong, the exit status
    parts.py     the command of a suite that measures several parts one by one, with --check and
                 --results
    launch.py    starting ranks from a program that is none, and getting back what they measured
    turns.py     contestants that take turns, so that a busy machine slows down all alike; medians,
                 quartiles, ratios
    memory.py    what a process or a block of code holds in memory
    machine.py   the machine's facts that belong to every result
    tables.py    columns and rows as Markdown or as text, and tables inside a README
    results.py   JSON files that are whole at any time
    plots.py     figures without a display

For another option that several suites have, change command.py; for another cell of tables,
tables.py. A new suite is a folder with a `__main__.py` (copy that of benchmarks/tensor), a
README.md, and what it measures.
"""
