"""The train command: from a command line to a trained network in a run's folder.

From `nnmpi train` to the first update, in reading order:

    __main__       launch starts MPI, or simulated ranks
    cli            rank 0 merges command line, TOML file and resumed run into one Config, which all
                   ranks receive
    config         every option with default, help and checks; conversion to and from JSON and TOML
    session        a run from its options to its summary; fit: the same for a program's model
    run            Run: set up from options to train, or opened from a folder to evaluate
    derived        what the options become: layout, attention, microbatches, context
    build          its parts: model, optimizer, schedule, trainer
    inputs         data sets and loaders
    computing      the backend, devices shared by ranks, BLAS threads and numba
    loop           epochs, evaluations, checkpoints, and stopping on a signal
    measures       the metrics of an evaluation, and the one that decides on the best
    evaluating     a run's loss and metrics on data, for `nnmpi evaluate` and the result of fit

Output of a run:

    header         the lines printed before training
    log            the console and the reports during a run
    metrics        metrics.jsonl; its docstring explains every key
    trace          a timeline of the first steps, for Perfetto
    profile        the seconds of a step by layer
    folder         the files of a run's folder; writes survive a kill
    checkpoint     the state of a run, saved and restored over all ranks, atomically
    signature      shapes and meaning of a trained model's inputs and outputs

Where to change what:

    a new option                    config and its user; help and TOML name follow from the field
    a new model by name             config.MODELS and build.build_model
    another number per step         compose.stats.Totals, its producers in the trainers,
                                    log.Reporter.steps, metrics
    another line in the header      header
    more state in a checkpoint      checkpoint.Saver.save and restore
"""
