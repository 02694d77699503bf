"""Pipeline schedules as values: generated, lowered, checked, simulated and drawn, with no MPI and no arrays.

    registry.make  ->  lower.lower  ->  check.check   before a run
                                    ->  simulate.simulate_schedule, render.render
                                    ->  compose.executor

To read, in this order: instruction (what a rank does at one moment, and messages), schedule (all ranks' programs), then
registry (every schedule with its picture); lower adds messages and updates; engine runs programs against a clock, which
check, simulate and render look at; partition cuts layers into stages.

To add a schedule: a function in registry, and its name there and among those of `train.config`'s option `pipeline`.
The tests here take all schedules from the registry; tests/equivalence/cover.py has those whose results must be the
serial run's.

Nothing is imported here: import the module that defines the name.
"""
