"""Optimizers over lists of arrays, gradient clipping, and learning-rate schedules.

To read, in this order: sgd and adam (the updates, with their sources), optimizer (what they share: state, blocks,
steps), blocks (why buffers are gone through in pieces), schedule (the learning rate of a step), clip, loss_scale (for
fp16).

To add an optimizer: a subclass of `Optimizer` in a file of its own, its name and its options in names, and its name
among those of `train.config`. It then runs by NumPy; a fused kernel goes into backend/cuda/updates.py (the
interface) and into jit/ and cuda/, each with its table.
"""

from nnmpi.optim.adam import Adam, AdamW
from nnmpi.optim.clip import clip_by_global_norm, global_norm
from nnmpi.optim.names import NAMES, build
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.schedule import ConstantRate, Cosine, Schedule, StepDecay, Warmup, linear_scaling
from nnmpi.optim.sgd import SGD
from nnmpi.optim.storage import Arrays, Storage

__all__ = [
    "NAMES",
    "SGD",
    "Adam",
    "AdamW",
    "Arrays",
    "ConstantRate",
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
