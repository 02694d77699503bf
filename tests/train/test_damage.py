"""A few of the damages that `python -m tests.harness.damage` draws by the thousand."""

from pathlib import Path

import pytest

from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.errors import UsageError
from nnmpi.train.cli import main
from tests.harness.damage import Findings, damage_data, damage_run, try_layouts, try_words

pytestmark = pytest.mark.host_only("it is about files and words, not arrays")


def test_a_damaged_run_is_refused_or_an_older_checkpoint_is_used(tmp_path: Path) -> None:
    findings = Findings()
    damage_run(tmp_path / "run", 2, findings)
    assert not findings.wrong, "\n".join(findings.wrong)
    assert findings.ends["an older one"] > 10 and findings.ends["refused"] > 10


def test_damaged_data_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path / "cache"))
    findings = Findings()
    damage_data(tmp_path / "data", 8, findings)
    assert not findings.wrong, "\n".join(findings.wrong)
    assert findings.ends["refused"] > 10 and findings.ends["read"] > 5


def test_words_are_read_or_refused(tmp_path: Path) -> None:
    findings = Findings()
    try_words(tmp_path / "words", 60, findings)
    assert not findings.wrong, "\n".join(findings.wrong)
    assert findings.ends["refused"] > 30


def test_mixtures_of_options_are_equal_to_one_rank_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path / "cache"))
    findings = Findings()
    try_layouts(tmp_path / "it", 16, findings)
    assert not findings.wrong, "\n".join(findings.wrong)
    assert findings.ends["equal"] >= 5 and findings.ends["refused"] >= 5


def test_a_plan_with_a_rank_that_has_no_samples_is_refused(tmp_path: Path) -> None:
    """The others waited for it; a seed's mixture found that."""
    words = "--dataset iris --model mlp --max-steps 2 --quiet --reduction fixed --batch-size 1 --activation-memory 10KB"
    with pytest.raises(UsageError, match="ranks without samples cannot take part in a plan"):
        simulate(lambda group: main([*words.split(), "--out", str(tmp_path / "run")], group), 2)


@pytest.mark.parametrize("words", ["--zero 3 --dp 1 --tp 1", "--reduction fixed --dp 1 --pp 1"])
def test_what_is_derived_from_the_number_of_ranks_is_checked_too(words: str, tmp_path: Path) -> None:
    """A pipeline that nobody had asked for by name trained with ZeRO 3, and to other weights."""
    words = f"--dataset iris --model mlp --max-steps 2 --quiet {words} --out {tmp_path / 'run'}"
    with pytest.raises(UsageError, match="take zero 1 with pp 2|leave tp at 1"):
        simulate(lambda group: main(words.split(), group), 2)
