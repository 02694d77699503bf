"""What the header says of the machine."""

import pytest

from nnmpi.comm.group import Group
from nnmpi.train import header


@pytest.mark.mpi
def test_an_older_blas_is_told_once_with_its_nodes(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 are on the first node, where all is well on rank 0's; the rest are on a second one."""
    monkeypatch.setattr(header.platform, "node", lambda: f"node{group.rank // 2}")
    monkeypatch.setattr(header, "find_older", lambda: None if group.rank == 0 else "it is old")
    lines = header.blas_warnings(group)
    nodes = list(dict.fromkeys(f"node{rank // 2}" for rank in range(1, group.size)))
    wanted = [f"warning: on {', '.join(nodes[:4])}: it is old"] if nodes else []
    assert all(each == wanted for each in group.gather(lines)), lines


def test_the_right_blas_is_no_matter(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "find_older", lambda: None)
    assert header.blas_warnings(group) == []
