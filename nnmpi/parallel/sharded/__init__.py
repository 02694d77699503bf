"""Sharded layers: each rank computes a part, with exchanges between them.

    parallel.tensor            RULES: a function for each type of layer; `shard` walks the model
                               |
    linear  conv  elementwise  branches    the sharded layers, and their rules:
    cross_entropy              a loss of logits whose classes are sharded
                               |           (layer, LayerContext) -> (its replacement, Placement)
    context                    a rule's inputs
    ops.collectives            the exchanges, as operations of the graph with a backward pass

Read `tensor.placement` first (how ranks share an activation), then collectives, context, linear,
and `parallel.tensor`.

To change, open:

    the sharding of another type of layer    `linear.PRODUCTS`, a row, for a product; otherwise a
                                             what its class says of its `reach`; or a rule and a
                                             layer in the file of its family, and a line in RULES
    the exchange of a layer's input          its rule, by the methods of `LayerContext` (context)
    the layers that are sharded, and how     a model's table (`nn.sharding`), nothing here
"""
