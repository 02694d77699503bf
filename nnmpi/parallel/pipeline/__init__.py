"""Pipeline parallelism: a model's stages on a group's ranks, fed microbatch by microbatch.

    schedule (nnmpi.schedule)      what each rank does when: F0 F1 B0 F2 B1 ...
        |
    nnmpi.compose.executor         carries the instructions out, one after the other
        |            \
    stage       Stage              computes: forward and backward of one microbatch, and what is kept in between
    boundary    StageBoundary      sends and receives: activations forward, gradients back

Read the executor first, then stage and boundary. `profile` measures what each layer of a chain
costs, so that a model can be cut into stages of equal cost.

What you want to change, and where:

    the order of the work                              a schedule in `nnmpi.schedule`
    what may pass from one stage to the next           boundary
    what is kept of a microbatch until its backward    stage
    what becomes of gradients                          a `Caller` (see the executor); those of
                                                       `compose`
"""
