"""Runs with the fused update are resumed to the same bits."""

import pytest

from tests.train.jobs import arrays

pytestmark = pytest.mark.timeout(300)

WORDS = (
    "--backend numpy --model mlp --dropout 0.2 --batch-size 20 --optimizer adamw --lr-schedule"
    " constant"
)


@pytest.mark.mpi(min_size=2)
def test_it_goes_on_where_it_was(group, train, capsys):
    fused = train(f"{WORDS} --max-steps 6")
    text = capsys.readouterr().out
    broken = train(f"{WORDS} --max-steps 4")
    train(f"--resume {broken} --max-steps 6")
    if group.is_root:  # whose folders they are
        assert "fused with the update, through shared memory" in text
        assert arrays(broken) == arrays(fused)
