"""Pipeline parallelism: a model's stages on a group's ranks, fed microbatch by microbatch.

    schedule (nnmpi.schedule)   the order of each rank's work: F0 F1 B0 F2 B1 ...
        |
    nnmpi.compose.walk          carries the instructions out, one after the other
        |            \\
    stage       Stage           computes: forward and backward of one microbatch; its saved values
    boundary    StageBoundary   sends and receives: activations forward, gradients back

Read `compose.walk` first, then stage and boundary. `memory.layers` measures the cost of each layer
of a chain, so that a model can be cut into stages of equal cost.

To change, open:

    the order of the work                             a schedule in `nnmpi.schedule`
    the values that pass from one stage to the next   boundary
    a microbatch's saved values                       stage
    the run of a batch, and the use of gradients      `compose.walk` and `compose.passes`
"""
