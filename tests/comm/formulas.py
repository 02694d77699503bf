"""The costs of collectives in the literature: on equal links, for buffers that N divides."""


def formulas(N):
    """Return (latencies, buffers sent, buffers added) on the critical path, for N ranks.

    Without those that are exact for powers of two alone, if N is none.
    """
    levels, power, part = (N - 1).bit_length(), N.bit_length() - 1, 1 - 1 / N
    fold = 2**power < N
    moved = 1 - 2.0**-power + fold
    doubling = {
        ("reduce-scatter", "recursive-halving"): (power, part, part),
        ("all-gather", "recursive-doubling"): (power, part, 0),
        ("broadcast", "recursive-doubling"): (2 * power, 2 * part, 0),
        ("broadcast", "ring"): (power + N - 1, 2 * part, 0),
    }
    return {
        ("all-reduce", "ring"): (2 * N - 2, 2 * part, part),
        ("all-reduce", "tree"): (2 * levels, 2 * levels, levels),
        ("all-reduce", "ps"): (2 * N - 2, 2 * N - 2, N - 1),
        ("all-reduce", "halving-doubling"): (2 * (power + fold), 2 * moved, moved),
        ("reduce-scatter", "ring"): (N - 1, part, part),
        ("reduce-scatter", "tree"): (levels, part, part),
        ("all-gather", "ring"): (N - 1, part, 0),
        ("all-gather", "tree"): (levels, part, 0),
        ("broadcast", "tree"): (levels, levels, 0),
        ("all-to-all", "pairwise"): (N - 1, part, 0),
        ("all-to-all", "bruck"): (levels, sum(way.bit_count() for way in range(N)) / N, 0),
        ("neighbour-average", "gossip"): (min(N - 1, 2),) * 3,
        **({} if fold else doubling),
    }
