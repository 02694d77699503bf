"""Optimizers over lists of arrays, gradient clipping, and learning-rate schedules."""

from nnmpi.optim.adam import Adam, AdamW
from nnmpi.optim.clip import clip_by_global_norm, global_norm
from nnmpi.optim.names import NAMES, build
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.schedule import Constant, Cosine, Schedule, StepDecay, Warmup, linear_scaling
from nnmpi.optim.sgd import SGD
from nnmpi.optim.storage import Arrays, Storage

__all__ = [
    "NAMES",
    "SGD",
    "Adam",
    "AdamW",
    "Arrays",
    "Constant",
    "Cosine",
    "Optimizer",
    "Schedule",
    "StepDecay",
    "Storage",
    "Warmup",
    "build",
    "clip_by_global_norm",
    "global_norm",
    "linear_scaling",
]
