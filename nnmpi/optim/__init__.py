"""Optimizers over lists of arrays, gradient clipping, and learning-rate schedules.

Reading order:

    optimizer      the base class: storage, state, steps, blocks
    updates        SGD, and optimizers by name
    adaptive       Adam, AdamW, RMSprop, Adagrad, Adadelta
    muon           Muon
    schedule       the learning rate as a function of the step
    clip           gradient norms and loss scaling

To add an optimizer, write a subclass of `Optimizer` and add its name in updates and to the option
`optimizer` in train/config. Its array operations run on NumPy and CuPy. A fused kernel is optional:
its arithmetic is then a method of `backend.plain`, which those of backend/jit and backend/cuda
override.
"""

from typing import TYPE_CHECKING, Any

from nnmpi.base.words import missing_from
from nnmpi.optim.adaptive import Adadelta, Adagrad, Adam, AdamW, RMSprop
from nnmpi.optim.clip import clip_by_global_norm, global_norm
from nnmpi.optim.muon import Muon
from nnmpi.optim.optimizer import Arrays, Optimizer
from nnmpi.optim.schedule import (
    ConstantRate,
    Cosine,
    MultiStep,
    OneCycle,
    RateSchedule,
    ReduceOnPlateau,
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
    "AdamW",
    "Arrays",
    "ConstantRate",
    "Cosine",
    "MultiStep",
    "Muon",
    "OneCycle",
    "Optimizer",
    "RMSprop",
    "RateSchedule",
    "ReduceOnPlateau",
    "StepDecay",
    "Warmup",
    "build",
    "clip_by_global_norm",
    "global_norm",
    "linear_scaling",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        missing_from(__name__, name)
