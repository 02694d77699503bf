"""The verify command with language models, whose positions ranks share."""

import pytest

from nnmpi.comm.group import Group
from nnmpi.comm.simulated.world import simulate
from nnmpi.errors import LayoutError
from nnmpi.parallel.sequence.ring import RingAttention
from nnmpi.verify.cli import main

GPT = "--model gpt --features 12 --heads 3 --layers 1 --context 7 --batch-size 5 --samples 9 --steps 2 --microbatches 1"


def verify(words: str, ranks: int) -> list[bool]:
    return simulate(lambda group: main(words.split(), group), ranks)


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_shared_positions_are_the_serial_run(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert all(verify(f"{GPT} --dp 1 --sp 2 --sp-attention {way}", 2))
    assert "equal within the tolerance" in capfd.readouterr().out


def test_a_model_whose_layers_take_one_position_after_the_other(capfd: pytest.CaptureFixture[str]) -> None:
    words = "--model lstm --features 5 --context 4 --classes 7 --batch-size 5 --samples 9 --steps 2 --microbatches 2"
    assert all(verify(f"{words} --dp 1 --pp 2", 2))


def test_a_fault_among_positions_is_found(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The keys of the other ranks are passed over."""
    right = RingAttention.visible
    monkeypatch.setattr(
        RingAttention,
        "visible",
        lambda self, source, *how: right(self, source, *how) if source == self._group.rank else iter(()),
    )
    assert not any(verify(f"{GPT} --dp 1 --sp 2 --sp-attention ring", 2))
    assert "NOT EQUAL: loss of step 1, gradients of step 1" in capfd.readouterr().out


def test_more_ranks_than_heads_are_refused() -> None:
    def main_of(group: Group) -> None:
        with pytest.raises(LayoutError, match="heads"):
            main(f"{GPT} --dp 1 --sp 4".split(), group)

    simulate(main_of, 4)
