"""Layers, and the module tree that they form.

Reading order:

    module                  attributes, names, initialization
    linear, ...             the layers
    container               sequences, residual blocks, parallel branches
    mode                    training and evaluation
    sharding                tables that assign a sharding to each layer
    summary, hooks          what each layer makes of a sample; functions that see its results
    chain                   a model as a list of layers to cut into stages
    compiled                recorded steps
    functional              says what to import instead of PyTorch's module of that name

A module's `__all__` is what it offers here. To add a layer, write a `Module` in its family's file,
or in its own, with its `reach` (see `sharding`) and `shape_after`. An `ActivationLayer` is an
`--activation`, too.
"""

from nnmpi.base.words import offer
from nnmpi.nn.activation import *
from nnmpi.nn.container import *
from nnmpi.nn.conv import *
from nnmpi.nn.experts import *
from nnmpi.nn.linear import *
from nnmpi.nn.llama import *
from nnmpi.nn.lora import *
from nnmpi.nn.mode import *
from nnmpi.nn.module import *
from nnmpi.nn.norm import *
from nnmpi.nn.recurrent import *
from nnmpi.nn.sharding import *
from nnmpi.nn.transformer import *

__all__ = offer(__name__)
