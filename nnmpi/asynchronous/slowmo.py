"""SlowMo: local SGD whose averages have a slow momentum of their own.

    weights   a --- steps of each rank, at the rate lr ---> w_i,   mean w
    outer     u = momentum * u + (a - w) / lr                 a = a - outer_lr * lr * u

The new `a` are the weights of all ranks. Unlike DiLoCo's, the displacement counts as a gradient, at
the rate of the last step. So the momentum keeps its meaning while a schedule changes the rate. The
ranks' own optimizers keep their state from average to average.

Source: Wang, Tantia, Ballas, Rabbat, "SlowMo: improving communication-efficient distributed SGD
with slow momentum" (2020).
"""

from nnmpi.asynchronous.averaging import LocalSGD
from nnmpi.backend.array import Array


class SlowMo(LocalSGD):
    """Local SGD with slow momentum: `outer_momentum`, and the slow rate `outer_lr`."""

    def outer_step(self, weights: Array, anchor: Array, momentum: Array) -> None:
        """See `LocalSGD.outer_step`; a rate of 0 has moved nothing."""
        lr = self.optimizer.lr or 1.0
        momentum *= self.outer_momentum
        momentum += (anchor - weights) / lr
        weights[...] = anchor - self.outer_lr * lr * momentum
