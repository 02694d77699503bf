"""Ranks in words, for messages that name the guilty."""

from collections.abc import Iterable


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks in words, neighbours joined: "rank 3", "ranks 0-2, 5"."""
    ordered = sorted(set(ranks))
    spans: list[tuple[int, int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    listed = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {listed}" if len(ordered) == 1 else f"ranks {listed}"
