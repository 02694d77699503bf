"""The mark `simulated` itself: every rank runs the body with what is its own, and one rank's
failure is the test's.
"""

import os
import subprocess
import sys

import pytest

from tests.harness.simulated import FEW, MANY
from tests.harness.test_runner import ROOT

PLANTED = """
import threading
import pytest

@pytest.mark.simulated(min_size=2, max_size=3)
def test_fails(group):
    assert group.rank != 1, "planted"

@pytest.mark.simulated(min_size=3, max_size=3)
@pytest.mark.timeout(1)
def test_hangs(group):
    threading.Event().wait()

@pytest.mark.simulated(min_size=2, max_size=2)
def test_deadlock(group):
    if group.rank:
        group.barrier()

@pytest.mark.simulated
@pytest.mark.needs_ranks(2, 33)
def test_sizes(group):
    pass
"""


@pytest.fixture
def alone(group):
    """A list of this rank's own."""
    local = [group.rank]
    yield local
    assert local == [group.rank, -group.rank]


@pytest.fixture
def twice(alone):
    """Hangs on the group by another fixture."""
    return alone


@pytest.mark.simulated
def test_each_rank_has_what_is_its_own(group, alone, twice, tmp_path):
    """Fixtures are made once for each rank, and ended there."""
    assert group.size in FEW + MANY
    assert twice is alone
    alone.append(-group.rank)
    assert group.gather([alone, tmp_path.name]) == [
        [[n, -n], f"rank-{n}"] for n in range(group.size)
    ]


def test_what_fails_and_hangs_is_told(tmp_path):
    """One rank's failure by its number; a rank that waits for ever is left behind at the test's
    time limit.
    """
    (tmp_path / "test_planted.py").write_text(PLANTED)
    command = [
        "-m",
        "pytest",
        "-p",
        "tests.harness.plugin",
        "-p",
        "tests.harness.simulated",
        "-q",
        "--quick",
    ]
    options = [
        "-c",
        str(ROOT / "setup.cfg"),
        "--rootdir",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    ran = subprocess.run(
        [sys.executable, *command, *options], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    text = ran.stdout
    assert ran.returncode == 1, text
    assert "test_fails[" in text and "(on rank 1 of " in text
    assert "test_hangs[3-ranks-seed-0]" in text and "Timeout" in text
    assert "test_deadlock[2-ranks-seed-0]" in text and "deadlock: no rank can continue" in text
    assert "test_sizes[2-ranks-seed-0]" not in text  # it passed
    assert "3 failed, 1 passed" in text


# What the harness gives to each rank.


@pytest.mark.mpi(min_size=2)
def test_each_rank_has_temporary_files_of_its_own(group, tmp_path):
    """In pytest's shared folder eight ranks that tidied up at once met one another's half-removed
    folders.
    """
    homes = group.gather(os.fspath(tmp_path.parents[1]))
    assert len(set(homes)) == group.size
    assert all(f"rank-{rank}-" in home for rank, home in enumerate(homes)), homes
