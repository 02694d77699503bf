"""Memory: what a pass through a model keeps for its backward pass, and how to keep less.

plan         a plan is a list of actions: forward, keep, backward, drop, out, in; checked, priced
             and drawn here
optimal      the plan of least time under a budget of bytes, by dynamic programming; and with layers
             that leave memory
layers       the layers of a chain one by one: run alone, with a graph of their own, and measured
recompute    a model that runs by a plan
store        where arrays lie that leave memory: activations for a while, an optimizer's state and
             weights for good
ledger       what of a rank's memory is for what: `nnmpi.memory.report()`

    forward = nnmpi.memory.RecomputedModel(model, budget=64 * 2**20)

Begin with plan; `python -m nnmpi.memory plan` shows some.
"""

from nnmpi.memory.ledger import MemoryReport, report
from nnmpi.memory.recompute import RecomputedModel

__all__ = ["MemoryReport", "RecomputedModel", "report"]
