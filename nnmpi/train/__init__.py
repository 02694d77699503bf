"""The train command: from the words on the command line to a trained network in a run's folder.

From `python -m nnmpi.train` to the first update, in the order to read it:

    __main__            calls cli.launch
    cli                 starts MPI; words, a file and a resumed run become one Config; rank 0 reads,
                        all get it
    config              every option, with its default, help and checks; options by name, as JSON
                        and TOML have them
    planner             --layout auto: measure, price, race
    run                 Run: what trains, set up from the options; or what was trained, opened for
                        evaluate and others
    build               its parts: layout, model, optimizer, schedule, trainer
    inputs              data sets and loaders
    computing           the backend, shared by the ranks of a device; BLAS and numba
    loop                epochs, evaluations, checkpoints, and stopping at a signal

What a run prints and leaves behind:

    header              the lines above a run
    log                 the console, and what is reported during a run
    metrics             metrics.jsonl; its docstring explains every key
    trace               who did what in the first steps, for Perfetto
    folder              what lies where in a run's folder, and writing that survives a kill
    checkpoint          where a run stands; saved and restored over all ranks, in a folder that is
                        whole or absent
    signature           what a trained model takes and gives

Which file to change for which wish:

    a new option                    config (and whoever reads it); the help and the TOML name follow
                                    from the field
    a new model by name             config.MODELS and build.build_model
    one more number per step        compose.stats.Totals, where trainers make them,
                                    log.Reporter.steps, metrics
    one more line above a run       header
    more in a checkpoint            checkpoint.Saver.save and restore
"""
