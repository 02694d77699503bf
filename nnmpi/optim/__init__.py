"""Optimizers over lists of arrays, gradient clipping, and learning-rate schedules.

Reading order:

    optimizer      the base class: storage, state, steps, blocks
    updates        SGD, and optimizers by name
    adaptive       Adam, AdamW, RMSprop, Adagrad, Adadelta
    muon           Muon
    schedule       the learning rate as a function of the step
    clip           gradient norms and loss scaling

To add an optimizer, write a subclass of `Optimizer`, name it in `__all__` of its module, which is
what that offers here, and list it in updates: the option `optimizer` then knows it. Its array
operations run on NumPy and CuPy. A fused kernel is optional: its arithmetic is then a method of
`backend.plain`, which those of backend/jit and backend/cuda override.
"""

from nnmpi.base.words import offer
from nnmpi.optim.adaptive import *
from nnmpi.optim.clip import *
from nnmpi.optim.muon import *
from nnmpi.optim.optimizer import *
from nnmpi.optim.schedule import *
from nnmpi.optim.updates import *

__all__ = offer(__name__)
