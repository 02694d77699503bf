"""Sharded layers, whose ranks compute a part each, and the exchanges between them.

    parallel.tensor            RULES: a function for each type of layer; `shard` goes through the
                               model, layer by layer |
    linear  conv  elementwise  branches    the sharded layers, with their rules:
    cross_entropy              a loss of logits whose classes are cut
                               |                (layer, LayerContext) -> (what replaces it, Placement)
    context                    what a rule gets
    ops.collectives            the exchanges, as operations of the graph with a backward pass

Read `tensor.placement` first (how an activation is spread over the ranks), then collectives,
context, linear, and `parallel.tensor`.

What you want to change, and where:

    shard another type of layer              a row in `linear.PRODUCTS` for a product; else its rule
                                             and layer in the file of its family, and a line in
                                             FOLLOWING or RULES
    how a layer's input gets to the ranks    its rule, by the methods of `LayerContext` (context)
    which layers are sharded, and how        a model's table (`nn.sharding`), nothing here
"""
