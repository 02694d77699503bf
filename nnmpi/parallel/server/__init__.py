"""Training through parameter servers: workers push gradients to the servers and pull weights from them.

    worker rank                                             server rank
    compose -> PushPull.push(gradient) --- message -------> ServerEndpoint.take -> ParameterServer.push
                                                                                   ParameterServer.release: one update
    compose <- PushPull.pull() <---------- message -------- ServerEndpoint <------ replies with the new weights

Read in this order:

    shards              which range of the flat parameters each server holds
    parameter_server    what a server does with gradients, and whom it answers when; sends no messages
    wire_format         the one kind of message, as bytes: a message id, some numbers, the values of a shard
    server_endpoint     a server's end of the messages: receives pushes and sends replies when it is polled
    push_pull           a rank's part in it all, as worker, as server or as both

Who may go on, and with which part of which batch, is decided in `synchrony.consistency`. What a rank does in between
(compute a gradient, measure times, report) is in `compose`.

What you want to change, and where:

    what becomes of a gradient that is late or stale     parameter_server, and `synchrony.consistency`
    what a worker and a server tell one another          `Push` and `Reply` in parameter_server, and wire_format
    which server holds which parameters                  shards
    when messages are sent and received                  push_pull and server_endpoint

A segment is a run of batches between two points at which all ranks have the same weights: training begins each with
`open` and ends it with `finish`.
"""
