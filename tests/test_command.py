"""What commands have in common: of a job's ranks one speaks, whatever there is to say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnmpi.command import Parser
from nnmpi.errors import UsageError

ROOT = Path(__file__).parents[1]
SCHEDULE = "nnmpi.schedule --schedule gpipe --microbatches 2 --stages"


def ran(words: str, rank: int) -> tuple[int, str, str]:
    """Return status, output and errors of a command, started as one of two ranks."""
    place = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank)}
    done = subprocess.run(
        [sys.executable, "-m", *words.split()], env=os.environ | place, cwd=ROOT, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [f"{SCHEDULE} 2", "nnmpi.schedule --help", "nnmpi.comm cost --help"])
def test_the_first_rank_says_it(words: str) -> None:
    status, said, wrong = ran(words, 0)
    assert (status, wrong) == (0, "")
    assert "stages" in said or "usage: python -m nnmpi" in said
    assert ran(words, 1) == (0, "", "")


@pytest.mark.parametrize("words", [f"{SCHEDULE} none", "nnmpi.comm"])
def test_it_says_what_is_wrong(words: str) -> None:
    status, said, wrong = ran(words, 0)
    assert (status, said) == (2, "")
    assert wrong.startswith("nnmpi: ") and "--help)" in wrong and wrong.count("\n") == 1
    assert ran(words, 1) == (2, "", "")


def test_a_parser_raises() -> None:
    with pytest.raises(UsageError, match="see many --help"):
        Parser("many").parse_args(["--few"])
