"""The train command: from the words on the command line to a trained network in a run's folder.

From `python -m nnmpi.train` to the first update, in the order to read it:

    __main__            starts MPI, then calls cli.main
    cli                 words, a file and a resumed run become one Config; rank 0 reads, all get it
    config              every option, with its default, help and checks; options by name, as JSON and TOML have them
    session             one run: set up, restore, train, print the result, draw the curves
    auto_layout         --layout auto: measure, plan, race
    build               what the options ask for: layout, data, model, optimizer, schedule, trainer; RunContext
    inputs              data sets and loaders
    device              the backend, shared by the ranks of a device
    loop                epochs, evaluations, checkpoints, and stopping at a signal

What a run prints and leaves behind:

    header              the lines above a run
    log                 the console, and what is reported during a run
    metrics             metrics.jsonl and TensorBoard's files; its docstring explains every key
    curves              pictures of them
    trace               who did what in the first steps, for Perfetto
    folder              what lies where in a run's folder, its lock, and writing that survives a kill

    checkpoint          saving and restoring over all ranks
    checkpoint_files    a checkpoint's folder: written, verified and read by one process
    tensor_file         one safetensors file, an array at a time

Which file to change for which wish:

    a new option                    config (and whoever reads it); the help and the TOML name follow from the field
    a new model by name             config.MODELS and build.build_model
    one more number per step        compose.trainer.Totals, where trainers make them, log.Reporter.steps, metrics
    ... and in the epoch's lines    compose.trainer.Totals.breakdown or .communication
    one more line above a run       header
    more in a checkpoint            checkpoint.save and restore; run_state checks what state.json holds
"""
