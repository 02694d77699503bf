"""Memory: the arrays that a pass saves for its backward pass, and how to save fewer.

plan         a plan is a list of actions: forward, keep, backward, drop, out, in; checked, priced
             and drawn here
optimal      the fastest plan within a budget of bytes, by dynamic programming; also with offloaded
             layers
layers       the layers of a chain one by one: each run with a graph of its own, and measured
recompute    a model that runs by a plan
fitting      which segments of a pipeline's stages are recomputed or moved, to fit a budget
store        the destination of offloaded arrays: activations for a while, an optimizer's state and
             weights for good
ledger       a rank's memory by purpose: `nnmpi.memory.report()`

    forward = nnmpi.memory.RecomputedModel(model, budget=64 * 2**20)

Begin with plan; `nnmpi memory plan` draws examples.
"""

from nnmpi.memory.ledger import MemoryReport, report
from nnmpi.memory.recompute import RecomputedModel

__all__ = ["MemoryReport", "RecomputedModel", "report"]
