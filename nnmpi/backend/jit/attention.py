"""Softmax of attention's scores, and its derivative, on the bands of queries that `backend.kernels.attention` has.

Arrays are (batch, heads, keys, queries), a row per key; loops run along the queries.
"""

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.jit.scalar import exp

ZERO = np.float32(0)


def powers(p: Array, top: Array, total: Array, before: Array, has_before: bool, corner: int) -> None:
    """Turn scores into e^(score - top), in place, top being the largest of a query's scores and of those before."""
    count = p.shape[3]
    most = np.empty(count, np.float32)
    sums = np.empty(count, np.float32)
    for b in range(p.shape[0]):
        for h in range(p.shape[1]):
            for i in range(count):
                most[i] = before[b, h, i] if has_before else p[b, h, 0, i]  # every query sees the first key
                sums[i] = ZERO
            for k in range(p.shape[2]):
                hidden = max(k - corner, 0)
                scores, tops = p[b, h, k, hidden:], most[hidden:]
                for i in range(scores.size):
                    tops[i] = scores[i] if scores[i] > tops[i] else tops[i]
            for k in range(p.shape[2]):
                hidden = max(k - corner, 0)
                p[b, h, k, :hidden] = ZERO
                scores, tops, totals = p[b, h, k, hidden:], most[hidden:], sums[hidden:]
                for i in range(scores.size):
                    value = exp(scores[i] - tops[i])
                    scores[i] = value
                    totals[i] += value
            for i in range(count):
                top[b, h, i] = most[i]
                total[b, h, i] = sums[i]


def score_gradients(d: Array, p: Array, inner: Array) -> None:
    """d = (d - inner) * p."""
    count = d.shape[3]
    less = np.empty(count, np.float32)
    for b in range(d.shape[0]):
        for h in range(d.shape[1]):
            for i in range(count):
                less[i] = inner[b, h, i]
            for k in range(d.shape[2]):
                slopes, own = d[b, h, k], p[b, h, k]
                for i in range(count):
                    slopes[i] = (slopes[i] - less[i]) * own[i]
