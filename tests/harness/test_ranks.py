"""What the harness gives to each rank."""

import os
from pathlib import Path

import pytest

from nnmpi.comm.group import Group


@pytest.mark.mpi(min_size=2)
def test_each_rank_has_temporary_files_of_its_own(group: Group, tmp_path: Path) -> None:
    """In pytest's shared folder eight ranks that tidied up at once met one another's half-removed folders."""
    homes = group.gather(os.fspath(tmp_path.parents[1]))
    assert len(set(homes)) == group.size
    assert all(f"rank-{rank}-" in home for rank, home in enumerate(homes)), homes
