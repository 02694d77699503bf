"""Softmax of attention's scores, and its derivative, on the bands of queries that `backend.kernels.attention` has.

Arrays are (batch, heads, keys, queries), a row per key; loops run along the queries. What a causal mask hides is not
looked at: it becomes 0.
"""

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.jit.scalar import exp

ZERO = np.float32(0)
ONE = np.float32(1)


def softmax(
    p: Array, rows: tuple[int, int], heads: tuple[int, int], queries: tuple[int, int], seen: int, causal: bool
) -> None:
    """Turn scores of some queries and the keys up to `seen` into probabilities, in place."""
    first, stop = queries
    top = np.empty(stop - first, np.float32)
    total = np.empty(stop - first, np.float32)
    for b in range(rows[0], rows[1]):
        for h in range(heads[0], heads[1]):
            band = p[b, h, :seen]
            scores = band[0, first:stop]  # of the first key, which every query sees
            for i in range(top.size):
                top[i] = scores[i]
                total[i] = ZERO
            for k in range(1, seen):
                hidden = max(k - first, 0) if causal else 0
                scores, most = band[k, first + hidden : stop], top[hidden:]
                for i in range(scores.size):
                    most[i] = scores[i] if scores[i] > most[i] else most[i]
            for k in range(seen):
                hidden = max(k - first, 0) if causal else 0
                band[k, first : first + hidden] = ZERO
                scores, most, sums = band[k, first + hidden : stop], top[hidden:], total[hidden:]
                for i in range(scores.size):
                    value = exp(scores[i] - most[i])
                    scores[i] = value
                    sums[i] += value
            for i in range(top.size):
                total[i] = ONE / total[i]
            for k in range(seen):
                scores = band[k, first:stop]
                for i in range(total.size):
                    scores[i] *= total[i]


def softmax_grad(
    d: Array,
    p: Array,
    inner: Array,
    rows: tuple[int, int],
    heads: tuple[int, int],
    queries: tuple[int, int],
    seen: int,
) -> None:
    """d = (d - inner) * p for some queries and the keys up to `seen`; d and inner are of these rows and heads alone."""
    first, stop = queries
    for b in range(rows[0], rows[1]):
        for h in range(heads[0], heads[1]):
            less = inner[b - rows[0], h - heads[0], first:stop]
            for k in range(seen):
                slopes, own = d[b - rows[0], h - heads[0], k, first:stop], p[b, h, k, first:stop]
                for i in range(less.size):
                    slopes[i] = (slopes[i] - less[i]) * own[i]
