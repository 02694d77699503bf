"""Optimizers over lists of arrays, gradient clipping, and learning-rate schedules.

Reading order:

    optimizer      the base class: storage, state, steps, blocks
    updates        SGD, and optimizers by name
    adaptive       Adam and others whose steps do not grow with the gradient
    muon           Muon
    schedule       the learning rate as a function of the step
    clip           gradient norms and loss scaling

To add an optimizer, write a formula and a subclass of `Optimizer` that has it, name the class in
`__all__` of its module, which is what that offers here, and give it a row in updates: options,
their help, checkpoints and tests read it. The formula runs on NumPy; loops of numba and CUDA's
kernels are printed from one that is defined here.
"""

from nnmpi.base.words import offer
from nnmpi.optim.adaptive import *
from nnmpi.optim.clip import *
from nnmpi.optim.muon import *
from nnmpi.optim.optimizer import *
from nnmpi.optim.schedule import *
from nnmpi.optim.updates import *

__all__ = offer(__name__)
