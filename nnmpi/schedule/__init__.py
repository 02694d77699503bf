"""Pipeline schedules as values: generated, lowered, checked, simulated and drawn, with no MPI and no arrays.

    generators (naive.py ... pipedream.py)  ->  registry.make  ->  lower.lower  ->  check.check   before a run
                                                                                ->  simulate.simulate, render.render
                                                                                ->  parallel.pipeline.executor

To read, in this order: instruction (what a rank does at one moment, and messages), schedule (all ranks' programs), then
one_f_one_b or another generator, each a screen with its picture; lower adds messages and updates; engine runs programs
against a clock, which check, simulate and render look at; live counts what is kept in memory; partition cuts layers
into stages.

To add a schedule: a generator in a file of its own, its name in registry, and its name among those of `train.config`'s
option `pipeline`. The tests here take all schedules from the registry; tests/equivalence/cover.py has those whose
results must be the serial run's.

Nothing is imported here: import the module that defines the name.
"""
