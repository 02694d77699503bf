"""Training through a parameter server: workers push gradients to rank 0 and pull weights from it.

    worker rank                                             rank 0
    compose -> PushPull.push(gradient) --- message -------> PushPull.poll -> ParameterServer.push
                                                                             ParameterServer.release: one update
    compose <- PushPull.pull() <---------- message -------- replies with the new weights

Read in this order:

    parameter_server    what the server does with gradients, and whom it answers when; sends no messages
    push_pull           a rank's part in it: the messages, and their layout

Who may go on, and with which part of which batch, is decided in `synchrony.consistency`. What a rank does in between
(compute a gradient, measure times, report) is in `compose`.

A segment is a run of batches between two points at which all ranks have the same weights: training begins each with
`open` and ends it with `finish`.
"""
