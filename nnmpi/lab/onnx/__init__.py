"""ONNX files of models, from the operations of one forward pass.

    trace        records a forward pass: which operation had which inputs, in which line
    graph        the nodes and constants of a file, and which values have the channels first
    operators    a row for each operation: its nodes
    export       `to_onnx`: two graphs, of batches of 2 and of 3, become one for any batch

A model of any kind is recorded, not its module tree, so that a `forward` of one's own is exported
as a Sequential is.
"""
