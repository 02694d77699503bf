"""Offsets of clocks, planted ones and none."""

import time

import pytest

from nnmpi.train.trace import offsets


@pytest.mark.both_worlds
def test_clocks_of_other_nodes_are_ahead(group, monkeypatch):
    """Within what a busy machine allows; ranks of one node read the same clock."""
    planted = [100.0 * (rank % 2) for rank in range(group.size)]
    for nodes in ([rank % 2 for rank in range(group.size)], [0] * group.size):
        monkeypatch.setattr(group, "nodes", lambda nodes=nodes: nodes)
        result = offsets(group, lambda: time.perf_counter() + planted[group.rank])
        expected = [ahead * (node > 0) for ahead, node in zip(planted, nodes, strict=True)]
        assert all(
            group.gather(
                all(abs(local - right) < 1 for local, right in zip(result, expected, strict=True))
            )
        )
        assert group.gather(result) == [result] * group.size
