"""Offsets of clocks, planted ones and none."""

import time

import pytest

from nnmpi.comm.group import Group
from nnmpi.train.trace import offsets


@pytest.mark.both_worlds
def test_clocks_of_other_nodes_are_ahead(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what a busy machine allows; ranks of one node read the same clock."""
    planted = [100.0 * (rank % 2) for rank in range(group.size)]
    for nodes in ([rank % 2 for rank in range(group.size)], [0] * group.size):
        monkeypatch.setattr(group, "nodes", lambda nodes=nodes: nodes)
        found = offsets(group, lambda: time.perf_counter() + planted[group.rank])
        wanted = [ahead * (node > 0) for ahead, node in zip(planted, nodes, strict=True)]
        assert all(
            group.gather(
                all(abs(own - right) < 1 for own, right in zip(found, wanted, strict=True))
            )
        )
        assert group.gather(found) == [found] * group.size
