"""Model, optimizer and parallel strategies put together: one object that trains, a Trainer.

Read in this order:

    layout               Layout, GradientExchange, Numerics: what a user says of a worker
    arrange              arrange: cuts and shards the model for that layout; the result is an
                         Arrangement
    trainer              Trainer: train up to a point, evaluate, state, report, release; and what it
                         tells
    worker               Worker: all ranks do every step together; a synchronous step from the batch
                         to the update
    passes               batches through the executor: losses, scores and gradients, and what
                         becomes of the gradients
    executor             the one loop over the instructions of a step's program; replayed: recording
                         and replaying it
    losses               losses and scores by name, and numbers that are read from a device once
    inference            the same loop without losses: a model's outputs
    stats                what is told of a step, a pass and a segment
    exchange             what becomes of gradients: one interface, a class for each way
    state                the arrays of a model that lies on many ranks, for checkpoints
    asynchronous         AsynchronousWorker: ranks that need not be in step
                           through a parameter server, or every rank alone with weights averaged now and then
    refusals             which features do not go together, and why

Which file to change:

    another way of summing gradients                            a class beside those of exchange,
                                                                and its name there
    another option for it, or for precision                     layout, and exchange or worker,
                                                                which use it
    one more number in the report of a step                     StepReport in stats, and Worker.step
    one more number in the report of a segment                  SegmentReport in trainer, Totals in
                                                                stats
    another pair that does not go together                      refusals
    another way for ranks to go on without waiting              synchrony.sync, and a Coupling in
                                                                asynchronous

Nothing is imported here: import the module that defines the name.
"""
