"""Optimizers over lists of arrays, gradient clipping, and learning-rate schedules.

To read, in this order: updates (SGD), adaptive (Adam and its kind), muon, optimizer (what they
share: storage, state, steps), blocks (why buffers are gone through in pieces), schedule (the
learning rate of a step), clip (and loss scales).

To add an optimizer: a subclass of `Optimizer` and its name in updates, which is then one of the
command, too. It runs by NumPy; a fused kernel goes into backend/cuda/updates.py (the interface) and
into jit/ and cuda/, each with its table.
"""

from nnmpi.optim.adaptive import Adadelta, Adagrad, Adam, AdamW, RMSprop
from nnmpi.optim.clip import clip_by_global_norm, global_norm
from nnmpi.optim.muon import Muon
from nnmpi.optim.optimizer import Arrays, Optimizer, Storage
from nnmpi.optim.schedule import (
    ConstantRate,
    Cosine,
    MultiStep,
    OneCycle,
    ReduceOnPlateau,
    Schedule,
    StepDecay,
    Warmup,
    linear_scaling,
)
from nnmpi.optim.updates import NAMES, SGD, build

__all__ = [
    "NAMES",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "RMSprop",
    "AdamW",
    "Arrays",
    "ConstantRate",
    "Cosine",
    "MultiStep",
    "Muon",
    "OneCycle",
    "Optimizer",
    "ReduceOnPlateau",
    "Schedule",
    "StepDecay",
    "Storage",
    "Warmup",
    "build",
    "clip_by_global_norm",
    "global_norm",
    "linear_scaling",
]
