"""What the suites of benchmarks have in common: options, files, turns, memory, tables."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import command, launch, results, tables
from benchmarks.harness.launch import ROOT, describe, run_job
from benchmarks.harness.memory import peak_bytes, reset_peak, resident_bytes, traced
from benchmarks.harness.tables import GrowingTable, labelled, render, rewrite, spread
from benchmarks.harness.turns import quartiles, ratio, shuffled, steps_in_block, summary
from nnmpi.comm.group import Group
from nnmpi.command import HelpAsked
from nnmpi.errors import LaunchError, UsageError


def parser() -> command.CommandParser:
    found = command.CommandParser("bench", "Measures.")
    found.add_argument("--ranks", type=command.each(command.positive))
    found.add_argument("--sizes", type=command.each(command.nbytes))
    found.add_argument("--names", type=command.each(command.one_of("a", "b")))
    found.add_argument("--limit", type=command.positive_seconds)
    return found


def test_lists_are_read_word_by_word_and_each_value_comes_once() -> None:
    options = parser().parse(["--ranks", "2, 1,2,", "--sizes", "1k,4", "--names", "b,a", "--limit", "0.5"])
    assert (options.ranks, options.sizes, options.names, options.limit) == ((2, 1), (1024, 4), ("b", "a"), 0.5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "1,0"], "argument --ranks: '0' is not a whole number above 0 (see bench --help)"),
        (["--sizes", "3x"], "argument --sizes: '3x' is not a number of bytes"),
        (["--names", "a,c"], "argument --names: 'c' is unknown; the names are a, b (see"),
        (["--names", ","], "argument --names: ',' names nothing"),
        (["--limit", "inf"], "argument --limit: 'inf' is not a number of seconds above 0"),
        (["--rank", "1"], "unrecognized arguments: --rank 1"),
    ],
)
def test_what_is_wrong_with_a_word_is_said_behind_its_option(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parser().parse(words)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_help_comes_first_whatever_else_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HelpAsked, match="usage: bench"):
        parser().parse(["--ranks", "0", "-h"])
    assert command.run("bench", lambda: int(parser().parse(["--help"]) is None)) == 0
    assert "--limit" in capsys.readouterr().out


def test_errors_and_interruptions_have_their_status(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    def failed() -> int:
        raise LaunchError("it broke")

    assert command.run("bench", lambda: None) == 0 and command.run("bench", lambda: 1) == 1
    assert command.run("bench", interrupted) == 130
    assert command.run("bench", failed) == LaunchError("").exit_status
    assert capsys.readouterr().err == "bench: it broke\n"


def test_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    results.check_writable("--json", file)
    results.check_writable("--json", None)
    assert list(tmp_path.iterdir()) == []
    for value in (1, 2):
        results.write(file, {"rows": [value]})
        assert json.loads(file.read_text()) == {"rows": [value]}
    results.write(None, {})
    assert list(tmp_path.iterdir()) == [file]


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--json .*/missing/a\.json cannot be written: No such file or directory"):
        results.check_writable("--json", tmp_path / "missing" / "a.json")
    with pytest.raises(UsageError, match="is a folder; give the name of a file in it"):
        results.check_writable("--plot", tmp_path)


def test_rounds_have_everybody_in_a_changing_order() -> None:
    rounds = [shuffled("abcd", number) for number in range(50)]
    assert all(sorted(each) == list("abcd") for each in rounds)
    assert {each[0] for each in rounds} == set("abcd") and rounds == [shuffled("abcd", n) for n in range(50)]


def test_medians_quartiles_and_ratios() -> None:
    assert quartiles([3.0]) == [3.0, 3.0] and quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 4.0]
    assert summary("step", [1.0, 3.0]) == {"step_s": 2.0, "step_quartiles_s": [1.5, 2.5]}
    assert ratio("speed", [2.0, 8.0, 9.0], [1.0, 2.0, 3.0]) == {"speed": 3.0, "speed_quartiles": [2.5, 3.5]}
    assert steps_in_block(1.0, [0.1, 0.2, 9.0]) == 5 and steps_in_block(0.0, [1.0]) == 1
    assert steps_in_block(1.0, [1e-9], most=7) == 7


def test_tables_are_markdown_or_text() -> None:
    columns = (("name", "name"), ("ms", lambda row: tables.ms(row["s"])))
    rows = [{"name": "a", "s": 0.0017}, {"name": "long", "s": 0.1234}]
    assert render(columns, rows) == "| name | ms |\n|---|---|\n| a | 1.70 |\n| long | 123 |"
    assert render(columns, rows, markdown=False) == "name  ms\na     1.70\nlong  123"
    growing = GrowingTable(("name", -6, "name"), ("ms", 5, lambda row: tables.ms(row["s"])))
    assert (growing.head(), growing.line(rows[0])) == ("name     ms", "a      1.70")
    assert labelled([("a", 1), ("long", "b")]) == "a:    1\nlong: b"
    assert spread(1.7, (1.6, 1.8)) == "1.70 (1.60 to 1.80)"


def test_what_was_not_measured_is_a_dash() -> None:
    assert tables.number(None) == tables.percent(None) == tables.mib(None) == "-"
    assert (tables.number(1.0), tables.percent(0.107), tables.mib(2**20, 1)) == ("1.00", "10.7 %", "1.0")


def test_a_job_has_the_settings_and_its_failure_is_quoted() -> None:
    assert run_job(None, 2, {})["ranks"] == 2
    with pytest.raises(LaunchError, match=r"(?s)benchmarks.nowhere on 1 ranks ended with status .*No module named"):
        run_job("benchmarks.nowhere", 1, {})


def test_processes_of_pytorch_do_not_import_nnmpi_by_the_way() -> None:
    program = "import sys, benchmarks.harness.memory; sys.exit('nnmpi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_the_peak_is_forgotten() -> None:
    np.ones(2**24).sum()  # 128 MiB
    before = peak_bytes()
    reset_peak()
    assert before - peak_bytes() > 2**26
    assert abs(peak_bytes() - resident_bytes()) < 2**24


def test_memory_is_traced() -> None:
    with traced() as taken:
        kept = np.ones(100_000)
        np.ones(200_000).sum()
    assert kept.nbytes <= taken.kept_bytes < 1.01 * kept.nbytes + 10_000
    assert 3 * kept.nbytes <= taken.peak_bytes < 3.03 * kept.nbytes + 10_000


def test_tables_are_put_into_the_readme(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("a\n<!-- two -->\n<!-- end -->\nb\n<!-- one -->\nold\n<!-- end -->\n")
    rewrite(file, {"one": "| \\1 |", "two": "2"})
    assert file.read_text() == "a\n<!-- two -->\n2\n<!-- end -->\nb\n<!-- one -->\n| \\1 |\n<!-- end -->\n"
    with pytest.raises(UsageError, match="no place for the table 'three'; mark one by <!-- three -->"):
        rewrite(file, {"three": ""})


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00005432, "0.054"), (0.0017, "1.70"), (0.0222, "22.2"), (0.1234, "123")]
)
def test_milliseconds_have_three_digits(seconds: float, text: str) -> None:
    assert tables.ms(seconds) == text


@pytest.mark.mpi
def test_an_older_core_is_pointed_out(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_older", lambda: "it is old")
    assert describe(group).warnings == ("it is old",)
    monkeypatch.setattr(launch, "find_older", lambda: None)
    assert describe(group).warnings == ()


@pytest.mark.mpi
def test_all_ranks_are_on_this_machine(group: Group) -> None:
    found = describe(group)
    assert (found.ranks, found.nodes) == (group.size, 1)
    assert found.threads >= 1
    assert found.mpi.split()[-1][0].isdigit()
    assert len(set(group.gather(found.mpi))) == 1
