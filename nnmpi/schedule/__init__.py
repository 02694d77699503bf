"""Pipeline schedules as values: generated, lowered, checked, simulated and drawn, with no MPI and no arrays.

    generators (naive.py ... pipedream.py)  ->  registry.make  ->  lower.lower  ->  check.check   before a run
                                                                                ->  simulate.simulate, render.render
                                                                                ->  the executor in nnmpi.parallel

Nothing is imported here: import the module that defines the name.
"""
