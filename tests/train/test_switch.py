"""Options that are auto, on or off: all forms in which they can be written."""

import pytest

from nnmpi.train.cli import parse
from nnmpi.train.config import Config, assemble, decided, flatten


@pytest.mark.parametrize(
    ("words", "overlap", "fused"),
    [
        ("", "auto", "auto"),
        ("--overlap --no-fused-update", "on", "off"),
        ("--no-overlap", "off", "auto"),
        ("--fused-update", "auto", "on"),
        ("--overlap off --lr 0.1 --fused-update off", "off", "off"),
        ("--overlap=on --no-overlap", "off", "auto"),
        ("--no-overlap --overlap auto", "auto", "auto"),
    ],
)
def test_every_form_is_read(words: str, overlap: str, fused: str) -> None:
    parallel = parse(words.split()).parallel
    assert (parallel.overlap, parallel.fused_update) == (overlap, fused)


def test_truth_values_of_older_files_are_read() -> None:
    config = assemble({"overlap": True, "fused_update": False})
    assert (config.parallel.overlap, config.parallel.fused_update) == ("on", "off")
    assert flatten(config)["overlap"] == "on"
    assert flatten(Config())["fused_update"] == "auto"


def test_auto_is_undecided() -> None:
    assert [decided("auto"), decided("on"), decided("off")] == [None, True, False]
