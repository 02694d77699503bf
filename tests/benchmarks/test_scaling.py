"""The scaling benchmark: crossovers where the formulas have them, its words, its files."""

import json
from math import log2
from pathlib import Path

import pytest

from benchmarks.scaling.command import main
from benchmarks.scaling.crossovers import best_by_ranks, crossovers, in_words
from benchmarks.scaling.sweep import SimulatedTime, flat, rank_counts
from nnmpi.comm.fitting.fit import save_fit
from nnmpi.units import format_seconds
from tests.comm.test_fit import make as make_fit

ALPHA, BETA, GAMMA = 2e-6, 8e-11, 2e-11


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_ring_overtakes_tree_where_their_formulas_meet(ranks: int) -> None:
    log, part = log2(ranks), (ranks - 1) / ranks
    # 2 log (alpha + M beta) + log M gamma  =  2 (N-1) alpha + 2 part M beta + part M gamma
    meet = 2 * (ranks - 1 - log) * ALPHA / ((log - part) * (2 * BETA + GAMMA))
    first, (found,) = crossovers(flat(ALPHA, BETA, GAMMA), ranks, ("ps", "tree", "ring"))
    assert (first, found.before, found.after) == ("tree", "tree", "ring")
    assert found.nbytes == pytest.approx(meet, rel=0.011)


def test_a_third_algorithm_between_two_is_found() -> None:
    # both between 32 KB and 256 KB, which the search for winners visits one after the other
    first, found = crossovers(flat(ALPHA, BETA, GAMMA), 32, ("tree", "hierarchical", "ring"))
    assert first == "tree"
    assert [crossover.after for crossover in found] == ["hierarchical", "ring"]
    assert 2**15 < found[0].nbytes < found[1].nbytes < 2**18
    assert in_words(first, found).startswith("tree to ")
    assert in_words(first, found).endswith(", then ring")
    assert in_words("tree", []) == "tree always"


def test_who_is_fastest_in_words() -> None:
    times = {2: (1, 1), 4: (3, 2), 8: (3, 3.5), 16: (4, 5), 32: (9, 6)}
    points = [
        SimulatedTime("m", 8, n, name, t) for n, pair in times.items() for name, t in zip("ab", pair, strict=True)
    ]
    assert best_by_ranks(points) == ["b to 4", "a from 8 to 16", "b from 32 on"]
    assert best_by_ranks(points[:4]) == ["b for all"]
    assert rank_counts(16) == [2, 3, 4, 6, 8, 12, 16]


def test_it_prints_tables_and_writes_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, picture = tmp_path / "a.json", tmp_path / "a.png"
    words = ["--max-ranks", "8", "--sizes", "1k,1MB", "--json", str(record), "--plot", str(picture)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "fastest, ranks a power of two: halving-doubling for all" in shown
    assert "     4 ranks: tree to 17.39 KB, then ring" in shown
    written = json.loads(record.read_text())
    assert len(written["rows"]) == 2 * 2 * 5 * 5  # machines, sizes, numbers of ranks, algorithms
    assert {crossover["after"] for crossover in written["crossovers"]} >= {"ring"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_fitted_machine_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fit.json"
    save_fit(make_fit(), file)  # 4 ranks on 2 nodes
    assert main(["--fit", str(file), "--max-ranks", "8", "--sizes", "1MB"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("fit: 4 ranks on Head Node under Open MPI 5.0.11, nodes of 2 ranks\n")
    row = next(line for line in shown.splitlines() if line.startswith("     4 "))
    assert row.split()[1:3] == format_seconds(make_fit().predict("ring", 2**20)).split()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--sizes 1k,x", "'x' is not a number of bytes"),
        ("--max-ranks 1", "'1' is not a number of ranks from 2"),
        ("--alpha fast", "'fast' is not a number of seconds"),
        ("--machine cray", "invalid choice: 'cray'"),
        ("--plot a.txt", "a.txt: the name must end in .png, .svg, .pdf"),
        ("--fit nowhere.json", "the fit nowhere.json cannot be read"),
        ("--json /nowhere/a.json", "--json /nowhere/a.json cannot be written: No such file or directory"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
