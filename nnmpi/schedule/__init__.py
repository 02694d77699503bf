"""Pipeline schedules as values: generated, lowered, checked, simulated, drawn; no MPI.

    schedules.make  ->  lower.lower  ->  check.check   before a run
                                     ->  simulate.simulate_schedule
                                     ->  compose.walk

Read in this order: schedule (instructions, messages, all programs), then schedules (each with
its picture; the rule of the schedules with halved backwards is in there_and_back). lower adds
messages and updates. simulate runs programs against a clock, and lower and check use its result.
partition cuts layers into stages.

To add a schedule: a function in schedules, its name there, and its name in the option `pipeline` of
`train.config`. The tests take all schedules from there; tests/equivalence/cover.py lists those that
must give the serial run's results.

Nothing is imported here: import the module that defines the name.
"""
