"""Pipeline schedules as values: generated, lowered, checked, simulated, drawn; no MPI.

    schedules.make  ->  lower.lower  ->  check.check   before a run
                                     ->  simulate.simulate_schedule, render.render
                                     ->  compose.executor

To read, in this order: schedule (what a rank does at one moment, messages, all ranks' programs),
then schedules (every one with its picture; the rule of those that turn is in there_and_back); lower
adds messages and updates; simulate runs programs against a clock, which lower, check and render
look at; partition cuts layers into stages.

To add a schedule: a function in schedules, and its name there and among those of `train.config`'s
option `pipeline`. The tests here take all schedules from there; tests/equivalence/cover.py has
those whose results must be the serial run's.

Nothing is imported here: import the module that defines the name.
"""
