"""Model, optimizer and parallel strategies put together: one object that trains, a Trainer.

Read in this order:

    layout         Layout, GradientExchange, Numerics: a worker's options
    arrange        arrange: cuts and shards the model for that layout; the result is an Arrangement
    trainer        Trainer: train up to a point, evaluate, state, report, release; its reports
    worker         Worker: all ranks do every step together; a synchronous step from the batch to
                   the update
    passes         batches through the executor: losses, scores, gradients
    walk           a pass, instruction by instruction, and what is done around each; executor: the
                   stages and programs that all passes share; replayed: recording and replaying
    activations    activations within a limit; watch: buffers and parameters of users' models;
                   forecast: a pipeline's passes beside their simulation
    evaluation     loss and score over many batches
    losses         losses and scores by name; scalars: numbers that are read from a device once
    inference      the same loop without losses: a model's outputs
    stats          the numbers of a step, a pass and a segment
    exchange       gradient sums and updates: one interface, a class for each way
    state          the arrays of a sharded model, for checkpoints
    refusals       the features that exclude each other, and why

To change, open:

    another way of summing gradients              a class beside those of exchange, and its name
                                                  there
    another option for it, or for precision       layout, and its user: exchange or worker
    one more number in the report of a step       StepReport in stats, and Worker.step
    one more number in the report of a segment    SegmentReport in trainer, Totals in stats
    another pair that excludes each other         refusals

Nothing is imported here: import the module that defines the name.
"""
